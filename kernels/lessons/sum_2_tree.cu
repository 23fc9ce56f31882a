// Sums, lesson 2 of 8: the threads of a block add their elements as a tree.
//
// Lesson 1 is limited by its single address, where n additions wait for each other. A GPU has many
// processors (SMs). A block runs on one of them, which has a small, fast memory that the threads of
// the block share. Here, they first add their elements there, so that only one addition per block
// is atomic. In a tree, many threads add at the same time. In this drawing for 8 threads, `a<b`
// means that thread a adds cell b to its own cell a, and each row is a level of the tree:
//
//   stride 1   0<1 2<3 4<5 6<7     threads 0 2 4 6 add
//   stride 2   0<--2   4<--6       threads 0   4
//   stride 4   0<------4           thread  0
//
// The result is right for every n and every block size. If the block size is not a power of 2, a
// cell without a partner is added in a later level. In a level, a thread writes only its own cell,
// and reads only that cell and one that no thread writes in this level. One barrier per level is
// therefore enough: at __syncthreads, no thread of the block continues until all have arrived. A
// thread at n or beyond must not return early, as it could in lesson 1: its cell would hold no
// value, but another thread adds that cell. It stores 0 and takes part in every level. The blocks
// still add to the total in any order, so the last bits may differ from run to run; lesson 7
// changes that.
//
// The service's strategy `tree_interleaved` of Dot is this kernel for products of every type, with
// two elements per thread.
//
// Strategy: kernels/cuda/dot/tree_sequential.cu
//
// nvcc -std=c++20 -O3 -arch=native -o lesson sum_2_tree.cu && ./lesson
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
__global__ void SumTree(const float* x, std::int64_t n, double* total) {
  __shared__ float cells[kThreads];
  const unsigned t = threadIdx.x;
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + t;
  cells[t] = i < n ? x[i] : 0.0f;
  __syncthreads();  // every element of the block is in its cell
  for (unsigned stride = 1; stride < kThreads; stride *= 2) {
    if (t % (2 * stride) == 0 && t + stride < kThreads) cells[t] += cells[t + stride];
    __syncthreads();  // the sums of this level are written before the next level reads them
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
    SumTree<<<kBlocks, kThreads>>>(device_x, kCount, total);
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
