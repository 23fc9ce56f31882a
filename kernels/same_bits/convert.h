// Converts elements of one type to another, with the same bits on the host and the device.
//
// A conversion to a floating-point type gives the nearest value, with ties to even, and infinity
// beyond the largest value. A conversion to an integer cuts off the fraction. A value out of range
// becomes the nearest end of the range, and NaN becomes 0.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/base/element.h"

namespace tessera {

// Returns a float that rounds to 16 bits as x itself would. Rounding to nearest twice may end on
// the wrong side of a tie. If x is not representable as a float, the function therefore returns
// whichever of the adjacent floats has a last bit of 1 (rounding to odd: Boldo and Melquiond,
// "Emulation of FMA and correctly rounded sums", 2008). M: double, or an unsigned integer.
template <class M>
TESSERA_HD float ToOddFloat(M x) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<M, double>) {
    const float cut = __double2float_rz(x);
    return static_cast<double>(cut) == x ? cut : __uint_as_float(__float_as_uint(cut) | 1);
  }
#endif
  if constexpr (std::is_same_v<M, double>) {
    if (x < 0) return -ToOddFloat(-x);
    if (!(x > 0)) return static_cast<float>(x);
  }
  const auto nearest = static_cast<float>(x);
  const auto back = static_cast<M>(nearest);
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (back != x && (bits & 1) == 0) bits = back < x ? bits + 1 : bits - 1;
  return std::bit_cast<float>(bits);
}

template <class To, class From>
TESSERA_HD To ConvertElement(From element) {
  using Limits = std::numeric_limits<To>;
  const auto x = static_cast<ValueOf<From>>(element);
  if constexpr (std::is_same_v<To, From>) {
    return element;
  } else if constexpr (std::is_integral_v<To> && std::is_integral_v<From>) {
    if constexpr (sizeof(To) < sizeof(x)) {
      if (x > Limits::max()) return Limits::max();
      if (x < Limits::min()) return Limits::min();
    }
    return static_cast<To>(x);
  } else if constexpr (std::is_integral_v<To>) {
    // The first value above the range is a power of 2, which every type can represent;
    // Limits::max() may not be representable.
    constexpr auto kEnd = 2 * static_cast<ValueOf<From>>((Limits::max() >> 1) + 1);
    if (x != x) return 0;
    if (x >= kEnd) return Limits::max();
    if (x < static_cast<ValueOf<From>>(Limits::min())) return Limits::min();
    return static_cast<To>(x);
  } else if constexpr (sizeof(To) == 2 && std::is_integral_v<From>) {
    using M = std::make_unsigned_t<ValueOf<From>>;
    return To(x < 0 ? -ToOddFloat(static_cast<M>(M{0} - static_cast<M>(x)))
                    : ToOddFloat(static_cast<M>(x)));
  } else if constexpr (sizeof(To) == 2 && sizeof(From) == 8) {
    return To(ToOddFloat(x));
  } else {
    return static_cast<To>(static_cast<ValueOf<To>>(x));
  }
}

}  // namespace tessera
