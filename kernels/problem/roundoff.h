// Error bounds that strategies share. They are relative in the sense of Strategy::roundoff.
// Uses only the standard library.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/reduce_op.h"

namespace tessera {

// Unit roundoffs of the accumulators.
inline constexpr double kRoundoffF32 = UnitRoundoff(DType::kF32);
inline constexpr double kRoundoffF64 = UnitRoundoff(DType::kF64);

// Unit roundoff of ValueOf<T>, the narrowest type in which elements are accumulated. For the 16-bit
// types this is the unit roundoff of f32, and for integers, which wrap instead of rounding, it is
// 0.
constexpr double AccRoundoff(DType dtype) {
  if (IsInteger(dtype)) return 0;
  return dtype == DType::kF64 ? kRoundoffF64 : kRoundoffF32;
}

// Returns the bound on two consecutive stages: (1 + first) (1 + second) - 1.
constexpr double Then(double first, double second) { return first + second + first * second; }

// The maximum number of combinations that one element passes through: first in an operation's
// narrow accumulator (Fold::Acc), then in its wide accumulator (Fold::Wide).
struct FoldSteps {
  std::int64_t narrow;
  std::int64_t wide;
};

// A sum in which every term passes through at most `steps` roundings is within steps * u of the
// exact sum, without higher-order terms (Jeannerod and Rump, "Improved error bounds for inner
// products in floating-point arithmetic", 2013).
constexpr double SumRoundoff(DType dtype, FoldSteps steps) {
  if (IsInteger(dtype)) return 0;
  return Then(static_cast<double>(steps.narrow) * AccRoundoff(dtype),
              static_cast<double>(steps.wide) * kRoundoffF64);
}

// Returns the error bound of an operation on n elements of dtype, combined in any order that stays
// within `steps`.
double ReduceRoundoff(ReduceOp op, DType dtype, std::int64_t n, FoldSteps steps);

}  // namespace tessera
