// Defines the cost of Select, once for the host and the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/problem/strategy.h"

namespace tessera {

// Returns the number of operations: one for each element of the mask, and one load and one store
// for each element of a result.
inline std::uint64_t SelectFlops(const SelectProblem& p) {
  const std::uint64_t results = (p.wants_values ? 1 : 0) + (p.wants_indices ? 1 : 0);
  return static_cast<std::uint64_t>(p.n) + 2 * results * static_cast<std::uint64_t>(p.count);
}

// Returns the cost of a strategy that reads the mask `masks` times. Every selected element fetches
// a sector of `sector` bytes, until all of x is fetched.
inline Cost SelectCost(const SelectProblem& p, std::uint64_t masks, std::uint64_t sector,
                       std::uint64_t depth) {
  const auto n = static_cast<std::uint64_t>(p.n), count = static_cast<std::uint64_t>(p.count);
  const std::uint64_t size = SizeOf(p.dtype);
  std::uint64_t bytes = masks * n;
  if (p.wants_values) bytes += std::min(n * size, count * std::max(size, sector)) + count * size;
  if (p.wants_indices) bytes += count * sizeof(std::int64_t);
  return {.bytes = bytes, .flops = SelectFlops(p), .atomics = 0, .depth = depth};
}

}  // namespace tessera
