// Sums, lesson 6 of 8: a thread loads 16 bytes at a time, and four times before it adds.
//
// The limit of lesson 5 is the number of bytes in flight. Memory takes hundreds of cycles to
// answer, and reaches its full rate only with enough requests in flight. A float4 load fetches four
// elements with one instruction. The loop starts four such loads before it adds the first, so a
// thread has 64 bytes in flight. Each of the four components has its own sum.
//
//   vector   0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13 14 15     a grid of 4 threads
//   thread   0  1  2  3 | 0  1  2  3 | 0  1  2  3 | 0  1  2  3
//
// The result is right for every n: vectors beyond the end count as 0, and the first threads of the
// grid add the n % 4 elements of the tail. A float4 load needs an address that is a multiple of 16
// bytes; cudaMalloc aligns x to 256 bytes.
//
// The service's strategy `single_pass` of Dot and Reduce loads like this, at any alignment.
//
// Strategy: kernels/cuda/dot/single_pass.cu
//
// nvcc -std=c++20 -O3 -arch=native -o lesson sum_6_vectors.cu && ./lesson
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
constexpr unsigned kBlocks = 512;   // 4 for each of 128 multiprocessors
constexpr int kInFlight = 4;        // loads per thread

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

// Returns the sum of a thread's elements of x[0, n). x is aligned to 16 bytes.
__device__ float SumOfThread(const float* x, std::int64_t n) {
  const auto* vectors = reinterpret_cast<const float4*>(x);
  const std::int64_t count = n / 4, threads = std::int64_t{gridDim.x} * kThreads;
  const std::int64_t me = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  float4 sum = {};
  for (std::int64_t i = me; i < count; i += kInFlight * threads) {
    float4 v[kInFlight] = {};
    for (int j = 0; j < kInFlight; ++j)
      if (i + j * threads < count) v[j] = vectors[i + j * threads];
    for (const float4& w : v) sum.x += w.x, sum.y += w.y, sum.z += w.z, sum.w += w.w;
  }
  if (me < n % 4) sum.x += x[4 * count + me];  // the tail: up to 3 elements
  return (sum.x + sum.y) + (sum.z + sum.w);
}

// *total += the sum of x[0, n)
__global__ void SumVectors(const float* x, std::int64_t n, double* total) {
  const float sum = SumOfBlock(SumOfThread(x, n));
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
    SumVectors<<<kBlocks, kThreads>>>(device_x, kCount, total);
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
