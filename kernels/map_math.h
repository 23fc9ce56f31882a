// What each operation of an expression computes, on one element, written once for both devices.
//
// Every file that includes it is compiled without contraction of a * b + c, so that arithmetic,
// comparisons, sqrt and fma have the same bits on both, but for the payload of a NaN.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/base/element.h"
#include "kernels/base/map_op.h"
#include "kernels/convert.h"

namespace tessera {

// --- Integers: they wrap ---

template <class T>
TESSERA_HD T WrapSubtract(T a, T b) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<U>(a) - static_cast<U>(b));
}

// By zero: 0. The smallest value by -1 wraps to itself.
template <class T>
TESSERA_HD T FloorDivideInteger(T a, T b) {
  if (b == 0) return 0;
  if (b == -1) return WrapSubtract(T{0}, a);
  const T quotient = a / b;
  return quotient - ((a % b != 0) && ((a < 0) != (b < 0)) ? 1 : 0);
}

// By zero: 0. Otherwise it has the sign of b.
template <class T>
TESSERA_HD T RemainderInteger(T a, T b) {
  if (b == 0 || b == -1) return 0;
  const T rest = a % b;
  return rest != 0 && ((rest < 0) != (b < 0)) ? rest + b : rest;
}

// Negative exponents: 1 / a^-b, of which the fraction is cut off; of a = 0, 0.
template <class T>
TESSERA_HD T PowerInteger(T a, T b) {
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 == 0 ? 1 : -1) : 0;
  T power = 1;
  for (; b != 0; b >>= 1) {
    if (b & 1) power = WrapMultiply(power, a);
    a = WrapMultiply(a, a);
  }
  return power;
}

// --- Floating-point numbers ---

// The remainder has the sign of b; the quotient is floor(a / b), computed from that remainder, as in
// Python and NumPy.
template <class T>
TESSERA_HD T RemainderReal(T a, T b) {
  T rest = std::fmod(a, b);
  if (b == 0) return rest;
  if (rest == 0) return std::copysign(T{0}, b);
  return (b < 0) != (rest < 0) ? rest + b : rest;
}
template <class T>
TESSERA_HD T FloorDivideReal(T a, T b) {
  if (b == 0) return a / b;
  const T rest = std::fmod(a, b);
  T quotient = (a - rest) / b;
  if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
  if (quotient == 0) return std::copysign(T{0}, a / b);
  const T down = std::floor(quotient);
  return quotient - down > T{0.5} ? down + 1 : down;
}

#ifndef __CUDA_ARCH__
// t / (t + 2) of t = exp(-2 |a|) - 1, with what its sum and its quotient lose made good: the host's own
// function misses by up to 2.2 units in the last place.
inline double AccurateTanh(double a) {
  const double magnitude = std::fabs(a);
  if (!(magnitude > 0x1p-28)) return a;  // a^3 / 3 is too little to be seen
  if (magnitude > 22) return std::copysign(1.0, a);
  const double t = std::expm1(-2 * magnitude);
  const double sum = t + 2, lost = t - (sum - 2);
  const double quotient = t / sum;
  const double rest = std::fma(-quotient, sum, t) - quotient * lost;
  return std::copysign(quotient + rest / sum, a);
}
#endif

// Within 2 units in the last place of the exact value, subnormal ones included. Of F32 through double,
// where the device's own function is less accurate than that: pow on a GPU, tanh on a CPU.
template <MapOp kOp, class T>
TESSERA_HD T Function(T a, T b) {
  constexpr bool kSingle = std::is_same_v<T, float>;
  if constexpr (kOp == MapOp::kExp) {
    return std::exp(a);
  } else if constexpr (kOp == MapOp::kLog) {
    return std::log(a);
  } else if constexpr (kOp == MapOp::kPower && kSingle) {
    return static_cast<float>(std::pow(static_cast<double>(a), static_cast<double>(b)));
  } else if constexpr (kOp == MapOp::kPower) {
    return std::pow(a, b);
  } else {
    static_assert(kOp == MapOp::kTanh);
#ifdef __CUDA_ARCH__
    return std::tanh(a);
#else
    if constexpr (kSingle) {
      return static_cast<float>(std::tanh(static_cast<double>(a)));
    } else {
      return AccurateTanh(a);
    }
#endif
  }
}

// --- All of them ---

// NaN, where there is any, as in NumPy.
template <class T>
TESSERA_HD T Minimum(T a, T b) {
  return a <= b || a != a ? a : b;
}
template <class T>
TESSERA_HD T Maximum(T a, T b) {
  return a >= b || a != a ? a : b;
}

template <MapOp kOp, class T>
TESSERA_HD T ApplyInteger(T a, T b, T c) {
  if constexpr (kOp == MapOp::kAdd) return WrapAdd(a, b);
  if constexpr (kOp == MapOp::kSubtract) return WrapSubtract(a, b);
  if constexpr (kOp == MapOp::kMultiply) return WrapMultiply(a, b);
  if constexpr (kOp == MapOp::kFloorDivide) return FloorDivideInteger(a, b);
  if constexpr (kOp == MapOp::kRemainder) return RemainderInteger(a, b);
  if constexpr (kOp == MapOp::kPower) return PowerInteger(a, b);
  if constexpr (kOp == MapOp::kFma) return WrapAdd(WrapMultiply(a, b), c);
  if constexpr (kOp == MapOp::kNegate) return WrapSubtract(T{0}, a);
  if constexpr (kOp == MapOp::kAbs) return a < 0 ? WrapSubtract(T{0}, a) : a;
  if constexpr (kOp == MapOp::kSign) return a > 0 ? 1 : a < 0 ? -1 : 0;
  return a;  // floor, ceil, trunc, round
}

template <MapOp kOp, class T>
TESSERA_HD T ApplyReal(T a, T b, T c) {
  if constexpr (kOp == MapOp::kAdd) return a + b;
  if constexpr (kOp == MapOp::kSubtract) return a - b;
  if constexpr (kOp == MapOp::kMultiply) return a * b;
  if constexpr (kOp == MapOp::kDivide) return a / b;
  if constexpr (kOp == MapOp::kFloorDivide) return FloorDivideReal(a, b);
  if constexpr (kOp == MapOp::kRemainder) return RemainderReal(a, b);
  if constexpr (kOp == MapOp::kFma) return std::fma(a, b, c);
  if constexpr (kOp == MapOp::kNegate) return -a;
  if constexpr (kOp == MapOp::kAbs) return std::fabs(a);
  if constexpr (kOp == MapOp::kSign) return a > 0 ? T{1} : a < 0 ? T{-1} : a == 0 ? T{0} : a;
  if constexpr (kOp == MapOp::kFloor) return std::floor(a);
  if constexpr (kOp == MapOp::kCeil) return std::ceil(a);
  if constexpr (kOp == MapOp::kTrunc) return std::trunc(a);
  if constexpr (kOp == MapOp::kRound) return std::rint(a);
  if constexpr (kOp == MapOp::kSqrt) return std::sqrt(a);
  if constexpr (kOp == MapOp::kPower || kOp == MapOp::kExp || kOp == MapOp::kLog ||
                kOp == MapOp::kTanh)
    return Function<kOp>(a, b);
  return a;
}

// Whether the operation exists for values of type T.
template <MapOp kOp, class T>
constexpr bool kHasMapOp = [] {
  constexpr bool kIsBool = std::is_same_v<T, bool>;
  switch (InfoOf(kOp)->rule) {
    case MapRule::kNumbers:
      return !kIsBool;
    case MapRule::kReals:
      return std::is_floating_point_v<T>;
    case MapRule::kComparison:
      return true;
    case MapRule::kLogic:
      return kIsBool;
    default:
      return false;  // instructions of their own
  }
}();

// Of an operation with fewer arguments, the others are anything. bool for a comparison, else T.
template <MapOp kOp, class T>
TESSERA_HD auto Apply(T a, T b, T c) {
  if constexpr (InfoOf(kOp)->rule == MapRule::kComparison) {
    if constexpr (kOp == MapOp::kEqual) return a == b;
    if constexpr (kOp == MapOp::kNotEqual) return a != b;
    if constexpr (kOp == MapOp::kLess) return a < b;
    if constexpr (kOp == MapOp::kLessEqual) return a <= b;
    if constexpr (kOp == MapOp::kGreater) return a > b;
    return a >= b;
  } else if constexpr (std::is_same_v<T, bool>) {
    if constexpr (kOp == MapOp::kAnd) return a && b;
    if constexpr (kOp == MapOp::kOr) return a || b;
    if constexpr (kOp == MapOp::kXor) return a != b;
    return !a;
  } else if constexpr (kOp == MapOp::kMinimum) {
    return Minimum(a, b);
  } else if constexpr (kOp == MapOp::kMaximum) {
    return Maximum(a, b);
  } else if constexpr (kOp == MapOp::kClip) {
    return Minimum(Maximum(a, b), c);
  } else if constexpr (std::is_integral_v<T>) {
    return ApplyInteger<kOp>(a, b, c);
  } else {
    return ApplyReal<kOp>(a, b, c);
  }
}

// A value rounded to an element type, as the value that this type has in a register: kernels/convert.h
// for numbers; of BOOL, 0 and 1; to BOOL, whether it is not zero.
template <class Element, class From>
TESSERA_HD ValueOf<Element> RoundTo(From x) {
  if constexpr (std::is_same_v<Element, bool>) {
    return x != From{};
  } else if constexpr (std::is_same_v<From, bool>) {
    return static_cast<ValueOf<Element>>(static_cast<Element>(static_cast<ValueOf<Element>>(x)));
  } else {
    return static_cast<ValueOf<Element>>(ConvertElement<Element>(x));
  }
}

// An element as it is read from memory, where a bool may be any byte: conversion to bool makes 1 of
// what is not 0.
template <class Element>
using StoredOf = std::conditional_t<std::is_same_v<Element, bool>, std::uint8_t, Element>;

// Calls f(std::integral_constant<MapOp, op>{}), by bisection: a kernel asks for each instruction.
template <std::size_t kFirst = 0, std::size_t kCount = kMapOpInfos.size(), class F>
constexpr void DispatchMapOp(MapOp op, F&& f) {
  constexpr std::size_t kHalf = kCount / 2;
  if constexpr (kCount == 1) {
    f(std::integral_constant<MapOp, kMapOpInfos[kFirst].op>{});
  } else if (op < kMapOpInfos[kFirst + kHalf].op) {
    DispatchMapOp<kFirst, kHalf>(op, f);
  } else {
    DispatchMapOp<kFirst + kHalf, kCount - kHalf>(op, f);
  }
}

}  // namespace tessera
