// The strategies `tensor_bf16` and `tensor_f16`, which differ only in the element type.
#pragma once

#include <cstdint>

#include "kernels/cuda/matmul/hopper/strategy.cuh"

namespace tessera {

// Returns the operand, copied if it is f32 or if TMA cannot read the array in place. For `others`,
// see PrepareMatrix.
template <class T>
TensorOperand<T> HalfOperand(const void* data, DType dtype, std::int64_t rows, std::int64_t columns,
                             std::int64_t pitch, bool mn_major, std::int64_t others,
                             CudaStream& stream) {
  const auto memory = [&] {
    return PrepareMatrix<T>("16 bits", data, dtype, rows, columns, pitch, 1, others, stream);
  };
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (dtype == DType::kF32)
      return CopiedTo<T>(memory(), static_cast<const float*>(data), rows, columns, pitch, mn_major,
                         stream);
  }
  const auto* elements = static_cast<const T*>(data);
  if (!IsBoxAligned(data, rows, pitch * static_cast<std::int64_t>(sizeof(T))))
    return CopiedTo<T>(memory(), elements, rows, columns, pitch, mn_major, stream);
  return {elements, rows, columns, pitch, mn_major};
}

inline Cost TensorCost16(const MatmulProblem& p) {
  const bool rounds = SizeOf(p.dtype) != 2;
  return TensorCost(p, 256, 2, 1, rounds || !IsBoxAligned(p.a, p.m, p.lda * 2),
                    rounds || !IsBoxAligned(p.b, p.n, p.ldb * 2));
}

inline std::uint64_t TensorScratch16(const MatmulProblem& p) {
  const bool rounds = SizeOf(p.dtype) != 2;
  // Both element types have the same size.
  const auto copy = [&](const void* data, std::int64_t rows, std::int64_t columns,
                        std::int64_t pitch) {
    return rounds || !IsBoxAligned(data, rows, pitch * 2) ? CopyScratch<Half>(rows, columns) : 0;
  };
  return SumsScratch(p) +
         (p.transpose_a ? copy(p.a, p.k, p.m, p.lda) : copy(p.a, p.m, p.k, p.lda)) +
         (p.transpose_b ? copy(p.b, p.n, p.k, p.ldb) : copy(p.b, p.k, p.n, p.ldb));
}

template <class T>
TensorOperand<T> HalfOperandA(const MatmulProblem& p, CudaStream& stream) {
  return p.transpose_a ? HalfOperand<T>(p.a, p.dtype, p.k, p.m, p.lda, true, p.n, stream)
                       : HalfOperand<T>(p.a, p.dtype, p.m, p.k, p.lda, false, p.n, stream);
}
template <class T>
TensorOperand<T> HalfOperandB(const MatmulProblem& p, CudaStream& stream) {
  return p.transpose_b ? HalfOperand<T>(p.b, p.dtype, p.n, p.k, p.ldb, false, p.m, stream)
                       : HalfOperand<T>(p.b, p.dtype, p.k, p.n, p.ldb, true, p.m, stream);
}

// Multiplies prepared operands. The rows of c are c_pitch elements apart.
template <class T>
void MultiplyTensor16(const MatmulProblem& p, const TensorOperand<T>& a, const TensorOperand<T>& b,
                      bool whole_tiles, std::int64_t c_pitch, CudaStream& stream) {
  TensorProduct product = ProductOf(p.m, p.n, p.k, a, b, stream);
  product.whole_tiles = whole_tiles;
  RunBestPlan(product, tuning::kTiles16<T>, [&](auto tile, const TensorPlan& plan) {
    RunPlanAnyLayout<decltype(tile)>(p, a, b, plan, nullptr, stream, c_pitch);
  });
}

template <class T>
void MatmulTensor16(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  const auto a = HalfOperandA<T>(p, stream), b = HalfOperandB<T>(p, stream);
  MultiplyTensor16(p, a, b, /*whole_tiles=*/false, p.n, stream);
}

// The Work type for LaunchProductShares.
template <class T>
class TensorWork16 {
 public:
  explicit TensorWork16(const ProductShare& share)
      : share_(share), a_(HalfOperandA<T>(share.problem(), share.stream())) {}

  static constexpr double kRate = 370e12;
  static std::int64_t Round(const MatmulProblem& p, int multiprocessors) {
    return RoundOfTiles(p, multiprocessors, 128, 256);
  }
  void Multiply(const ProductPiece& piece) {
    const MatmulProblem part = ColumnsOf(share_.problem(), piece);
    MultiplyTensor16(part, a_, HalfOperandB<T>(part, share_.stream()), /*whole_tiles=*/true,
                     share_.problem().n, share_.stream());
  }
  void Finish() {}

 private:
  const ProductShare& share_;
  const TensorOperand<T> a_;
};

}  // namespace tessera
