// Product of matrices, lesson 1: c = a b with one thread for each element of c.
//
// An element of c is the dot product of a row of a and a column of b. Each thread computes one
// element, so threads never wait for each other. Adjacent threads compute adjacent columns: in each
// step a warp reads 32 adjacent elements of b, which is one line of 128 bytes, and a single element
// of a, which all its threads share.
//
// The arithmetic is a small part of the work. For each multiplication a thread loads two elements,
// and nearly all of them come from a cache, because 4096 threads read each element of a and of b.
// The kernel is only as fast as the caches, and the arithmetic units mostly wait. Lesson 2 reads
// each element from the caches less often.
//
// The service's strategy `naive` of Matmul is this kernel for every type, size and transpose.
//
// Strategy: kernels/cuda/matmul/naive.cu
//
//   nvcc -std=c++20 -O3 -arch=native -o lesson product_1_naive.cu && ./lesson
#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>

#define CHECK(call)                                             \
  if (const cudaError_t error = (call); error != cudaSuccess) { \
    std::printf("%s: %s\n", #call, cudaGetErrorString(error));  \
    return 1;                                                   \
  }

// Rows of a and c, columns of b and c, and columns of a, which are also the rows of b.
constexpr int kM = 4096, kN = 4096, kK = 4096;
constexpr int kWidth = 32, kHeight = 8;  // threads of a block; a row of them is a warp

__global__ void Product(const float* a, const float* b, float* c) {
  const int row = blockIdx.y * kHeight + threadIdx.y, column = blockIdx.x * kWidth + threadIdx.x;
  if (row >= kM || column >= kN) return;  // the last blocks may extend beyond c
  float sum = 0;
  for (int k = 0; k < kK; ++k) sum += a[row * kK + k] * b[k * kN + column];
  c[row * kN + column] = sum;
}

int main() {
  const auto random = [](unsigned i) { return (i * 2654435761u >> 8) * 0x1p-24f - 0.5f; };
  std::vector<float> a(kM * kK), b(kK * kN), c(kM * kN);
  for (unsigned i = 0; i < a.size(); ++i) a[i] = random(i);
  for (unsigned i = 0; i < b.size(); ++i) b[i] = random(~i);
  float *device_a, *device_b, *device_c;
  CHECK(cudaMalloc(&device_a, a.size() * sizeof(float)));
  CHECK(cudaMalloc(&device_b, b.size() * sizeof(float)));
  CHECK(cudaMalloc(&device_c, c.size() * sizeof(float)));
  CHECK(cudaMemcpy(device_a, a.data(), a.size() * sizeof(float), cudaMemcpyDefault));
  CHECK(cudaMemcpy(device_b, b.data(), b.size() * sizeof(float), cudaMemcpyDefault));
  const auto run = [&] {
    const dim3 blocks((kN + kWidth - 1) / kWidth, (kM + kHeight - 1) / kHeight);
    Product<<<blocks, dim3(kWidth, kHeight)>>>(device_a, device_b, device_c);
  };
  run();  // the first run also loads the kernel
  CHECK(cudaDeviceSynchronize());
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 10; ++i) run();
  CHECK(cudaDeviceSynchronize());
  const std::chrono::duration<double> seconds = (std::chrono::steady_clock::now() - begin) / 10;
  CHECK(cudaMemcpy(c.data(), device_c, c.size() * sizeof(float), cudaMemcpyDefault));
  double worst = 0;  // of a sample of elements, compared with sums in double
  for (unsigned i = 0; i < 1000; ++i) {
    const int row = i * 2654435761u % kM, column = i * 40503u % kN;
    double exact = 0, terms = 0;
    for (int k = 0; k < kK; ++k) {
      const double term = static_cast<double>(a[row * kK + k]) * b[k * kN + column];
      exact += term;
      terms += std::fabs(term);
    }
    worst = std::fmax(worst, std::fabs(c[row * kN + column] - exact) / terms);
  }
  int processors, khz;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
  cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0);
  const double rate = 2.0 * kM * kN * kK / seconds.count();
  const double peak = 2.0 * 128 * processors * 1e3 * khz;  // 128 units in each, as on Hopper
  std::printf(
      "c[1, 2] = %f, worst error %.1e relative to the sum of |terms|, %.2f ms, %.1f TFLOP/s, %.0f "
      "%% of the chip's peak\n",
      c[kN + 2], worst, 1e3 * seconds.count(), rate / 1e12, 100 * rate / peak);
  return worst <= 1e-6 ? 0 : 1;
}
