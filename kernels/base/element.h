// The C++ types of elements and their arithmetic, for both the host and the device. The two 16-bit
// floating-point types are stored as bits and have conversions to and from float.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/base/dtype.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define TESSERA_HD __host__ __device__
#else
#define TESSERA_HD
#endif

namespace tessera {

// IEEE 754 binary16.
struct Half {
  std::uint16_t bits;

  Half() = default;
  // Rounds to nearest, with ties to even. Values outside the range become infinity.
  TESSERA_HD explicit Half(float value) {
#ifdef __CUDA_ARCH__
    bits = __half_as_ushort(__float2half_rn(value));
#else
    const auto word = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>(word >> 16 & 0x8000u);
    const std::uint32_t magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {  // NaN stays NaN
      bits = sign | 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
      bits = sign | 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // normal: drop 13 bits of the fraction
      const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
      bits = sign | static_cast<std::uint16_t>((rounded - 0x38000000u) >> 13);
    } else {
      // The result is subnormal, a multiple of 2^-24. Adding 0.5 leaves the rounded multiple in the
      // low bits of the fraction.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      bits = sign | static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u);
    }
#endif
  }
  TESSERA_HD explicit operator float() const {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(bits));
#else
    // This has no branches, so the compiler can vectorise loops over halves, and no float in it is
    // subnormal, because processors may be dozens of times slower with those. `normal` changes the
    // exponent's bias from 15 to 127, and is the value of a normal half. `subnormal` doubles it and
    // subtracts 2^-14, and is the value of a subnormal half, exactly. Of the two, the value is the
    // smaller one. The magnitude is signed, because SSE2 and AVX2 compare only signed integers.
    const std::int32_t magnitude = (bits & 0x7fff) << 13;
    const float normal = std::bit_cast<float>(magnitude + 0x38000000);
    const float subnormal = std::bit_cast<float>(magnitude + 0x38800000) - 0x1p-14f;
    const auto number = std::bit_cast<std::uint32_t>(subnormal < normal ? subnormal : normal);
    const std::uint32_t infinite = magnitude >= 0x0f800000 ? 0x7f800000u : 0u;
    return std::bit_cast<float>(number | infinite |
                                static_cast<std::uint32_t>(bits & 0x8000u) << 16);
#endif
  }
};

// bfloat16: the upper half of an IEEE 754 binary32.
struct BFloat16 {
  std::uint16_t bits;

  BFloat16() = default;
  // Rounds to nearest, ties to even.
  TESSERA_HD explicit BFloat16(float value) {
#ifdef __CUDA_ARCH__
    bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    const auto word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<std::uint16_t>(word >> 16 | 0x40u);  // NaN stays NaN
    } else {
      bits = static_cast<std::uint16_t>((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
    }
#endif
  }
  TESSERA_HD explicit operator float() const {
#ifdef __CUDA_ARCH__
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
#else
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
#endif
  }
};

template <class T>
inline constexpr bool kIsByteInteger =
    std::is_same_v<T, std::uint8_t> || std::is_same_v<T, std::int8_t>;

// The type in which arithmetic on one element is done.
template <class T>
using ValueOf = std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, float,
                                   std::conditional_t<kIsByteInteger<T>, std::int32_t, T>>;

// A type wide enough for long sums: double, or a 64-bit integer that wraps.
template <class T>
using WideOf = std::conditional_t<std::is_integral_v<T>, std::int64_t, double>;

// The dtype whose elements have the C++ type T.
template <class T>
constexpr DType DTypeOf() {
  if constexpr (std::is_same_v<T, float>) {
    return DType::kF32;
  } else if constexpr (std::is_same_v<T, double>) {
    return DType::kF64;
  } else if constexpr (std::is_same_v<T, Half>) {
    return DType::kF16;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return DType::kBF16;
  } else if constexpr (std::is_same_v<T, std::int32_t>) {
    return DType::kI32;
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    return DType::kI64;
  } else if constexpr (std::is_same_v<T, bool>) {
    return DType::kBool;
  } else if constexpr (std::is_same_v<T, std::uint8_t>) {
    return DType::kU8;
  } else {
    static_assert(std::is_same_v<T, std::int8_t>, "no element type");
    return DType::kI8;
  }
}

// Calls f(T{}). With TESSERA_CUDA_CHECK (CMakeLists.txt), calls that return nothing (launches) are
// compiled only for f32, f16 and i32; for other types they stop the process.
template <class T, class F>
constexpr decltype(auto) CallForType(F&& f) {
#if defined(__CUDACC__) && defined(TESSERA_CUDA_CHECK)
  constexpr bool kCompiled = !std::is_void_v<decltype(f(float{}))> || std::is_same_v<T, float> ||
                             std::is_same_v<T, Half> || std::is_same_v<T, std::int32_t>;
  return kCompiled ? void() : __builtin_trap(), f(std::conditional_t<kCompiled, T, float>{});
#else
  return f(T{});
#endif
}

// Calls f(T{}), where T is the C++ type of `dtype`. REQUIRES: IsComputed(dtype).
template <class F>
constexpr decltype(auto) DispatchDType(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return CallForType<float>(f);
    case DType::kF64:
      return CallForType<double>(f);
    case DType::kF16:
      return CallForType<Half>(f);
    case DType::kBF16:
      return CallForType<BFloat16>(f);
    case DType::kI32:
      return CallForType<std::int32_t>(f);
    default:
      break;
  }
  return CallForType<std::int64_t>(f);
}

// Like DispatchDType, but for any dtype that an array may have.
template <class F>
constexpr decltype(auto) DispatchElement(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBool:
      return CallForType<bool>(f);
    case DType::kU8:
      return CallForType<std::uint8_t>(f);
    case DType::kI8:
      return CallForType<std::int8_t>(f);
    default:
      return DispatchDType(dtype, f);
  }
}

// Addition and multiplication. Integers wrap in two's complement, so overflow is not undefined
// behaviour.
template <class T>
TESSERA_HD T WrapAdd(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}
template <class T>
TESSERA_HD T WrapMultiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  } else {
    return a * b;
  }
}

// A 128-bit integer in two's complement. A sum of up to 2^63 64-bit integers is exact, and hence
// the same in any order.
struct Int128 {
  std::uint64_t low;
  std::int64_t high;

  Int128() = default;
  TESSERA_HD explicit Int128(std::int64_t x)
      : low(static_cast<std::uint64_t>(x)), high(x < 0 ? -1 : 0) {}
  // Returns the nearest double, with ties to even.
  TESSERA_HD explicit operator double() const {
    const bool negative = high < 0;
    std::uint64_t lower = low, upper = static_cast<std::uint64_t>(high);
    if (negative) {
      lower = 0 - lower;
      upper = ~upper + (lower == 0 ? 1 : 0);
    }
    double unit = 1;
    if (upper != 0) {
      // Keep the leading 64 bits, and set the last of them if any bit after them is set. Rounding
      // these bits then gives the same double as rounding the whole number.
      for (unit = 0x1p64; upper >> 63 == 0; unit /= 2) {
        upper = upper << 1 | lower >> 63;
        lower <<= 1;
      }
      lower = upper | (lower != 0 ? 1 : 0);
    }
    const double magnitude = static_cast<double>(lower) * unit;
    return negative ? -magnitude : magnitude;
  }
};
TESSERA_HD inline Int128 WrapAdd(Int128 a, Int128 b) {
  Int128 sum;
  sum.low = a.low + b.low;
  sum.high = WrapAdd(WrapAdd(a.high, b.high), std::int64_t{sum.low < a.low});
  return sum;
}

// Returns a * b as a term of a sum. For floats and 16-bit floats the product is exact, because it
// fits in a double.
template <class T>
TESSERA_HD WideOf<T> Product(T a, T b) {
  return WrapMultiply(static_cast<WideOf<T>>(static_cast<ValueOf<T>>(a)),
                      static_cast<WideOf<T>>(static_cast<ValueOf<T>>(b)));
}

}  // namespace tessera
