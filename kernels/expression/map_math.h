// Defines what each operation of an expression computes for one element, once for host and device.
//
// Every file that includes this header is compiled without contraction of a * b + c. Arithmetic,
// comparisons, sqrt and fma therefore give the same bits on host and device, except for the payload
// of a NaN.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/base/element.h"
#include "kernels/base/map_op.h"
#include "kernels/same_bits/convert.h"

namespace tessera {

// --- Integers: they wrap ---

template <class T>
TESSERA_HD T WrapSubtract(T a, T b) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<U>(a) - static_cast<U>(b));
}

// Division by 0 gives 0. The smallest value divided by -1 wraps to itself.
template <class T>
TESSERA_HD T FloorDivideInteger(T a, T b) {
  if (b == 0) return 0;
  if (b == -1) return WrapSubtract(T{0}, a);
  const T quotient = a / b;
  return quotient - ((a % b != 0) && ((a < 0) != (b < 0)) ? 1 : 0);
}

// Division by 0 gives 0. Otherwise the remainder has the sign of b.
template <class T>
TESSERA_HD T RemainderInteger(T a, T b) {
  if (b == 0 || b == -1) return 0;
  const T rest = a % b;
  return rest != 0 && ((rest < 0) != (b < 0)) ? rest + b : rest;
}

// If b is negative, returns 1 / a^-b truncated to an integer, or 0 if a is 0.
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

// Shifts in two's complement. A number of places that is negative, or not below the number of bits,
// shifts out all bits.
template <class T>
TESSERA_HD T ShiftLeft(T a, T places) {
  using U = std::make_unsigned_t<T>;
  constexpr T kBits = 8 * sizeof(T);
  return places < 0 || places >= kBits ? 0 : static_cast<T>(static_cast<U>(a) << places);
}
template <class T>
TESSERA_HD T ShiftRight(T a, T places) {
  constexpr T kBits = 8 * sizeof(T);
  return a >> (places < 0 || places >= kBits ? kBits - 1 : places);
}

// --- Floating-point numbers ---

// These return the bits of a double, the exponent of a normal double, and 2^e for e from -1022 to
// 1023.
TESSERA_HD inline std::uint64_t BitsOf(double x) { return std::bit_cast<std::uint64_t>(x); }
TESSERA_HD inline int ExponentOf(double normal) {
  return static_cast<int>(BitsOf(normal) >> 52 & 0x7ff) - 1023;
}
TESSERA_HD inline double PowerOfTwo(int e) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(e + 1023) << 52);
}

// x = fraction * 2^exponent, with a fraction in [1, 2); x > 0 and finite.
struct Fraction {
  double fraction;
  int exponent;
};
TESSERA_HD inline Fraction FractionOf(double x) {
  const bool subnormal = x < 0x1p-1022;
  if (subnormal) x *= 0x1p54;
  const int e = ExponentOf(x);
  const std::uint64_t one = std::uint64_t{1023} << 52;
  return {std::bit_cast<double>((BitsOf(x) & ((std::uint64_t{1} << 52) - 1)) | one),
          subnormal ? e - 54 : e};
}

#ifndef __CUDA_ARCH__
// Returns a * 2^shift modulo m by repeated squaring with Montgomery products. REQUIRES: m is odd,
// a and m are below 2^53, and the shift is from 0 to 2^11 + 2^8.
inline std::uint64_t ShiftModulo(std::uint64_t a, int shift, std::uint64_t m) {
  __extension__ using Wide = unsigned __int128;
  std::uint64_t inverse = m;  // modulo 2^64; each step doubles the number of correct bits, from 3
  for (int step = 0; step < 5; ++step) inverse *= 2 - m * inverse;
  const auto high = [](Wide x) { return static_cast<std::uint64_t>(x >> 64); };
  // Returns x * y / 2^64 modulo m, for x * y < m * 2^64.
  const auto product = [&](std::uint64_t x, std::uint64_t y) {
    const Wide xy = Wide{x} * y;
    const std::uint64_t multiple = high(Wide{static_cast<std::uint64_t>(xy) * inverse} * m);
    return high(xy) - multiple + (high(xy) < multiple ? m : 0);
  };
  // The power is 2^(64 + e) modulo m, where e are the leading bits of the shift.
  constexpr int kRest = 8;
  std::uint64_t power = ((std::uint64_t{0} - m) % m << (shift >> kRest)) % m;
  for (int bit = kRest; bit-- > 0;) {
    power = product(power, power) << (shift >> bit & 1);
    if (power >= m) power -= m;
  }
  return product(a, power);
}
#endif

// Returns a - b * trunc(a / b) exactly, like std::fmod, but without a step for each bit of the
// quotient. It uses long division (Knuth, "The Art of Computer Programming", volume 2, 4.3.1) with
// at most 42 digits of 50 bits. A digit is computed with the reciprocal of b. Its error before
// rounding to an integer is less than 1/4, so remainders are at most 3/4 b. A fused multiply-add
// computes the remainders exactly, because they are multiples of the last place of b. On a CPU,
// where 42 digits take 300 ns, operands of very different size are divided as integers.
TESSERA_HD inline double Rest(double a, double b) {
  const double x = std::fabs(a), y = std::fabs(b);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (!(x < kInfinity) || !(y > 0)) return std::numeric_limits<double>::quiet_NaN();
  if (!(x >= y)) return y != y ? y : a;
  constexpr int kDigit = 50;
  // Adding and then subtracting this number rounds a number below 2^51 to an integer.
  constexpr double kRounder = 0x1.8p52;
  const Fraction dividend = FractionOf(x), divisor = FractionOf(y);
  const double inverse = 1 / divisor.fraction;
  const auto step = [&](double rest, double scale) {
    const double digit = (rest * (inverse * scale) + kRounder) - kRounder;
    return std::fma(-digit, divisor.fraction, rest * scale);
  };
  const int bits = dividend.exponent - divisor.exponent;
  double rest;
#ifndef __CUDA_ARCH__
  if (constexpr int kMost = 6; bits > kMost * kDigit) {
    const auto integer = [](double fraction) {
      return static_cast<std::uint64_t>(fraction * 0x1p52);
    };
    const std::uint64_t m = integer(divisor.fraction);
    const int zeros = std::countr_zero(m);
    rest = static_cast<double>(ShiftModulo(integer(dividend.fraction), bits - zeros, m >> zeros)
                               << zeros) *
           0x1p-52;
  } else
#endif
  {
    rest = step(dividend.fraction, PowerOfTwo(bits % kDigit));
    for (int left = bits / kDigit; left > 0; --left) rest = step(rest, PowerOfTwo(kDigit));
    if (rest < 0) rest += divisor.fraction;
  }
  // If the divisor may be subnormal, the scaling takes two steps.
  if (divisor.exponent < -900) {
    rest = rest * PowerOfTwo(divisor.exponent + 200) * 0x1p-200;
  } else {
    rest *= PowerOfTwo(divisor.exponent);
  }
  return std::copysign(rest, a);
}

// The remainder has the sign of b, as in Python and NumPy.
template <class T>
TESSERA_HD T RemainderReal(T a, T b) {
  const T rest = static_cast<T>(Rest(a, b));
  if (b == 0) return rest;
  if (rest == 0) return std::copysign(T{0}, b);
  return (b < 0) != (rest < 0) ? rest + b : rest;
}

// Returns floor(a / b) of the exact quotient, rounded to a double. As in Python, an infinite a
// gives NaN, and an infinite b gives 0, or -1 if a is not 0 and the signs differ.
TESSERA_HD inline double FloorQuotient(double a, double b) {
  constexpr double kMost = std::numeric_limits<double>::max();
  const double quotient = a / b;
  if (b == 0 || quotient != quotient) return quotient;
  if (std::fabs(a) > kMost) return a - a;
  if (std::fabs(b) > kMost) return a == 0 || (a < 0) == (b < 0) ? quotient : -1.0;
  const double magnitude = std::fabs(quotient);
  if (magnitude < 0x1p53) {
    const double down = std::floor(quotient);
    if (down != quotient) return down;
    // If a / b was rounded up to this integer, subtracts 1. The fma keeps the sign of the exact
    // difference.
    const double rest = std::fma(-quotient, b, a);
    return rest != 0 && (rest < 0) != (b < 0) ? quotient - 1 : quotient;
  }
  // Here `quotient` is an integer: a / b rounded to nearest. Rounding the exact floor gives a
  // different double only if the floor lies exactly halfway between two doubles and a / b is above
  // it. In that case a / b was rounded up to the double with an odd last bit, whereas the floor
  // rounds down to the even one.
  if (magnitude > kMost || (BitsOf(quotient) & 1) == 0) return quotient;
  const double half = PowerOfTwo(ExponentOf(quotient) - 53);  // half a step to the next double
  const double rest = std::fma(-quotient, b, a);
  const double above = std::fma(half - 1, std::fabs(b), b < 0 ? -rest : rest);
  return above < 0 ? quotient - 2 * half : quotient;
}
template <class T>
TESSERA_HD T FloorDivideReal(T a, T b) {
  // For f32, rounding the double to f32 gives the exact floor, rounded.
  return static_cast<T>(FloorQuotient(a, b));
}

#ifndef __CUDA_ARCH__
// Follows Moshier's Cephes library: uses a rational approximation of tanh(a) / a - 1, and for
// larger a uses 1 - 2 / (exp(2 a) + 1). The host's own function is off by up to 2.2 units in the
// last place.
inline double AccurateTanh(double a) {
  const double magnitude = std::fabs(a);
  if (!(magnitude > 0x1p-28)) return a;  // a^3 / 3 is too small to matter
  if (magnitude > 22) return std::copysign(1.0, a);
  if (magnitude >= 0.625) return std::copysign(1 - 2 / (std::exp(2 * magnitude) + 1), a);
  const double s = a * a;
  const double p =
      (-9.64399179425052238628e-1 * s - 9.92877231001918586564e1) * s - 1.61468768441708447952e3;
  const double q = ((s + 1.12811678491632931402e2) * s + 2.23548839060100448583e3) * s +
                   4.84406305325125486048e3;
  return a + a * s * (p / q);
}
#endif

// Computes the operation with the standard library of the host or of CUDA. The result is within 4
// units in the last place of the exact value, including subnormal values.
template <MapOp kOp>
TESSERA_HD double LibraryFunction(double a, double b) {
  if constexpr (kOp == MapOp::kSin) return std::sin(a);
  if constexpr (kOp == MapOp::kCos) return std::cos(a);
  if constexpr (kOp == MapOp::kTan) return std::tan(a);
  if constexpr (kOp == MapOp::kAsin) return std::asin(a);
  if constexpr (kOp == MapOp::kAcos) return std::acos(a);
  if constexpr (kOp == MapOp::kAtan) return std::atan(a);
  if constexpr (kOp == MapOp::kAtan2) return std::atan2(a, b);
  if constexpr (kOp == MapOp::kSinh) return std::sinh(a);
  if constexpr (kOp == MapOp::kCosh) return std::cosh(a);
  if constexpr (kOp == MapOp::kAsinh) return std::asinh(a);
  if constexpr (kOp == MapOp::kAcosh) return std::acosh(a);
  if constexpr (kOp == MapOp::kAtanh) return std::atanh(a);
  if constexpr (kOp == MapOp::kExpm1) return std::expm1(a);
  if constexpr (kOp == MapOp::kLog1p) return std::log1p(a);
  if constexpr (kOp == MapOp::kLog2) return std::log2(a);
  if constexpr (kOp == MapOp::kLog10) return std::log10(a);
  if constexpr (kOp == MapOp::kCbrt) return std::cbrt(a);
  if constexpr (kOp == MapOp::kHypot) return std::hypot(a, b);
  return a;
}
constexpr bool IsLibraryFunction(MapOp op) { return op >= MapOp::kSin && op <= MapOp::kHypot; }

// The result is within 2 units in the last place of the exact value, including subnormal values.
// F32 is computed in double where the device's own function is less accurate: pow on a GPU, tanh on
// a CPU.
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

// --- Random numbers ---

// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Returns the
// first two of the four words, the first one in the lower half.
TESSERA_HD inline std::int64_t RandomBits(std::int64_t seed, std::int64_t counter,
                                          std::int64_t stream) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  const auto key = static_cast<std::uint64_t>(seed), c = static_cast<std::uint64_t>(counter),
             s = static_cast<std::uint64_t>(stream);
  std::uint32_t k0 = low(key), k1 = high(key), x0 = low(c), x1 = high(c), x2 = low(s), x3 = high(s);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p = std::uint64_t{0xD2511F53} * x0, q = std::uint64_t{0xCD9E8D57} * x2;
    x0 = high(q) ^ x1 ^ k0;
    x1 = low(q);
    x2 = high(p) ^ x3 ^ k1;
    x3 = low(p);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return static_cast<std::int64_t>(std::uint64_t{x1} << 32 | x0);
}

// Returns a + x * (b + x * (c + ...)).
TESSERA_HD inline double Polynomial(double, double a) { return a; }
template <class... More>
TESSERA_HD double Polynomial(double x, double a, More... more) {
  return a + x * Polynomial(x, more...);
}

// Returns the logarithm of a number in (0, 1), by the method of Sun's fdlibm. It uses only sums,
// products and quotients, so that it has the same bits on all devices.
TESSERA_HD inline double SameLog(double x) {
  Fraction of = FractionOf(x);
  if (of.fraction > 0x1.6a09e667f3bcdp0) of = {of.fraction / 2, of.exponent + 1};
  const double f = of.fraction - 1, s = f / (2 + f), z = s * s, half = 0.5 * f * f;
  const double r =
      z * Polynomial(z, 6.666666666666735130e-01, 3.999999999940941908e-01,
                     2.857142874366239149e-01, 2.222219843214978396e-01, 1.818357216161805012e-01,
                     1.531383769920937332e-01, 1.479819860511658591e-01);
  const double e = of.exponent;
  return e * 6.93147180369123816490e-01 -
         ((half - (s * (half + r) + e * 1.90821492927058770002e-10)) - f);
}

// Returns the x below which the standard normal distribution has the probability p, with the
// rational functions of Wichura ("Algorithm AS 241", 1988). Like SameLog, it has the same bits on
// all devices.
TESSERA_HD inline double NormalQuantile(double p) {
  const double q = p - 0.5;
  if (!(p > 0 && p < 1)) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    return p == 0 ? -kInfinity : p == 1 ? kInfinity : std::numeric_limits<double>::quiet_NaN();
  }
  if (std::fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q *
           Polynomial(r, 3.3871328727963666080e+0, 1.3314166789178437745e+2,
                      1.9715909503065514427e+3, 1.3731693765509461125e+4, 4.5921953931549871457e+4,
                      6.7265770927008700853e+4, 3.3430575583588128105e+4,
                      2.5090809287301226727e+3) /
           Polynomial(r, 1.0, 4.2313330701600911252e+1, 6.8718700749205790830e+2,
                      5.3941960214247511077e+3, 2.1213794301586595867e+4, 3.9307895800092710610e+4,
                      2.8729085735721942674e+4, 5.2264952788528545610e+3);
  }
  const double root = std::sqrt(-SameLog(q < 0 ? p : 1 - p));
  double x;
  if (root <= 5) {
    const double r = root - 1.6;
    x = Polynomial(r, 1.42343711074968357734e+0, 4.63033784615654529590e+0,
                   5.76949722146069140550e+0, 3.64784832476320460504e+0, 1.27045825245236838258e+0,
                   2.41780725177450611770e-1, 2.27238449892691845833e-2,
                   7.74545014278341407640e-4) /
        Polynomial(r, 1.0, 2.05319162663775882187e+0, 1.67638483018380384940e+0,
                   6.89767334985100004550e-1, 1.48103976427480074590e-1, 1.51986665636164571966e-2,
                   5.47593808499534494600e-4, 1.05075007164441684324e-9);
  } else {
    const double r = root - 5;
    x = Polynomial(r, 6.65790464350110377720e+0, 5.46378491116411436990e+0,
                   1.78482653991729133580e+0, 2.96560571828504891230e-1, 2.65321895265761230930e-2,
                   1.24266094738807843860e-3, 2.71155556874348757815e-5,
                   2.01033439929228813265e-7) /
        Polynomial(r, 1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1,
                   1.48753612908506148525e-2, 7.86869131145613259100e-4, 1.84631831751005468180e-5,
                   1.42151175831644588870e-7, 2.04426310338993978564e-15);
  }
  return q < 0 ? -x : x;
}

// --- All types ---

// Returns NaN if an argument is NaN, as in NumPy.
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
  if constexpr (kOp == MapOp::kRandomBits) return RandomBits(a, b, c);
  if constexpr (kOp == MapOp::kAnd) return a & b;
  if constexpr (kOp == MapOp::kOr) return a | b;
  if constexpr (kOp == MapOp::kXor) return a ^ b;
  if constexpr (kOp == MapOp::kNot) return ~a;
  if constexpr (kOp == MapOp::kShiftLeft) return ShiftLeft(a, b);
  if constexpr (kOp == MapOp::kShiftRight) return ShiftRight(a, b);
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
  if constexpr (kOp == MapOp::kNdtri) return static_cast<T>(NormalQuantile(a));
  if constexpr (kOp == MapOp::kPower || kOp == MapOp::kExp || kOp == MapOp::kLog ||
                kOp == MapOp::kTanh)
    return Function<kOp>(a, b);
  if constexpr (IsLibraryFunction(kOp)) return static_cast<T>(LibraryFunction<kOp>(a, b));
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
      return std::is_integral_v<T>;
    case MapRule::kIntegers:
      return std::is_integral_v<T> && !kIsBool;
    case MapRule::kBits:
      return std::is_same_v<T, std::int64_t>;
    default:
      return false;  // these are separate instructions
  }
}();

// Arguments that the operation does not have are ignored. Returns bool for a comparison, otherwise
// T.
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

// Rounds a value to an element type, and returns it as that type's value in a register. Numbers
// follow kernels/same_bits/convert.h; BOOL becomes 0 or 1, and a number becomes true if it is not
// zero.
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

// The type used to read an element from memory. A bool in memory may be any byte, and conversion to
// bool turns every byte except 0 into 1.
template <class Element>
using StoredOf = std::conditional_t<std::is_same_v<Element, bool>, std::uint8_t, Element>;

// Calls f(std::integral_constant<MapOp, op>{}). Bisects the list of operations, because kernels
// call this for every instruction.
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
