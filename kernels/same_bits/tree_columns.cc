#include "kernels/same_bits/tree_columns.h"

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

constexpr int Log2(std::int64_t power) { return power <= 1 ? 0 : 1 + Log2(power / 2); }

// The bound on sums with twice the digits of f64, as PairSum computes them, with `more` additional
// roundings. The lost part is itself a sum of all these rounding errors, each of at most u times
// its operand, and the result is rounded once more.
double PairRoundoff(const FoldSteps& steps, std::int64_t more) {
  const double all = static_cast<double>(2 * (steps.narrow + steps.wide + more)) * kRoundoffF64;
  return static_cast<double>(1 + more) * kRoundoffF64 + all * all;
}

// Returns the type whose accumulators are used for columns of dtype.
constexpr DType Widened(DType dtype, bool compensated) {
  return compensated && !IsInteger(dtype) ? DType::kF64 : dtype;
}

// `flops` is the number of operations per element (Reduce) or per pair of elements (Dot).
Cost CostOf(const Tree& tree, DType dtype, int operands, std::uint64_t flops,
            std::uint64_t value_bytes) {
  const FoldSteps steps = StepsOf(tree, dtype);
  const auto n = static_cast<std::uint64_t>(tree.n);
  const std::uint64_t sent = tree.chunks == 1 ? 0 : static_cast<std::uint64_t>(tree.chunks);
  return {
      .bytes = static_cast<std::uint64_t>(operands) * n * SizeOf(dtype) + 2 * sent * value_bytes,
      .flops = flops * n,
      .atomics = 0,
      .depth = static_cast<std::uint64_t>(steps.narrow + steps.wide)};
}

}  // namespace

FoldSteps StepsOf(const Tree& tree, DType dtype) {
  const auto size = static_cast<std::int64_t>(SizeOf(dtype));
  const std::int64_t rows =
      std::min(tree.chunk / (kTreeRowBytes / size), TreeTotalRows(tree.n, size));
  std::int64_t wide = (rows + kTreeSegmentRows - 1) / kTreeSegmentRows +
                      Log2(kTreeVectorBytes / size) + Log2(kTreeLanes);
  if (tree.chunks > 1) wide += (tree.chunks + kTreeLanes - 1) / kTreeLanes + Log2(kTreeLanes);
  return {std::min<std::int64_t>(rows, kTreeSegmentRows), wide};
}

double TreeRoundoff(const ReduceProblem& p, const Tree& tree, bool compensated) {
  const ReduceOp op = p.op;
  const DType dtype = p.dtype;
  const FoldSteps steps = StepsOf(tree, dtype);
  if (IsDeviation(op)) {
    // In a segment of c elements, the terms of a column's sum of squares add up to at most (2 + 2c)
    // times the sum of its squared deviations. Each term passes through at most c + 4 roundings.
    // ReduceRoundoff explains the bound on the later merges.
    const auto c = static_cast<double>(steps.narrow);
    const double levels = 1 + std::ceil(std::log2(static_cast<double>(tree.n) + 1));
    const double all =
        (4 * (c + 4) * (c + 1) + 40 * levels * static_cast<double>(steps.wide)) * kRoundoffF64;
    return compensated && dtype == DType::kF64 ? 4 * kRoundoffF64 + all * all : all;
  }
  if (!compensated || dtype != DType::kF64 || IsExact(op, dtype))
    return ReduceRoundoff(op, Widened(dtype, compensated), tree.n, steps);
  switch (op) {
    case ReduceOp::kProduct: {
      const double all = 4 * static_cast<double>(tree.n) * kRoundoffF64;
      return kRoundoffF64 + all * all;
    }
    case ReduceOp::kNormL2:
    case ReduceOp::kSumSquares:
      return PairRoundoff(steps, 4);
    default:
      return PairRoundoff(steps, 2);
  }
}

double TreeRoundoff(const DotProblem& p, const Tree& tree, bool compensated) {
  FoldSteps steps = StepsOf(tree, p.dtype);
  ++steps.narrow;  // the product
  if (compensated && p.dtype == DType::kF64) return PairRoundoff(steps, 0);
  return SumRoundoff(Widened(p.dtype, compensated), steps);
}

std::uint64_t TreeWideBytes(ReduceOp op, DType dtype, bool compensated) {
  std::uint64_t bytes = 0;
  DispatchDType(dtype, [&](auto t) {
    using T = decltype(t);
    const auto size = [&](auto kind) { bytes = sizeof(typename decltype(kind)::Wide); };
    if (compensated) {
      DispatchColumns<T, true>(op, size);
    } else {
      DispatchColumns<T, false>(op, size);
    }
  });
  return bytes;
}

Cost TreeCost(const DotProblem& p, const Tree& tree, std::uint64_t value_bytes) {
  return CostOf(tree, p.dtype, /*operands=*/2, /*flops=*/2, value_bytes);
}
Cost TreeCost(const ReduceProblem& p, const Tree& tree, std::uint64_t value_bytes) {
  return CostOf(tree, p.dtype, /*operands=*/1, /*flops=*/1, value_bytes);
}

}  // namespace tessera
