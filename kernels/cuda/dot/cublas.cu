// Dot with cuBLAS, NVIDIA's library, for comparison. The library is loaded at run time.
//
// The library writes its result to device memory, because its host mode would wait for the stream
// within the call. A kernel with one thread then converts the result into the Scalar that the host
// reads. cublasSdot accumulates in single precision, in an order that NVIDIA does not document. The
// only error bound that holds for every order grows with n.
//
// Cost at n = 2^20, f32: 8 MiB read; two of the library's kernels and one of our kernels.
#include <type_traits>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cublas_loader.h"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera {
namespace {

template <class T>
__global__ void StoreReal(const T* value, Scalar* result) {
  result->real = static_cast<double>(*value);
}

template <class T>
void Run(const DotProblem& p, CudaStream& stream) {
  auto* value = static_cast<T*>(stream.Scratch(sizeof(T)));
  if (p.n == 0) {
    CUDA_CHECK(cudaMemsetAsync(value, 0, sizeof(T), stream.handle()));
  } else {
    cublasHandle_t handle = stream.Cublas();
    const CublasApi& api = *LoadCublas();
    CUBLAS_CHECK(api.set_pointer_mode(handle, CUBLAS_POINTER_MODE_DEVICE));
    const auto *a = static_cast<const T*>(p.a), *b = static_cast<const T*>(p.b);
    if constexpr (std::is_same_v<T, float>) {
      CUBLAS_CHECK(api.sdot(handle, p.n, a, 1, b, 1, value));
    } else {
      CUBLAS_CHECK(api.ddot(handle, p.n, a, 1, b, 1, value));
    }
  }
  StoreReal<<<1, 1, 0, stream.handle()>>>(value, p.result);
  CUDA_CHECK_LAUNCH(StoreReal);
}

double Roundoff(const DotProblem& p) { return static_cast<double>(p.n) * AccRoundoff(p.dtype); }

Cost CostOf(const DotProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = 2 * n * SizeOf(p.dtype),
          .flops = 2 * n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(CeilLog2(p.n))};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  DispatchReal(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotCublas = {
    .name = "cublas",
    .summary = "cublasSdot or cublasDdot",
    .source = "NVIDIA cuBLAS",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .deterministic = true,
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = CublasMissing,
    .vendor = true,
};

}  // namespace tessera
