// Sums, lesson 1 of 8: every thread adds one element to the total.
//
// A loop on a CPU takes one of the n elements after another. This program starts one GPU thread per
// element instead, in groups of 256, which are called blocks. `__global__` marks a kernel: a
// function that every thread runs. `Kernel<<<B, T>>>(...)` launches it on B blocks of T threads,
// and blockIdx.x and threadIdx.x tell a thread which one it is. `*total += x[i]` would lose terms:
// it reads the total, adds, and writes the sum back, and two threads that read the same total write
// over each other's sum. atomicAdd does these three steps as one, like std::atomic's fetch_add.
//
//   block     0                   1
//   thread    0  1  2  ... 255    0    1   ...
//   element   0  1  2  ... 255    256  257 ...       all of them -> *total, one at a time
//
// The result is right for every n: threads at n and beyond do nothing, and each of the others adds
// one element. The total is a double, because each addition rounds, and the rounding errors of
// 2^26 additions of floats could add up. The order of the additions differs from run to run, and
// floating-point addition is not associative, so the last bits may differ as well.
//
// In this repository, the service's strategy `atomic` of Reduce does this for every type, with at
// most 2^18 threads, each of which adds several elements before its atomic addition.
//
// Strategy: kernels/cuda/reduce/atomic.cu
//
// nvcc -std=c++20 -O3 -arch=native -o lesson sum_1_atomics.cu && ./lesson
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
__global__ void SumAtomics(const float* x, std::int64_t n, double* total) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < n) atomicAdd(total, x[i]);
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
    SumAtomics<<<kBlocks, kThreads>>>(device_x, kCount, total);
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
