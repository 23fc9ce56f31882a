#include "kernels/bench/peers.h"

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
