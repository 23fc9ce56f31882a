// Defines the order of SearchSorted (the same as Sort's), the search and its cost, once for the
// host and the device.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/base/element.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Whether a comes before b. NaN comes after all numbers.
template <class V>
TESSERA_HD constexpr bool Precedes(V a, V b) {
  return a < b || (b != b && a == a);
}

// Whether an element comes before the place of the key.
template <class V>
TESSERA_HD constexpr bool ComesBefore(V element, V key, bool right) {
  return right ? !Precedes(key, element) : Precedes(element, key);
}

// Returns the number of elements of x[0, high) before the place of the key. The elements of
// x[0, low) are known to come before it.
template <class T>
TESSERA_HD std::int64_t PlaceOfKey(const T* x, std::int64_t low, std::int64_t high, ValueOf<T> key,
                                   bool right) {
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (ComesBefore(static_cast<ValueOf<T>>(x[middle]), key, right)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Returns how many levels of a binary search do not fit in a core's nearest cache.
constexpr std::uint64_t LevelsInMemory(std::uint64_t bytes) {
  constexpr std::uint64_t kNearest = 1 << 15;
  return static_cast<std::uint64_t>(std::bit_width(bytes / kNearest));
}

// Returns the cost of a strategy. Each key fetches a sector of `sector` bytes of x, until all of x
// is fetched, because the first levels stay in caches. A search takes one operation per level.
inline Cost SearchSortedCost(const SearchSortedProblem& p, std::uint64_t sector,
                             std::uint64_t searches_in_sequence) {
  const auto n = static_cast<std::uint64_t>(p.n), length = static_cast<std::uint64_t>(p.length);
  const std::uint64_t size = SizeOf(p.dtype);
  const auto levels = static_cast<std::uint64_t>(std::bit_width(length));
  return {.bytes = n * (size + sizeof(std::int64_t)) +
                   std::min(length * size, n * std::max(size, sector)),
          .flops = n * (levels + 1),
          .atomics = 0,
          .depth = searches_in_sequence * (levels + 1),
          .scattered = n * LevelsInMemory(length * size),
          .among = length * size};
}

}  // namespace tessera
