// Sums, lesson 4 of 8: each thread adds many elements before the tree begins.
//
// Lesson 3 is limited by its additions to the total, one per block, which the GPU does one after
// another. Without them, the other work of a block would be the limit: the GPU must start a block,
// and the block waits at 9 barriers (one after the loads, one for each of 8 levels), for only 256
// elements. Here, a launch always has 1024 blocks (the grid), about 8 for each of 132 SMs, so this
// work does not grow with n. A thread adds every T-th element to a local variable, which is in a
// register; T is the number of threads in the grid:
//
//   element   0  1  2  3 | 4  5  6  7 | 8  9          T = 4
//   thread    0  1  2  3 | 0  1  2  3 | 0  1
//
// As in lessons 1 to 3, adjacent threads read adjacent elements, so the 32 loads of a warp are one
// request of 128 bytes (they are coalesced). If each thread took a contiguous part of the array
// instead, each load would fetch a sector of 32 bytes for 4 bytes, and the other 28 would only help
// if they were still in a cache when the thread needs them.
//
// The result is right for every n: each element belongs to one thread, and a thread without
// elements adds 0. A thread adds 256 or 257 elements in single precision. In much longer arrays,
// the rounding error of this chain would grow, so a thread should add its sum to a double now and
// then, as the service does.
//
// The service's strategy `grid_stride` of Reduce divides the array in this way; `coarsened` of
// Reduce and Dot fixes the number of elements per thread instead.
//
// Strategy: kernels/cuda/dot/coarsened.cu
//
// nvcc -std=c++20 -O3 -arch=native -o lesson sum_4_coarsened.cu && ./lesson
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
constexpr unsigned kBlocks = 1024;

// *total += the sum of x[0, n)
__global__ void SumCoarsened(const float* x, std::int64_t n, double* total) {
  __shared__ float cells[kThreads];
  const unsigned t = threadIdx.x;
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;  // in the grid: T
  float sum = 0;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + t; i < n; i += threads) sum += x[i];
  cells[t] = sum;
  __syncthreads();  // the sum of every thread is in its cell
  for (unsigned live = kThreads; live > 1;) {
    const unsigned half = (live + 1) / 2;  // if live is odd, the middle cell is added later
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

  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  float ms = 0, fastest = INFINITY;
  for (int run = 0; run <= 10; ++run) {  // run 0 also loads the kernel and does not count
    CHECK(cudaEventRecord(begin));
    CHECK(cudaMemsetAsync(total, 0, sizeof *total));
    SumCoarsened<<<kBlocks, kThreads>>>(device_x, kCount, total);
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
