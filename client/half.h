// Conversions between float and the two-byte types, which C++20 does not have: f16 (IEEE 754
// binary16) and bf16 (the upper half of a binary32). Rounding is to nearest, ties to even; NaN
// stays NaN.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace tessera {

inline std::uint16_t FloatToBf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  // Rounding could carry a NaN's payload over into infinity; the quiet bit survives.
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float Bf16ToFloat(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t FloatToF16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00u);
  const float magnitude = std::fabs(value);
  constexpr float kOverflow = 65520.0f;  // half way from the largest f16 to the next power of two
  if (magnitude >= kOverflow) return static_cast<std::uint16_t>(sign | 0x7c00u);
  constexpr float kSmallestNormal = 0x1p-14f;
  if (magnitude < kSmallestNormal) {
    // Subnormals are multiples of 2^-24. Rounding up to 1024 of them gives the bits of the smallest
    // normal, rightly.
    return static_cast<std::uint16_t>(sign | std::lrint(magnitude * 0x1p24f));
  }
  // 13 bits of the mantissa go; a carry out of it raises the exponent as it should.
  std::uint32_t rounded = std::bit_cast<std::uint32_t>(magnitude);
  rounded += 0xfffu + (rounded >> 13 & 1u);
  constexpr std::uint32_t kBiasDifference = 127 - 15;
  return static_cast<std::uint16_t>(sign | ((rounded >> 13) - (kBiasDifference << 10)));
}

inline float F16ToFloat(std::uint16_t bits) {
  const std::uint32_t mantissa = bits & 0x3ffu;
  const std::uint32_t exponent = bits >> 10 & 0x1fu;
  float magnitude;
  if (exponent == 0x1f) {
    magnitude = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  } else {
    magnitude = std::bit_cast<float>((exponent + (127 - 15)) << 23 | mantissa << 13);
  }
  return (bits & 0x8000u) != 0 ? -magnitude : magnitude;
}

}  // namespace tessera
