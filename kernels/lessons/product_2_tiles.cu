// Product of matrices, lesson 2: tiles in shared memory.
//
// In lesson 1 each element of a and b is read from the caches by many threads of the same block.
// Here a block of 32 x 32 threads computes a tile of 32 x 32 elements of c together. It walks along
// k in steps of 32: its threads copy one tile of a and one tile of b to shared memory, one element
// each, and then every thread reads its row and its column from there. An element that a block has
// loaded is used 32 times, so the threads load 1/32 as many elements from the caches.
//
// Shared memory has 32 banks, which serve 32 different words at the same time. A warp reads 32
// adjacent elements of a row of the tile of b, one in each bank, and one element of a that all its
// threads share. Neither causes a conflict.
//
// Here each multiplication takes two reads from shared memory, and shared memory delivers 32 words
// per clock, whereas the arithmetic units could use 256. Lesson 3 keeps more in registers.
//
// The service's Matmul strategy `shared_tiled` combines these tiles with the registers of lesson
// 3, for every type, size and transpose.
//
// Strategy: kernels/cuda/matmul/shared_tiled.cu
//
//   nvcc -std=c++20 -O3 -arch=native -o lesson product_2_tiles.cu && ./lesson
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
constexpr int kTile = 32;

__global__ void Product(const float* a, const float* b, float* c) {
  __shared__ float a_tile[kTile][kTile], b_tile[kTile][kTile];
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * kTile + y, column = blockIdx.x * kTile + x;
  float sum = 0;
  for (int first = 0; first < kK; first += kTile) {
    // Elements beyond the ends of a and b count as 0.
    a_tile[y][x] = row < kM && first + x < kK ? a[row * kK + first + x] : 0;
    b_tile[y][x] = first + y < kK && column < kN ? b[(first + y) * kN + column] : 0;
    __syncthreads();  // both tiles are complete
    for (int k = 0; k < kTile; ++k) sum += a_tile[y][k] * b_tile[k][x];
    __syncthreads();  // both tiles have been read
  }
  if (row < kM && column < kN) c[row * kN + column] = sum;
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
    const dim3 blocks((kN + kTile - 1) / kTile, (kM + kTile - 1) / kTile);
    Product<<<blocks, dim3(kTile, kTile)>>>(device_a, device_b, device_c);
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
