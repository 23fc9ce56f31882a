// Product of matrices, lesson 4: load the next tiles while multiplying.
//
// Lesson 3 alternates between loading and multiplying, and a load takes hundreds of clocks. Here
// each step first issues the loads of the next tiles into registers, then multiplies the tiles that
// are in shared memory, and at the end stores what has arrived to a second pair of tiles. The pairs
// swap roles in each step, so one barrier per step is enough: a step never writes to the tiles that
// it reads.
//
// Loads are 16 bytes wide (float4), which takes a quarter of the instructions. The remaining limit
// is the rate of the arithmetic units, which multiply one pair of numbers at a time. Lesson 5 uses
// units that multiply whole tiles.
//
// The service's strategy `double_buffered` of Matmul does the same for every type and size, but
// copies in the background, without registers (cp.async).
//
// Strategy: kernels/cuda/matmul/double_buffered.cu
//
//   nvcc -std=c++20 -O3 -arch=native -o lesson product_4_double_buffer.cu && ./lesson
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
constexpr int kTile = 128, kDepth = 16, kThreads = 256;  // a block's tile of c, and a step along k
static_assert(kM % kTile == 0 && kN % kTile == 0 && kK % kDepth == 0);

__global__ void __launch_bounds__(kThreads) Product(const float* a, const float* b, float* c) {
  __shared__ alignas(16) float a_tile[2][kDepth][kTile + 4];
  __shared__ alignas(16) float b_tile[2][kDepth][kTile];
  const int thread = threadIdx.x, x = thread % 16 * 4, y = thread / 16 * 8;
  // The positions of the thread's first float4 in the tiles of a and b; the second is further down.
  const int a_row = thread / 4, a_k = thread % 4 * 4, b_k = thread / 32, b_column = thread % 32 * 4;
  a += (blockIdx.y * kTile + a_row) * kK + a_k;
  b += b_k * kN + blockIdx.x * kTile + b_column;
  float4 next_a[2], next_b[2];
  const auto load = [&](int first) {
    for (int i = 0; i < 2; ++i) {
      next_a[i] = *reinterpret_cast<const float4*>(a + i * 64 * kK + first);
      next_b[i] = *reinterpret_cast<const float4*>(b + (first + i * 8) * kN);
    }
  };
  const auto store = [&](int buffer) {
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 4; ++j) a_tile[buffer][a_k + j][a_row + i * 64] = (&next_a[i].x)[j];
      *reinterpret_cast<float4*>(&b_tile[buffer][b_k + i * 8][b_column]) = next_b[i];
    }
  };
  float sums[8][8] = {};
  load(0);
  store(0);
  __syncthreads();  // the first tiles are complete
  for (int first = 0, buffer = 0; first < kK; first += kDepth, buffer = 1 - buffer) {
    if (first + kDepth < kK) load(first + kDepth);
    for (int k = 0; k < kDepth; ++k) {
      float of_a[8], of_b[8];
      for (int i = 0; i < 8; ++i) of_a[i] = a_tile[buffer][k][y + i];
      for (int j = 0; j < 8; ++j) of_b[j] = b_tile[buffer][k][x + j / 4 * 64 + j % 4];
      for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 8; ++j) sums[i][j] += of_a[i] * of_b[j];
    }
    if (first + kDepth < kK) store(1 - buffer);
    __syncthreads();  // the next tiles are complete, and these have been read
  }
  c += (blockIdx.y * kTile + y) * kN + blockIdx.x * kTile + x;
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) c[i * kN + j / 4 * 64 + j % 4] = sums[i][j];
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
    Product<<<dim3(kN / kTile, kM / kTile), kThreads>>>(device_a, device_b, device_c);
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
