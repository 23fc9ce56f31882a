// Error bounds that strategies share, relative as Strategy::roundoff says. Standard library only.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/reduce_op.h"

namespace tessera {

// Unit roundoffs of the accumulators.
inline constexpr double kRoundoffF32 = UnitRoundoff(DType::kF32);
inline constexpr double kRoundoffF64 = UnitRoundoff(DType::kF64);

// Unit roundoff of ValueOf<T>, the narrowest type in which elements are accumulated: that of f32
// also for the 16-bit types, and 0 for integers, which wrap instead.
constexpr double AccRoundoff(DType dtype) {
  if (IsInteger(dtype)) return 0;
  return dtype == DType::kF64 ? kRoundoffF64 : kRoundoffF32;
}

// The bound of two stages, one after the other: (1 + first) (1 + second) - 1.
constexpr double Then(double first, double second) { return first + second + first * second; }

// The most combinations that one element passes through: first in the narrow accumulator of an
// operation (Fold::Acc), then in the wide one (Fold::Wide).
struct FoldSteps {
  std::int64_t narrow;
  std::int64_t wide;
};

// A sum in which every term passes through at most `steps` roundings is within steps * u of the
// exact one, without terms of higher order (Jeannerod and Rump, "Improved error bounds for inner
// products in floating-point arithmetic", 2013).
constexpr double SumRoundoff(DType dtype, FoldSteps steps) {
  if (IsInteger(dtype)) return 0;
  return Then(static_cast<double>(steps.narrow) * AccRoundoff(dtype),
              static_cast<double>(steps.wide) * kRoundoffF64);
}

// The bound of an operation on n elements of dtype, in any order that keeps within steps.
double ReduceRoundoff(ReduceOp op, DType dtype, std::int64_t n, FoldSteps steps);

}  // namespace tessera
