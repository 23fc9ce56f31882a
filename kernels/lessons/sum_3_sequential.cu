// Sums, lesson 3 of 8: the threads that add are adjacent.
//
// Lesson 2 is still limited by the additions to the total, one per block, so this lesson saves
// instructions but no time: see "What the hardware counts" in README.md. The 32 threads of a warp
// execute each instruction together. If only some of them take a branch, the others are idle until
// it ends: this is divergence. In lesson 2, at strides of 2 or more, at most 8 threads of a warp
// add, but every warp in which a thread adds takes the full time. Here, other pairs are added:
// while L cells still hold sums (they are live), thread t adds cell t + L / 2 to its own. With 8
// threads:
//
//   live 8     0<------4  1<------5  2<------6  3<------7    threads 0 1 2 3 add
//   live 4     0<--2  1<--3                                  threads 0 1
//   live 2     0<1                                           thread  0
//
// Warps without an active thread need not execute the addition, but still wait at the barrier.
// Shared memory has 32 banks, each of which serves one word at a time. In lessons 2 and 3, the
// cells that one instruction of a warp reads are in different banks, so none waits for another.
//
// The result is right for every n and every block size: half is L / 2 rounded up, so live - half
// threads have a partner, and if L is odd, the middle cell is added in a later level. In a level, a
// thread writes only its own cell, and reads only that cell and one in the upper half, which no
// thread writes in this level; so one barrier per level is enough.
//
// The service's strategy `tree_sequential` of Dot is this kernel for products of every type, with
// two elements per thread.
//
// Strategy: kernels/cuda/dot/tree_sequential.cu
//
// nvcc -std=c++20 -O3 -arch=native -o lesson sum_3_sequential.cu && ./lesson
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Ends the program if a CUDA call fails.
#define CHECK(call)                                                       \
  if (const cudaError_t code = (call); code != cudaSuccess) {             \
    fprintf(stderr, "line %d: %s\n", __LINE__, cudaGetErrorString(code)); \
    exit(1);                                                              \
  }

constexpr unsigned kThreads = 256;  // per block

// *total += the sum of x[0, n). The grid has at least n threads.
__global__ void SumSequential(const float* x, std::int64_t n, double* total) {
  __shared__ float cells[kThreads];
  const unsigned t = threadIdx.x;
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + t;
  cells[t] = i < n ? x[i] : 0.0f;
  __syncthreads();  // every element of the block is in its cell
  for (unsigned live = kThreads; live > 1;) {
    const unsigned half = (live + 1) / 2;
    if (t < live - half) cells[t] += cells[t + half];
    __syncthreads();  // the sums of this level are written before the next level reads them
    live = half;
  }
  if (t == 0) atomicAdd(total, cells[0]);
}

int main() {
  constexpr std::int64_t kCount = (1 << 26) + 13, kBytes = kCount * sizeof(float);
  std::vector<float> x(kCount);      // values in [-0.5, 0.5)
  double exact = 0, magnitudes = 0;  // the reference, and the sum of |x[i]|
  for (unsigned i = 0; i < kCount; ++i) {
    x[i] = float((i * 2654435761u) >> 8) * 0x1p-24f - 0.5f;
    exact += x[i];
    magnitudes += std::abs(x[i]);
  }
  float* device_x = nullptr;
  double* total = nullptr;
  CHECK(cudaMalloc(&device_x, kBytes));
  CHECK(cudaMalloc(&total, sizeof *total));
  CHECK(cudaMemcpy(device_x, x.data(), kBytes, cudaMemcpyHostToDevice));

  constexpr auto kBlocks = static_cast<unsigned>((kCount + kThreads - 1) / kThreads);
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  float ms = 0, fastest = INFINITY;
  for (int run = 0; run <= 10; ++run) {  // run 0 also loads the kernel and does not count
    CHECK(cudaEventRecord(begin));
    CHECK(cudaMemsetAsync(total, 0, sizeof *total));
    SumSequential<<<kBlocks, kThreads>>>(device_x, kCount, total);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (run > 0) fastest = std::fmin(fastest, ms);
  }
  double sum = 0;
  CHECK(cudaMemcpy(&sum, total, sizeof sum, cudaMemcpyDeviceToHost));
  int khz = 0, bits = 0;
  CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, 0));
  CHECK(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, 0));
  const double error = std::abs(sum - exact) / magnitudes;
  const double rate = kBytes / (fastest * 1e-3), most = 2e3 * khz * bits / 8;  // twice per cycle
  printf("sum %.3f, error %.1e relative to the sum of |x|, %.0f us, %.0f GB/s, %.0f %% of peak\n",
         sum, error, fastest * 1e3, rate * 1e-9, 100 * rate / most);
  return error <= 1e-6 ? 0 : 1;
}
