// The extents of an array. Uses only the standard library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tessera {

inline constexpr int kMaxRank = 8;

// Extents of an array, outermost first. Rank 0 is a scalar: one element.
struct Shape {
  int rank = 0;
  std::array<std::int64_t, kMaxRank> dims{};

  constexpr std::int64_t operator[](int i) const { return dims[static_cast<std::size_t>(i)]; }
  constexpr std::int64_t& operator[](int i) { return dims[static_cast<std::size_t>(i)]; }
  // The product of the extents. It fits in 63 bits, since every Shape is checked before it reaches
  // kernels/.
  constexpr std::int64_t elements() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= (*this)[i];
    return n;
  }
  friend constexpr bool operator==(const Shape& a, const Shape& b) {
    if (a.rank != b.rank) return false;
    for (int i = 0; i < a.rank; ++i)
      if (a[i] != b[i]) return false;
    return true;
  }
};

}  // namespace tessera
