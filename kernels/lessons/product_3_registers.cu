// Product of matrices, lesson 3: each thread computes 8 x 8 elements.
//
// In lesson 2 a thread reads two elements from shared memory for each multiplication. Here it reads
// 8 elements of a column of a's tile and 8 elements of a row of b's tile into registers, and
// multiplies every pair: 16 reads for 64 multiplications. These reads are four elements wide, so
// they take four instructions.
//
// A block of 256 threads computes 128 x 128 elements of c. A thread's 8 columns are two groups of
// four, 64 apart, because the threads of a warp then read adjacent groups of four and use all
// banks of shared memory. The tile of a is stored transposed, so that a thread's 8 rows are
// adjacent.
//
// All extents are multiples of the tile's extents here, which keeps the kernel short. While the
// threads copy the next tiles, none of them multiplies. Lesson 4 does both at the same time.
//
// The service's strategy `shared_tiled` of Matmul does this for every type, size and transpose.
// `register_tiled` also computes several elements per thread, but without shared memory.
//
// Strategy: kernels/cuda/matmul/shared_tiled_vectorized.cu
//
//   nvcc -std=c++20 -O3 -arch=native -o lesson product_3_registers.cu && ./lesson
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
  __shared__ alignas(16) float a_tile[kDepth][kTile + 4];  // 4: adjacent rows begin in other banks
  __shared__ alignas(16) float b_tile[kDepth][kTile];
  const int thread = threadIdx.x, x = thread % 16 * 4, y = thread / 16 * 8;
  a += blockIdx.y * kTile * kK;
  b += blockIdx.x * kTile;
  float sums[8][8] = {};
  for (int first = 0; first < kK; first += kDepth) {
    for (int i = thread; i < kTile * kDepth; i += kThreads) {
      a_tile[i % kDepth][i / kDepth] = a[i / kDepth * kK + first + i % kDepth];
      b_tile[i / kTile][i % kTile] = b[(first + i / kTile) * kN + i % kTile];
    }
    __syncthreads();  // both tiles are complete
    for (int k = 0; k < kDepth; ++k) {
      float of_a[8], of_b[8];
      for (int i = 0; i < 8; ++i) of_a[i] = a_tile[k][y + i];
      for (int j = 0; j < 8; ++j) of_b[j] = b_tile[k][x + j / 4 * 64 + j % 4];
      for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 8; ++j) sums[i][j] += of_a[i] * of_b[j];
    }
    __syncthreads();  // both tiles have been read
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
