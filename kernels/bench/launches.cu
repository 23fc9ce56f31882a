#include "kernels/bench/launches.h"

#include <cublas_v2.h>
#include <dlfcn.h>

#include <cub/device/device_reduce.cuh>
#include <cub/device/device_segmented_reduce.cuh>
#include <string>

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include "kernels/cuda/runtime/cublas_loader.h"
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

// Fma's loop is unrolled, because a short loop's counter would use a tenth of the issue slots.
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

__device__ std::uint64_t Nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void Hold(std::uint64_t ns) {
  const std::uint64_t begin = Nanoseconds();
  while (Nanoseconds() - begin < ns) {
  }
}

// Like the strategies, the benchmarks look for the libraries at run time
// (kernels/cuda/runtime/cublas_loader.h).
struct Api {
  decltype(&cublasSnrm2_64) snrm2;
  decltype(&cublasSasum_64) sasum;
  decltype(&cublasSgemmStridedBatched_64) sgemm_strided_batched;
};

template <class Function>
bool Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

const Api* Load() {
  static Api api{};
  const std::string version = "so." + std::to_string(CUBLAS_VER_MAJOR);
  void* blas = dlopen(("libcublas." + version).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (blas == nullptr) return nullptr;
  const bool found = Find(blas, "cublasSnrm2_v2_64", api.snrm2) &&
                     Find(blas, "cublasSasum_v2_64", api.sasum) &&
                     Find(blas, "cublasSgemmStridedBatched_64", api.sgemm_strided_batched);
  return found ? &api : nullptr;
}

const Api& Libraries() {
  static const Api* const api = Load();
  return *api;
}

// Returns the index at which a row begins.
struct RowBegin {
  std::int64_t length;
  __host__ __device__ std::int64_t operator()(std::int64_t row) const { return row * length; }
};

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

void LaunchHold(Stream& stream, double us) {
  Hold<<<1, 1, 0, Cuda(stream).handle()>>>(static_cast<std::uint64_t>(us * 1e3));
  CUDA_CHECK_LAUNCH(Hold);
}

bool HasPeers() { return LoadCublas() != nullptr && Load() != nullptr; }

void LaunchPeer(Peer peer, Stream& stream, const float* x, std::int64_t n) {
  CudaStream& cuda = Cuda(stream);
  auto* value = static_cast<float*>(cuda.Scratch(sizeof(float)));
  if (peer == Peer::kCublasNrm2 || peer == Peer::kCublasAsum) {
    cublasHandle_t handle = cuda.Cublas();
    CUBLAS_CHECK(LoadCublas()->set_pointer_mode(handle, CUBLAS_POINTER_MODE_DEVICE));
    const auto call = peer == Peer::kCublasNrm2 ? Libraries().snrm2 : Libraries().sasum;
    CUBLAS_CHECK(call(handle, n, x, 1, value));
    return;
  }
  auto* index = static_cast<std::int64_t*>(cuda.Scratch(sizeof(std::int64_t)));
  // Each CUB function is called twice. The first call returns how much temporary memory it needs.
  void* temporary = nullptr;
  std::size_t bytes = 0;
  const auto call = [&] {
    switch (peer) {
      case Peer::kCubSum:
        return cub::DeviceReduce::Sum(temporary, bytes, x, value, n, cuda.handle());
      case Peer::kCubMax:
        return cub::DeviceReduce::Max(temporary, bytes, x, value, n, cuda.handle());
      default:
        return cub::DeviceReduce::ArgMax(temporary, bytes, x, value, index, n, cuda.handle());
    }
  };
  CUDA_CHECK(call());
  temporary = cuda.Scratch(bytes);
  CUDA_CHECK(call());
}

void LaunchRowSums(Stream& stream, const float* x, std::int64_t rows, std::int64_t length) {
  CudaStream& cuda = Cuda(stream);
  auto* sums = static_cast<float*>(cuda.Scratch(static_cast<std::size_t>(rows) * sizeof(float)));
  const auto begins =
      thrust::make_transform_iterator(thrust::counting_iterator<std::int64_t>(0), RowBegin{length});
  void* temporary = nullptr;
  std::size_t bytes = 0;
  const auto call = [&] {
    return cub::DeviceSegmentedReduce::Sum(temporary, bytes, x, sums, rows, begins, begins + 1,
                                           cuda.handle());
  };
  CUDA_CHECK(call());
  temporary = cuda.Scratch(bytes);
  CUDA_CHECK(call());
}

void LaunchDots(Stream& stream, const float* a, const float* b, std::int64_t count,
                std::int64_t n) {
  CudaStream& cuda = Cuda(stream);
  auto* dots = static_cast<float*>(cuda.Scratch(static_cast<std::size_t>(count) * sizeof(float)));
  cublasHandle_t handle = cuda.Cublas();
  const CublasApi& blas = *LoadCublas();
  CUBLAS_CHECK(blas.set_pointer_mode(handle, CUBLAS_POINTER_MODE_HOST));
  CUBLAS_CHECK(blas.set_math_mode(handle, CUBLAS_DEFAULT_MATH));
  const float one = 1, zero = 0;
  CUBLAS_CHECK(Libraries().sgemm_strided_batched(handle, CUBLAS_OP_T, CUBLAS_OP_N, 1, 1, n, &one, a,
                                                 n, n, b, n, n, &zero, dots, 1, 1, count));
}

}  // namespace tessera::bench
