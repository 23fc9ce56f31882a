// The algebra of reductions: what each ReduceOp does to elements, defined once for the host and the
// device. Every strategy uses Fold<op, T>; kernels/same_bits/tree_columns.h applies it along the
// fixed tree.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/base/element.h"
#include "kernels/problem/strategy.h"
#include "kernels/same_bits/convert.h"
#include "kernels/same_bits/squares.h"

namespace tessera {

// An extreme value and its index.
template <class T>
struct Indexed {
  T value;
  std::int64_t index;
};

// Count, mean and sum of squared deviations of some elements. Two such values merge without
// cancellation (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
// sample variances", 1979). The mean has twice the digits of a double, so the difference between
// two means is accurate even far from zero. The sum of squared deviations is NaN if an element is
// not finite, and infinity if the sum exceeds the range.
template <class Squares>
struct Moments {
  double count;
  Pair mean;
  Squares deviations;
};
template <class W>
inline constexpr bool kIsMoments = false;
template <class Squares>
inline constexpr bool kIsMoments<Moments<Squares>> = true;

// Returns the sum of squared deviations of elements from their mean. sum and squares are the sums
// of the elements' differences from a shift and of the squares of these differences. mean is sum
// divided by the number of elements. If sum is not finite, an element is not finite (or, for f64,
// beyond 2^1016).
TESSERA_HD inline double DeviationsOf(double squares, double sum, double mean) {
  const double deviations = squares - mean * sum;
  if (deviations < 0) return 0;
  // Only the squares have overflowed; the elements are finite.
  if (squares > std::numeric_limits<double>::max() && sum - sum == 0) return squares;
  return deviations;
}
TESSERA_HD inline WideSquares<double> DeviationsOf(const WideSquares<double>& squares, double sum,
                                                   double mean) {
  return {DeviationsOf(squares.middle, sum, mean),
          DeviationsOf(squares.large, sum * kShrink, mean * kShrink),
          DeviationsOf(squares.small, sum * kGrow, mean * kGrow)};
}

// Returns apart^2 * weight.
TESSERA_HD inline double Weighted(double apart, double weight) { return apart * apart * weight; }

// Returns the amount by which a difference `apart` between the means of two groups increases the
// sum of squared deviations.
template <class Squares>
TESSERA_HD Squares Between(double apart, double weight) {
  if constexpr (std::is_same_v<Squares, double>) {
    return Weighted(apart, weight);
  } else {
    return {Weighted(apart, weight), Weighted(apart * kShrink, weight),
            Weighted(apart * kGrow, weight)};
  }
}

// Returns the absolute value; the smallest integer is returned unchanged.
template <class A>
TESSERA_HD A Magnitude(A x) {
  if constexpr (std::is_integral_v<A>) {
    return x < 0 ? WrapMultiply<A>(x, -1) : x;
  } else if constexpr (std::is_same_v<A, float>) {
    return ::fabsf(x);
  } else {
    return ::fabs(x);
  }
}

// Whether the earlier value a wins over the later value b if the larger value wins (kLargest) or
// the smaller one. NaN beats every number, and the first of equal values wins.
template <bool kLargest, class V>
TESSERA_HD bool Stays(V a, V b) {
  return (kLargest ? a >= b : a <= b) | (a != a);
}

// VarianceOf returns a sum of squares divided by count, and RootOf returns the root of that
// quotient. Intermediate values are in range if the result is.
template <class Squares>
TESSERA_HD double VarianceOf(const Squares& squares, double count) {
  const ScaledSquares scaled = InRange(squares);
  return scaled.sum / count * scaled.unit * scaled.unit;
}
template <class Squares>
TESSERA_HD double RootOf(const Squares& squares, double count) {
  const ScaledSquares scaled = InRange(squares);
  return ::sqrt(scaled.sum / count) * scaled.unit;
}

// Stores the value. Every NaN gets the same bits.
TESSERA_HD inline void StoreReal(double value, Scalar* result) {
  result->real = value == value ? value : std::numeric_limits<double>::quiet_NaN();
}

// Acc: the accumulator within a thread and a block. Wide: the accumulator for results of blocks or
// long chains, so that no chain of single-precision additions grows with n. Squares and products
// are wide from the start, because they may be out of range for the operands' type.
template <ReduceOp op, class T>
struct Fold {
  using R = ReduceOp;
  static constexpr ReduceOp kOp = op;
  using Element = T;
  static constexpr bool kInteger = std::is_integral_v<T>;
  static constexpr bool kArg = IsArg(op);
  static constexpr bool kOrdering = IsOrdering(op);
  static constexpr bool kLogical = IsLogical(op);
  static constexpr bool kLargest = op == R::kMax || op == R::kArgMax;
  static constexpr bool kMoments = IsDeviation(op);
  static constexpr bool kFraction = op == R::kMean || op == R::kNormL2 || kMoments;

  using Value = ValueOf<T>;  // the type in which an element is compared and added

  static constexpr auto AccType() {
    if constexpr (kArg) {
      return Indexed<Value>{};
    } else if constexpr (kLogical) {
      return std::int32_t{};
    } else if constexpr (kMoments) {
      return Moments<SquaresOf<T>>{};
    } else if constexpr (op == R::kNormL2) {
      return SquaresOf<T>{};
    } else if constexpr (op == R::kMean && sizeof(T) == 8 && kInteger) {
      return Int128{};
    } else if constexpr (!kOrdering && (op == R::kProduct || op == R::kSumSquares || kInteger)) {
      return WideOf<T>{};
    } else {
      return Value{};
    }
  }
  static constexpr auto WideType() {
    if constexpr (kOrdering || kLogical || kMoments || op == R::kNormL2) {
      return AccType();
    } else if constexpr (op == R::kMean && kInteger) {
      return Int128{};
    } else {
      return WideOf<T>{};
    }
  }
  static constexpr auto OutType() {
    if constexpr (kLogical) {
      return std::int32_t{};
    } else if constexpr (!kArg && (!kInteger || kOrdering)) {
      return T{};
    } else if constexpr (kFraction) {
      return double{};
    } else {
      return std::int64_t{};
    }
  }
  using Acc = decltype(AccType());
  using Wide = decltype(WideType());
  using Out = decltype(OutType());  // for an axis reduction: the C++ type of ResultDType

  template <class A = Acc>
  TESSERA_HD static A Identity() {
    if constexpr (kArg) {
      return {Worst(), INT64_MAX};
    } else if constexpr (kOrdering) {
      return Worst();
    } else if constexpr (kMoments || std::is_same_v<A, WideSquares<double>>) {
      return A{};
    } else {
      return op == R::kProduct || op == R::kAll ? A(1) : A(0);
    }
  }

  // Returns the contribution of one element.
  TESSERA_HD static Acc Load(T element, [[maybe_unused]] std::int64_t index) {
    const auto x = static_cast<Value>(element);
    if constexpr (kArg) {
      return {x, index};
    } else if constexpr (kLogical) {
      return x != Value(0);
    } else if constexpr (kMoments) {
      // 0, or NaN if x is not finite.
      const double nothing = static_cast<double>(x) - static_cast<double>(x);
      return {1, ExactPair(x), Between<SquaresOf<T>>(nothing, 1)};
    } else if constexpr (op == R::kNormL1) {
      return Magnitude(static_cast<Acc>(x));
    } else if constexpr (op == R::kNormL2) {
      return SquareOf<Acc>(static_cast<double>(x));
    } else if constexpr (op == R::kSumSquares) {
      return WrapMultiply<Acc>(static_cast<Acc>(x), static_cast<Acc>(x));
    } else {
      return static_cast<Acc>(x);
    }
  }

  TESSERA_HD static Wide Widen(Acc a) {
    if constexpr (std::is_same_v<Acc, Wide>) {
      return a;
    } else {
      return static_cast<Wide>(a);
    }
  }

  // A is Acc or Wide. NaN wins every ordering; the smaller index wins ties.
  template <class A>
  TESSERA_HD static A Combine(A a, A b) {
    if constexpr (kArg) {
      return Before(b, a) ? b : a;
    } else if constexpr (kOrdering) {
      return Stays<kLargest>(a, b) ? a : b;
    } else if constexpr (op == R::kAll) {
      return a & b;
    } else if constexpr (op == R::kAny) {
      return a | b;
    } else if constexpr (kMoments) {
      if (a.count == 0) return b;
      if (b.count == 0) return a;
      const double count = a.count + b.count;
      const double apart = (b.mean.value - a.mean.value) + (b.mean.lost - a.mean.lost);
      // The counts are usually equal, which saves the division.
      const double share = a.count == b.count ? 0.5 : b.count / count;
      const auto deviations = Plus(a.deviations, b.deviations);
      // If the elements are finite, their means have overflowed to infinity, and their deviations
      // are infinite already.
      if (apart != apart) return {count, {apart, apart}, deviations};
      const Pair mean = TwoSum(a.mean.value, apart * share);
      return {count,
              {mean.value, a.mean.lost + mean.lost},
              Plus(deviations, Between<SquaresOf<T>>(apart, a.count * share))};
    } else if constexpr (std::is_same_v<A, WideSquares<double>>) {
      return Plus(a, b);
    } else if constexpr (op == R::kProduct) {
      return WrapMultiply(a, b);
    } else {
      return WrapAdd(a, b);
    }
  }

  // Returns the result of reducing n elements.
  TESSERA_HD static auto Finished(Wide w, [[maybe_unused]] std::int64_t n) {
    if constexpr (kArg) {
      return w.value;
    } else if constexpr (op == R::kMean) {
      return static_cast<double>(w) / static_cast<double>(n);
    } else if constexpr (op == R::kVariance) {
      return VarianceOf(w.deviations, w.count);
    } else if constexpr (op == R::kStd) {
      return RootOf(w.deviations, w.count);
    } else if constexpr (op == R::kNormL2) {
      return RootOf(w, 1);
    } else {
      return w;
    }
  }

  TESSERA_HD static void Finish(Wide w, std::int64_t n, Scalar* result) {
    const auto value = Finished(w, n);
    if constexpr (std::is_integral_v<std::remove_cv_t<decltype(value)>>) {
      result->integer = value;
    } else {
      StoreReal(static_cast<double>(value), result);
    }
    if constexpr (kArg) result->index = w.index;
  }

  TESSERA_HD static Out FinishAxis(Wide w, std::int64_t n) {
    if constexpr (kArg) {
      return w.index;
    } else {
      return ConvertElement<Out>(Finished(w, n));
    }
  }

 private:
  // Returns the value that every other value beats.
  TESSERA_HD static Value Worst() {
    using Limits = std::numeric_limits<Value>;
    if constexpr (Limits::has_infinity) {
      return kLargest ? -Limits::infinity() : Limits::infinity();
    } else {
      return kLargest ? Limits::lowest() : Limits::max();
    }
  }

  TESSERA_HD static bool Before(const Indexed<Value>& a, const Indexed<Value>& b) {
    const bool a_nan = a.value != a.value;
    const bool b_nan = b.value != b.value;
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a.value != b.value) return kLargest ? a.value > b.value : a.value < b.value;
    return a.index < b.index;
  }
};

// Calls f(std::integral_constant<ReduceOp, op>{}) for the runtime op.
template <class F>
decltype(auto) DispatchOp(ReduceOp op, F&& f) {
  using R = ReduceOp;
  switch (op) {
    case R::kSum:
      return f(std::integral_constant<R, R::kSum>{});
    case R::kProduct:
      return f(std::integral_constant<R, R::kProduct>{});
    case R::kMin:
      return f(std::integral_constant<R, R::kMin>{});
    case R::kMax:
      return f(std::integral_constant<R, R::kMax>{});
    case R::kArgMin:
      return f(std::integral_constant<R, R::kArgMin>{});
    case R::kArgMax:
      return f(std::integral_constant<R, R::kArgMax>{});
    case R::kMean:
      return f(std::integral_constant<R, R::kMean>{});
    case R::kNormL1:
      return f(std::integral_constant<R, R::kNormL1>{});
    case R::kNormL2:
      return f(std::integral_constant<R, R::kNormL2>{});
    case R::kSumSquares:
      return f(std::integral_constant<R, R::kSumSquares>{});
    case R::kVariance:
      return f(std::integral_constant<R, R::kVariance>{});
    case R::kAll:
      return f(std::integral_constant<R, R::kAll>{});
    case R::kAny:
      return f(std::integral_constant<R, R::kAny>{});
    case R::kStd:
      break;
  }
  return f(std::integral_constant<R, R::kStd>{});
}

// Returns the operation that combines the terms of a problem.
constexpr ReduceOp OpOf(const DotProblem&) { return ReduceOp::kSum; }
constexpr ReduceOp OpOf(const ReduceProblem& p) { return p.op; }

// Return the size in bytes of a Fold::Acc and of a Fold::Wide, for strategies that pass them
// through device memory.
inline std::uint64_t AccBytes(ReduceOp op, DType dtype) {
  return DispatchOp(op, [&](auto o) {
    return DispatchDType(
        dtype, [](auto t) { return sizeof(typename Fold<decltype(o)::value, decltype(t)>::Acc); });
  });
}
inline std::uint64_t WideBytes(ReduceOp op, DType dtype) {
  return DispatchOp(op, [&](auto o) {
    return DispatchDType(
        dtype, [](auto t) { return sizeof(typename Fold<decltype(o)::value, decltype(t)>::Wide); });
  });
}

}  // namespace tessera
