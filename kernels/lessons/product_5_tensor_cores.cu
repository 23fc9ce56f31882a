// Product of matrices, lesson 5: tensor cores.
//
// A warp multiplies 16 x 16 elements of a by 16 x 16 of b, in bf16, and adds the product to 16 x 16
// sums in f32. The elements, a fragment, are spread over the registers of its 32 threads, and
// nvcuda::wmma knows the pattern and loads fragments from shared memory. A block of 8 warps
// computes 128 x 128 elements of c. The next tiles are copied to shared memory in the background,
// without registers: of three pairs of tiles, one is being multiplied and two are on their way.
// Rows in shared memory have 16 bytes of padding, so a fragment's rows begin in different banks.
//
// Fragments pass through registers, which requires loads. hopper_product.cu avoids these loads. The
// service's strategy `tensor_mma` of Matmul is built in this way.
// Strategy: kernels/cuda/matmul/tensor_mma.cu
//   nvcc -std=c++20 -O3 -arch=native -o lesson product_5_tensor_cores.cu && ./lesson
#include <cuda_bf16.h>
#include <cuda_pipeline.h>
#include <mma.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>
#define CHECK(call)                                             \
  if (const cudaError_t error = (call); error != cudaSuccess) { \
    std::printf("%s: %s\n", #call, cudaGetErrorString(error));  \
    return 1;                                                   \
  }

constexpr int kM = 4096, kN = 4096, kK = 4096;  // a is kM x kK, and b is kK x kN
constexpr int kTile = 128, kDepth = 32, kThreads = 256, kStages = 3;
constexpr int kRowA = kDepth + 8, kRowB = kTile + 8;  // elements of a padded row
constexpr int kStageA = kTile * kRowA, kStage = kStageA + kDepth * kRowB;

__global__ void __launch_bounds__(kThreads)
    Product(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
  using namespace nvcuda::wmma;
  extern __shared__ __align__(128) __nv_bfloat16 tiles[];
  // The warp's part of the tile begins at [row, column].
  const int thread = threadIdx.x, row = thread / 128 * 64, column = thread / 32 % 4 * 32;
  a += blockIdx.y * kTile * kK;
  b += blockIdx.x * kTile;
  const auto fetch = [&](int first) {
    __nv_bfloat16* const to = tiles + first / kDepth % kStages * kStage;
    for (int i = thread; i < 512 && first < kK; i += kThreads) {  // 8 elements of a and 8 of b
      const int y = i / 4, x = i % 4 * 8;
      __pipeline_memcpy_async(to + y * kRowA + x, a + y * kK + first + x, 16);
      __pipeline_memcpy_async(to + kStageA + i / 16 * kRowB + i % 16 * 8,
                              b + (first + i / 16) * kN + i % 16 * 8, 16);
    }
    __pipeline_commit();
  };
  fragment<accumulator, 16, 16, 16, float> sums[4][2];
  for (int i = 0; i < 8; ++i) fill_fragment(sums[i / 2][i % 2], 0);
  for (int s = 0; s < kStages - 1; ++s) fetch(s * kDepth);
  for (int first = 0; first < kK; first += kDepth) {
    __pipeline_wait_prior(kStages - 2);
    __syncthreads();  // all threads' copies have arrived, and the previous tiles have been read
    fetch(first + (kStages - 1) * kDepth);
    const __nv_bfloat16* const stage = tiles + first / kDepth % kStages * kStage;
    for (int k = 0; k < kDepth; k += 16) {
      fragment<matrix_a, 16, 16, 16, __nv_bfloat16, row_major> of_a[4];
      fragment<matrix_b, 16, 16, 16, __nv_bfloat16, row_major> of_b[2];
      const __nv_bfloat16 *at = stage + row * kRowA + k, *bt = stage + kStageA + k * kRowB + column;
      for (int i = 0; i < 4; ++i) load_matrix_sync(of_a[i], at + i * 16 * kRowA, kRowA);
      for (int j = 0; j < 2; ++j) load_matrix_sync(of_b[j], bt + j * 16, kRowB);
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) mma_sync(sums[i][j], of_a[i], of_b[j], sums[i][j]);
    }
  }
  c += (blockIdx.y * kTile + row) * kN + blockIdx.x * kTile + column;
  for (int i = 0; i < 8; ++i)
    store_matrix_sync(c + i / 2 * 16 * kN + i % 2 * 16, sums[i / 2][i % 2], kN, mem_row_major);
}

int main() {
  const auto random = [](unsigned i) { return (i * 2654435761u >> 8) * 0x1p-24f - 0.5f; };
  std::vector<__nv_bfloat16> a(kM * kK), b(kK * kN);
  std::vector<float> c(kM * kN);
  for (unsigned i = 0; i < a.size(); ++i) a[i] = random(i);
  for (unsigned i = 0; i < b.size(); ++i) b[i] = random(~i);
  __nv_bfloat16 *device_a, *device_b;
  float* device_c;
  CHECK(cudaMalloc(&device_a, a.size() * sizeof a[0]));
  CHECK(cudaMalloc(&device_b, b.size() * sizeof b[0]));
  CHECK(cudaMalloc(&device_c, c.size() * sizeof(float)));
  CHECK(cudaMemcpy(device_a, a.data(), a.size() * sizeof a[0], cudaMemcpyDefault));
  CHECK(cudaMemcpy(device_b, b.data(), b.size() * sizeof b[0], cudaMemcpyDefault));
  const auto run = [&] {
    constexpr int kBytes = kStages * kStage * sizeof(__nv_bfloat16);
    cudaFuncSetAttribute(Product, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    Product<<<dim3(kN / kTile, kM / kTile), kThreads, kBytes>>>(device_a, device_b, device_c);
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
      const double term = double{float{a[row * kK + k]}} * float{b[k * kN + column]};
      exact += term;
      terms += std::fabs(term);
    }
    worst = std::fmax(worst, std::fabs(c[row * kN + column] - exact) / terms);
  }
  int processors, khz;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
  cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0);
  const double rate = 2.0 * kM * kN * kK / seconds.count();
  const double peak = 2.0 * 2048 * processors * 1e3 * khz;  // 2048 per clock each, as on Hopper
  std::printf(
      "c[1, 2] = %f, worst error %.1e relative to the sum of |terms|, %.2f ms, %.1f TFLOP/s, %.0f "
      "%% of the tensor cores' peak\n",
      c[kN + 2], worst, 1e3 * seconds.count(), rate / 1e12, 100 * rate / peak);
  return worst <= 1e-6 ? 0 : 1;
}
