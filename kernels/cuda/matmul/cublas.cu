// Matmul with cuBLAS, the vendor's library, which is loaded at run time.
//
// Read in column-major order, the memory of a row-major matrix holds the transpose of the matrix,
// and c = op(a) op(b) becomes c' = op(b)' op(a)'. So the operands are swapped, and so are m and n;
// all pitches and transposes are unchanged.
//
// f32 is computed in f32: the library's default mode keeps at least the precision of its operands
// and uses TF32 only on request. Its pedantic mode is not used, because fewer kernels support it.
// f64 may use the tensor cores, which follow IEEE 754 for f64. f16 and bf16 are multiplied by the
// tensor cores, summed in f32, and rounded to the result's type once, at the end. 16-bit partial
// results, which the library allows by default, are disabled. The library chooses the order of the
// additions, and the error bounds hold for any order.
//
// A stack takes one call for each index of its outer axes. Each call computes the whole innermost
// axis.
//
// Cost for 1024 x 1024 x 1024, f32: 2^31 flops. At best each operand is read once, 8 MiB in total,
// and 4 MiB are written.
#include <algorithm>

#include "kernels/cuda/matmul/cublas.h"
#include "kernels/cuda/runtime/cublas_loader.h"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera {
namespace {

constexpr int MathMode(DType dtype) {
  return SizeOf(dtype) == 2 ? CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
                            : CUBLAS_DEFAULT_MATH;
}

constexpr cublasOperation_t Operation(bool transpose) {
  return transpose ? CUBLAS_OP_T : CUBLAS_OP_N;
}

// `gemm` is cublasSgemm or cublasDgemm.
template <class T, class Gemm>
void RunReal(const MatmulProblem& p, cublasHandle_t handle, Gemm gemm) {
  const T one = 1, zero = 0;
  CUBLAS_CHECK(gemm(handle, Operation(p.transpose_b), Operation(p.transpose_a), p.n, p.m, p.k, &one,
                    static_cast<const T*>(p.b), p.ldb, static_cast<const T*>(p.a), p.lda, &zero,
                    static_cast<T*>(p.c), p.n));
}

void RunHalves(const MatmulProblem& p, cublasHandle_t handle, const CublasApi& api) {
  const float one = 1, zero = 0;
  CUBLAS_CHECK(api.gemm_ex(handle, Operation(p.transpose_b), Operation(p.transpose_a), p.n, p.m,
                           p.k, &one, p.b, CublasType(p.dtype), p.ldb, p.a, CublasType(p.dtype),
                           p.lda, &zero, p.c, CublasType(p.out_dtype), p.n, CUBLAS_COMPUTE_32F,
                           CUBLAS_GEMM_DEFAULT));
}

// Computes a stack whose innermost axis has no negative stride. `Scalar` is the type of the sums.
template <class Scalar>
void RunStack(const MatmulProblem& p, cublasHandle_t handle, const CublasApi& api,
              const Stream& stream) {
  // The library's kernels use a grid index for each product. It is at most 65535.
  constexpr std::int64_t kMostProducts = 65535;
  const Scalar one = 1, zero = 0;
  const StackAxis& inner = p.stack_axes[p.stack_rank - 1];
  for (std::int64_t outer = 0; outer < p.stack && !stream.stopped(); outer += inner.extent) {
    for (std::int64_t i = 0; i < inner.extent; i += kMostProducts) {
      const MatmulProblem first = ProductOf(p, outer + i);
      CUBLAS_CHECK(api.gemm_strided_batched_ex(
          handle, Operation(p.transpose_b), Operation(p.transpose_a), p.n, p.m, p.k, &one, first.b,
          CublasType(p.dtype), p.ldb, inner.stride_b, first.a, CublasType(p.dtype), p.lda,
          inner.stride_a, &zero, first.c, CublasType(p.out_dtype), p.n, p.m * p.n,
          std::min(kMostProducts, inner.extent - i),
          p.dtype == DType::kF64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }
  }
}

void EnqueueOne(const MatmulProblem& p, cublasHandle_t handle, const CublasApi& api) {
  switch (p.dtype) {
    case DType::kF32:
      return RunReal<float>(p, handle, api.sgemm);
    case DType::kF64:
      return RunReal<double>(p, handle, api.dgemm);
    default:
      return RunHalves(p, handle, api);
  }
}

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  cublasHandle_t handle = stream.Cublas();
  const CublasApi& api = *LoadCublas();
  CUBLAS_CHECK(api.set_pointer_mode(handle, CUBLAS_POINTER_MODE_HOST));
  CUBLAS_CHECK(api.set_math_mode(handle, static_cast<cublasMath_t>(MathMode(p.dtype))));
  if (p.stack == 1) return EnqueueOne(p, handle, api);
  const StackAxis& inner = p.stack_axes[p.stack_rank - 1];
  if (std::min(inner.stride_a, inner.stride_b) < 0) {
    for (std::int64_t i = 0; i < p.stack && !stream.stopped(); ++i)
      EnqueueOne(ProductOf(p, i), handle, api);
  } else if (p.dtype == DType::kF64) {
    RunStack<double>(p, handle, api, stream);
  } else {
    RunStack<float>(p, handle, api, stream);
  }
}

}  // namespace

double CublasRoundoff(const MatmulProblem& p) {
  return SizeOf(p.dtype) == 2 ? TensorRoundoff(p) : MatmulChainRoundoff(p);
}

Cost CublasCost(const MatmulProblem& p) {
  Cost cost =
      MatmulCost(p, static_cast<std::uint64_t>(p.m * p.k) + static_cast<std::uint64_t>(p.k * p.n));
  // The library splits k if c has few elements.
  constexpr std::uint64_t kMostDepth = 4096;
  cost.depth = std::min(cost.depth, kMostDepth);
  return cost;
}

extern constexpr Strategy<MatmulProblem> kMatmulCublas = {
    .name = "cublas",
    .summary = "the library's gemm: f32 without TF32, 16-bit types on the tensor cores",
    .source = "NVIDIA cuBLAS",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64, DType::kF16, DType::kBF16),
    .deterministic = true,
    .roundoff = CublasRoundoff,
    .cost = CublasCost,
    .launch = Enqueue,
    .missing = CublasMissing,
    .vendor = true,
    .stacks = true,
};

}  // namespace tessera
