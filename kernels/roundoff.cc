#include "kernels/roundoff.h"

#include <bit>
#include <cmath>

namespace tessera {

double ReduceRoundoff(ReduceOp op, DType dtype, std::int64_t n, FoldSteps steps) {
  if (IsExact(op, dtype)) return 0;
  if (IsExactMean(op, dtype)) return 2 * kRoundoffF64;  // the sum and the quotient round once each
  const auto all = static_cast<double>(steps.narrow + steps.wide);
  switch (op) {
    case ReduceOp::kProduct:
      // Every multiplication enters the relative error, not only those on one path.
      return std::expm1(static_cast<double>(n) * kRoundoffF64);
    case ReduceOp::kNormL2:
    case ReduceOp::kSumSquares:
      // In double from the start. The square and the root round once each, and an i64 that becomes
      // a double does so twice, being squared.
      return (all + 4) * kRoundoffF64;
    case ReduceOp::kVariance: {
      // In double from the start, relative to the mean of squares. A merge of a and b elements
      // moves the mean by at most 10 u of the mean magnitude, as long as a is not much smaller than
      // b, so that means are off by 10 steps u. The deviations grow by (difference of means)^2
      // a b / (a + b), in which that error counts four times; and since each element stands on the
      // smaller side of a merge at most log2(n) times, all merges together weigh no more than
      // log2(n) sums of squares.
      const int levels = n <= 1 ? 0 : std::bit_width(static_cast<std::uint64_t>(n - 1));
      return 40 * (1 + levels) * all * kRoundoffF64;
    }
    default:
      // SUM, MEAN, NORM_L1. For a mean the division rounds once more; one more is to spare.
      return SumRoundoff(dtype, {steps.narrow, steps.wide + 2});
  }
}

}  // namespace tessera
