// Sums with more digits and a wider range than a double, for the host and the device.
//
// The files that include this header are compiled without contraction of a * b + c.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/base/element.h"

namespace tessera {

// --- Twice the digits ---

// An unevaluated sum of a value and of what rounding has lost so far.
struct Pair {
  double value;
  double lost;
};

// Returns a + b without error: the rounded sum and its error (Knuth, "The Art of Computer
// Programming", volume 2, 4.2.2).
TESSERA_HD inline Pair TwoSum(double a, double b) {
  const double sum = a + b;
  const double from_b = sum - a;
  return {sum, (a - (sum - from_b)) + (b - from_b)};
}

// Returns a * b without error, as long as the error does not underflow. By definition, fma rounds
// once.
TESSERA_HD inline Pair TwoProduct(double a, double b) {
  const double product = a * b;
  return {product, ::fma(a, b, -product)};
}

// Returns the sum of `value` and `lost`, rounded once. If `value` is not finite, `lost` is
// meaningless.
TESSERA_HD inline double Rounded(double x) { return x; }
TESSERA_HD inline double Rounded(Pair p) {
  return p.value - p.value == 0 ? p.value + p.lost : p.value;
}

TESSERA_HD inline Pair Plus(Pair a, Pair b) {
  const Pair sum = TwoSum(a.value, b.value);
  return {sum.value, (a.lost + b.lost) + sum.lost};
}
TESSERA_HD inline double Plus(double a, double b) { return a + b; }
TESSERA_HD inline Pair Times(Pair a, Pair b) {
  const Pair product = TwoProduct(a.value, b.value);
  return {product.value, (a.value * b.lost + a.lost * b.value) + product.lost};
}
TESSERA_HD inline Pair Quotient(Pair a, double b) {
  const double quotient = a.value / b;
  return {quotient, (::fma(-quotient, b, a.value) + a.lost) / b};
}
// Returns the same sum with `lost` smaller than the last place of `value`, as products require.
TESSERA_HD inline Pair Normal(Pair a) {
  return a.value - a.value == 0 ? TwoSum(a.value, a.lost) : a;
}
TESSERA_HD inline Pair Negative(Pair a) { return {-a.value, -a.lost}; }

// Returns x as a Pair, without error. A 64-bit integer is the sum of its halves.
template <class V>
TESSERA_HD Pair ExactPair(V x) {
  if constexpr (std::is_same_v<V, std::int64_t>) {
    return TwoSum(static_cast<double>(x >> 32) * 0x1p32,
                  static_cast<double>(static_cast<std::uint32_t>(x)));
  } else {
    return {static_cast<double>(x), 0};
  }
}

// Returns x - from, rounded once.
template <class V>
TESSERA_HD double Apart(V x, V from) {
  if constexpr (std::is_same_v<V, std::int64_t>) {
    const std::int64_t apart = WrapAdd(x, WrapMultiply<std::int64_t>(from, -1));
    const bool wrapped = ((x ^ from) & (x ^ apart)) < 0;
    return wrapped ? static_cast<double>(x) - static_cast<double>(from)
                   : static_cast<double>(apart);
  } else {
    return static_cast<double>(x) - static_cast<double>(from);
  }
}

// --- A wider range ---

// A sum of squares of doubles that neither overflows nor underflows if its root does not. It
// consists of three sums: the plain one (a double or a Pair), and two of scaled terms that keep the
// squares of large or small numbers in range (after Blue, "A portable Fortran program to find the
// Euclidean norm of a vector", 1978).
template <class Middle>
struct WideSquares {
  Middle middle;
  double large;  // times kShrink^2
  double small;  // times kGrow^2
};
inline constexpr double kShrink = 0x1p-537;
inline constexpr double kGrow = 0x1p537;

// The type in which squares of elements of T are summed. Only squares of doubles can overflow or
// underflow a double.
template <class T>
using SquaresOf = std::conditional_t<std::is_same_v<T, double>, WideSquares<double>, double>;

TESSERA_HD inline double Square(double x) { return x * x; }

template <class Squares>
TESSERA_HD Squares SquareOf(double x) {
  if constexpr (std::is_same_v<Squares, double>) {
    return x * x;
  } else {
    return {x * x, Square(x * kShrink), Square(x * kGrow)};
  }
}

template <class Middle>
TESSERA_HD WideSquares<Middle> Plus(const WideSquares<Middle>& a, const WideSquares<Middle>& b) {
  return {Plus(a.middle, b.middle), a.large + b.large, a.small + b.small};
}

// sum += x * x
TESSERA_HD inline void AddSquare(double& sum, double x) { sum = ::fma(x, x, sum); }
TESSERA_HD inline void AddSquare(Pair& sum, double x) {
  const Pair product = TwoProduct(x, x);
  const Pair all = TwoSum(sum.value, product.value);
  sum = {all.value, sum.lost + (all.lost + product.lost)};
}
template <class Middle>
TESSERA_HD void AddSquare(WideSquares<Middle>& sum, double x) {
  AddSquare(sum.middle, x);
  AddSquare(sum.large, x * kShrink);
  AddSquare(sum.small, x * kGrow);
}

// A scaled sum of squares that is a normal number or 0.
struct ScaledSquares {
  double sum;
  double unit;  // factor for the root of `sum`
};
TESSERA_HD inline ScaledSquares InRange(double sum) { return {sum, 1}; }
template <class Middle>
TESSERA_HD ScaledSquares InRange(const WideSquares<Middle>& squares) {
  const double sum = Rounded(squares.middle);
  if (sum < 0x1p-900) return {squares.small, 1 / kGrow};
  if (sum <= std::numeric_limits<double>::max()) return {sum, 1};
  return {squares.large, 1 / kShrink};  // NaN as well
}

}  // namespace tessera
