// Matmul by cuBLAS: what the vendor's library makes of the same problem, loaded at run time.
//
// cuBLAS thinks in columns. A row-major matrix, read as columns, is its transpose; and c = op(a)
// op(b) read that way is c' = op(b)' op(a)'. So the operands change places, m and n change places,
// and every pitch and transpose stays as it is.
//
// f32 is computed in f32: CUBLAS_PEDANTIC_MATH keeps TF32 and emulation out, also where the
// environment asks for them. f64 may use the tensor cores, whose f64 is IEEE arithmetic. The order
// of the additions is the library's own, for which k * u still is a bound.
//
// Cost for 1024 x 1024 x 1024, f32: 2^31 flops; at best each operand is read once, 8 MiB, and 4 MiB
// are written.
#include "kernels/cuda/cublas_loader.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

constexpr cublasMath_t MathMode(DType dtype) {
  return dtype == DType::kF32 ? CUBLAS_PEDANTIC_MATH : CUBLAS_DEFAULT_MATH;
}

constexpr cublasOperation_t Operation(bool transpose) {
  return transpose ? CUBLAS_OP_T : CUBLAS_OP_N;
}

// gemm: cublasSgemm or cublasDgemm.
template <class T, class Gemm>
void Run(const MatmulProblem& p, CudaLane& lane, Gemm gemm) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {
    CUDA_CHECK(
        cudaMemsetAsync(p.c, 0, static_cast<std::size_t>(p.m * p.n) * sizeof(T), lane.stream()));
    return;
  }
  cublasHandle_t handle = lane.Cublas();
  const CublasApi& api = *LoadCublas();
  CUBLAS_CHECK(api.set_pointer_mode(handle, CUBLAS_POINTER_MODE_HOST));
  CUBLAS_CHECK(api.set_math_mode(handle, MathMode(p.dtype)));
  const T one = 1, zero = 0;
  CUBLAS_CHECK((api.*gemm)(handle, Operation(p.transpose_b), Operation(p.transpose_a), p.n, p.m,
                           p.k, &one, static_cast<const T*>(p.b), p.ldb, static_cast<const T*>(p.a),
                           p.lda, &zero, static_cast<T*>(p.c), p.n));
}

double Roundoff(const MatmulProblem& p) { return static_cast<double>(p.k) * UnitRoundoff(p.dtype); }

Cost CostOf(const MatmulProblem& p) {
  const auto m = static_cast<std::uint64_t>(p.m), n = static_cast<std::uint64_t>(p.n);
  const auto k = static_cast<std::uint64_t>(p.k);
  return {.bytes = (m * k + k * n + m * n) * SizeOf(p.dtype),
          .flops = 2 * m * n * k,
          .atomics = 0,
          .depth = k};
}

void Enqueue(const MatmulProblem& p, Lane& lane) {
  if (p.dtype == DType::kF32) {
    Run<float>(p, Cuda(lane), &CublasApi::sgemm);
  } else {
    Run<double>(p, Cuda(lane), &CublasApi::dgemm);
  }
}

}  // namespace

extern const Strategy<MatmulProblem> kMatmulCublas;
constexpr Strategy<MatmulProblem> kMatmulCublas = {
    .name = "cublas",
    .summary = "cublasSgemm without TF32, or cublasDgemm",
    .source = "NVIDIA cuBLAS",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .min_compute_capability = kBaseComputeCapability,
    .deterministic = true,
    .limits = {.block_size = {}, .grid_size = {}, .items_per_thread = {}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = CublasMissing,
};

}  // namespace tessera
