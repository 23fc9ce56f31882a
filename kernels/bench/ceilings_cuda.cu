#include "kernels/bench/ceilings_device.h"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera::bench {
namespace {

constexpr int kBlock = 512;
constexpr int kLoads = 8;

__global__ void Read(const uint4* data, std::size_t n, uint4* sink) {
  uint4 mix = {0, 0, 0, 0};
  const std::size_t threads = std::size_t{gridDim.x} * blockDim.x;
  std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kLoads - 1) * threads < n; i += kLoads * threads) {
    uint4 batch[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) batch[j] = __ldcs(data + i + j * threads);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      mix.x ^= batch[j].x;
      mix.y ^= batch[j].y;
      mix.z ^= batch[j].z;
      mix.w ^= batch[j].w;
    }
  }
  for (; i < n; i += threads) {
    const uint4 one = data[i];
    mix.x ^= one.x ^ one.y ^ one.z ^ one.w;
  }
  // This is never true for random data, but the compiler cannot know that.
  if ((mix.x & mix.y & mix.z & mix.w) == 0x9e3779b9u) *sink = mix;
}

// The loop is unrolled, because the counter of a short loop takes a tenth of the issue slots.
constexpr int kChains = 8;
constexpr int kSteps = 4096;

template <class T>
__global__ void Fma(T factor, T* sink) {
  T chain[kChains];
#pragma unroll
  for (int j = 0; j < kChains; ++j) chain[j] = static_cast<T>(threadIdx.x + j);
#pragma unroll 32
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int j = 0; j < kChains; ++j) chain[j] = chain[j] * factor + factor;
  }
  T sum = 0;
#pragma unroll
  for (int j = 0; j < kChains; ++j) sum += chain[j];
  if (sum == T(-1)) *sink = sum;
}

}  // namespace

void LaunchReadCuda(Stream& stream, const void* data, std::size_t bytes, void* sink) {
  CudaStream& cuda = Cuda(stream);
  const int blocks = 4 * cuda.device().info().multiprocessors;
  Read<<<blocks, kBlock, 0, cuda.handle()>>>(static_cast<const uint4*>(data), bytes / 16,
                                             static_cast<uint4*>(sink));
  CUDA_CHECK_LAUNCH(Read);
}

void LaunchCopyCuda(Stream& stream, void* to, const void* from, std::size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, Cuda(stream).handle()));
}

double LaunchFmaCuda(Stream& stream, bool double_precision, void* sink) {
  CudaStream& cuda = Cuda(stream);
  const int blocks = 16 * cuda.device().info().multiprocessors;
  if (double_precision) {
    Fma<double><<<blocks, 256, 0, cuda.handle()>>>(0.5, static_cast<double*>(sink));
  } else {
    Fma<float><<<blocks, 256, 0, cuda.handle()>>>(0.5f, static_cast<float*>(sink));
  }
  CUDA_CHECK_LAUNCH(Fma);
  return 2.0 * blocks * 256 * kChains * kSteps;
}

}  // namespace tessera::bench
