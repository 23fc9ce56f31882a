#include "kernels/problem/roundoff.h"

#include <bit>
#include <cmath>

namespace tessera {

double ReduceRoundoff(ReduceOp op, DType dtype, std::int64_t n, FoldSteps steps) {
  if (IsExact(op, dtype)) return 0;
  if (IsExactMean(op, dtype)) return 2 * kRoundoffF64;  // the sum and the quotient round once each
  const auto all = static_cast<double>(steps.narrow + steps.wide);
  switch (op) {
    case ReduceOp::kProduct:
      // Every multiplication contributes to the relative error, not only the multiplications on one
      // path.
      return std::expm1(static_cast<double>(n) * kRoundoffF64);
    case ReduceOp::kNormL2:
    case ReduceOp::kSumSquares:
      // All arithmetic is in double. The square and the root round once each. An i64 is rounded
      // when it is converted to double, and squaring doubles that error.
      return (all + 4) * kRoundoffF64;
    case ReduceOp::kVariance:
    case ReduceOp::kStd: {
      // All arithmetic is in double. A merge computes the difference of two means to within a few
      // roundings, and moves the mean by a fraction of that difference. The error of a merge,
      // including its effect on later differences, is therefore a few roundings of the squared
      // deviations that the merge adds. Since each element is on the smaller side of a merge at
      // most log2(n) times, all merges together add no more than log2(n) sums of squares.
      const int levels = n <= 1 ? 0 : std::bit_width(static_cast<std::uint64_t>(n - 1));
      return 40 * (1 + levels) * all * kRoundoffF64;
    }
    default:
      // SUM, MEAN and NORM_L1. One of the two additional roundings is the division of a mean; the
      // other is a margin.
      return SumRoundoff(dtype, {steps.narrow, steps.wide + 2});
  }
}

}  // namespace tessera
