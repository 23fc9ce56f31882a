// The strategies `tensor_bf16` and `tensor_f16`, which differ only in the element type.
#pragma once

#include <cstdint>

#include "kernels/cuda/matmul/hopper/strategy.cuh"

namespace tessera {

// Returns whether the operand is copied, because it is f32 or TMA cannot read it in place.
inline bool IsCopied16(const StoredMatrix& x) { return SizeOf(x.dtype) != 2 || !x.IsReadable(2); }

template <class T>
TensorOperand<T> HalfOperand(const StoredMatrix& x, CudaStream& stream) {
  if (!IsCopied16(x)) return x.InPlace<T>();
  const PreparedMemory memory = PrepareMatrix("16 bits", x, CopyScratch<T>(x), stream);
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (x.dtype == DType::kF32) return CopiedTo<T, float>(memory, x, stream);
  }
  return CopiedTo<T, T>(memory, x, stream);
}

inline Cost TensorCost16(const MatmulProblem& p) {
  return TensorCost(p, 256, 2, 1, IsCopied16(StoredA(p)), IsCopied16(StoredB(p)));
}

inline std::uint64_t TensorScratch16(const MatmulProblem& p) {
  // Both element types have the same size.
  const auto copy = [](const StoredMatrix& x) { return IsCopied16(x) ? CopyScratch<Half>(x) : 0; };
  return SumsScratch(p) + copy(StoredA(p)) + copy(StoredB(p));
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
  const auto a = HalfOperand<T>(StoredA(p), stream), b = HalfOperand<T>(StoredB(p), stream);
  MultiplyTensor16(p, a, b, /*whole_tiles=*/false, p.n, stream);
}

// The Work type for LaunchProductShares.
template <class T>
class TensorWork16 {
 public:
  explicit TensorWork16(const ProductShare& share)
      : share_(share), a_(HalfOperand<T>(StoredA(share.problem()), share.stream())) {}

  static constexpr double kRate = 370e12;
  static std::int64_t Round(const MatmulProblem& p, int multiprocessors) {
    return RoundOfTiles(p, multiprocessors, 128, 256);
  }
  void Multiply(const ProductPiece& piece) {
    const MatmulProblem part = ColumnsOf(share_.problem(), piece);
    MultiplyTensor16(part, a_, HalfOperand<T>(StoredB(part), share_.stream()), /*whole_tiles=*/true,
                     share_.problem().n, share_.stream());
  }
  void Finish() {}

 private:
  const ProductShare& share_;
  const TensorOperand<T> a_;
};

// Sets the fields that the two strategies share.
template <class T>
constexpr Strategy<MatmulProblem> Tensor16(Strategy<MatmulProblem> strategy) {
  strategy.source = kTensorSource;
  strategy.cost = TensorCost16;
  strategy.launch = MatmulTensor16<T>;
  strategy.shared = {.launch = LaunchProductShares<TensorWork16<T>>};
  strategy.scratch = TensorScratch16;
  return HopperMatmul(strategy);
}

}  // namespace tessera
