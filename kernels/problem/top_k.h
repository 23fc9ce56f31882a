// The order in which TopK sorts, defined once for the host and the device: elements are converted
// to unsigned keys, and the smallest keys are selected.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/base/element.h"
#include "kernels/problem/strategy.h"

namespace tessera {

template <class T>
using KeyOf = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                 std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;

// Keys increase with elements. -0 and 0 have the same key, and every NaN has the largest key. If
// the largest elements are wanted, all bits are flipped, so that the smallest keys are selected in
// either case. For a floating-point number, the highest bit is the inverted sign, and the magnitude
// bits of a negative number are inverted.
template <class T>
TESSERA_HD KeyOf<T> TopKKey(T element, bool smallest) {
  using Key = KeyOf<T>;
  constexpr auto kSign = static_cast<Key>(Key{1} << (8 * sizeof(T) - 1));
  auto bits = std::bit_cast<Key>(element);
  Key key;
  if constexpr (std::is_integral_v<T>) {
    key = bits ^ kSign;
  } else {
    // The bits of infinity; larger magnitudes are NaNs.
    constexpr Key kInfinity = std::is_same_v<T, double>     ? Key(0x7ff0000000000000u)
                              : std::is_same_v<T, float>    ? Key(0x7f800000u)
                              : std::is_same_v<T, BFloat16> ? Key(0x7f80u)
                                                            : Key(0x7c00u);
    const auto magnitude = static_cast<Key>(bits & static_cast<Key>(~kSign));
    if (magnitude == 0) bits = 0;
    key = bits & kSign ? static_cast<Key>(~bits) : static_cast<Key>(bits | kSign);
    if (magnitude > kInfinity) key = static_cast<Key>(~Key{0});
  }
  return smallest ? key : static_cast<Key>(~key);
}

// Returns the index in `values` and `indices` of the j-th element that is selected from a row.
TESSERA_HD inline std::int64_t TopKPlace(std::int64_t row, std::int64_t j, std::int64_t k,
                                         std::int64_t inner) {
  return (row / inner * k + j) * inner + row % inner;
}

// Returns the bytes of `values` and `indices` together.
inline std::uint64_t TopKOutBytes(const TopKProblem& p) {
  return static_cast<std::uint64_t>(p.rows * p.k) * (SizeOf(p.dtype) + sizeof(std::int64_t));
}

}  // namespace tessera
