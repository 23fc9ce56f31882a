// Sums, lesson 5 of 8: warps add in registers.
//
// In lesson 4, each level of the tree writes to shared memory, waits at a barrier and reads again,
// although the 32 threads of a warp (its lanes) run together anyway. With a shuffle, a lane reads a
// register of another lane of its warp. A shuffle needs neither memory nor a barrier:
//
//   offset 16   lane l adds the value of lane l + 16 to its own
//   offset 8    lane l adds the value of lane l + 8
//   ...
//   offset 1    lane 0 has the sum of the warp
//
// Five shuffles give the sum of each warp. The block has a single barrier, after which its first
// warp adds the sums of the warps in the same way. For a long array, the tree takes a small part of
// the time; for a short one, the barriers matter.
//
// The result is right for every n and every block size that is a multiple of 32: all lanes of a
// warp take part in each shuffle. A lane that reads beyond lane 31 gets its own value, but no such
// sum reaches lane 0. Warps that a block does not have count as 0.
//
// The service's strategy `warp_shuffle` of Dot and Reduce is this kernel for every type.
//
// Strategy: kernels/cuda/dot/warp_shuffle.cu
//
// nvcc -std=c++20 -O3 -arch=native -o lesson sum_5_shuffles.cu && ./lesson
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

// Returns, in thread 0, the sum of the values of the block's threads. All of them must call it.
__device__ float SumOfBlock(float value) {
  const auto sum_of_warp = [](float v) {  // in lane 0
    for (int offset = 16; offset > 0; offset /= 2) v += __shfl_down_sync(~0u, v, offset);
    return v;
  };
  __shared__ float cells[32];  // one per warp; a block has at most 32 warps
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  value = sum_of_warp(value);
  if (lane == 0) cells[warp] = value;
  __syncthreads();  // the sum of every warp is in its cell
  return warp == 0 ? sum_of_warp(lane < kThreads / 32 ? cells[lane] : 0.0f) : 0;
}

// *total += the sum of x[0, n)
__global__ void SumShuffles(const float* x, std::int64_t n, double* total) {
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  float sum = 0;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += threads)
    sum += x[i];
  sum = SumOfBlock(sum);
  if (threadIdx.x == 0) atomicAdd(total, sum);
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
    SumShuffles<<<kBlocks, kThreads>>>(device_x, kCount, total);
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
