// What Select costs, defined once for the host and the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/problem/strategy.h"

namespace tessera {

// Returns the cost of a strategy that reads the mask `masks` times. Every selected element fetches
// a sector of `sector` bytes, until all of x is fetched. Each element takes one operation.
inline Cost SelectCost(const SelectProblem& p, std::uint64_t masks, std::uint64_t sector,
                       std::uint64_t depth) {
  const auto n = static_cast<std::uint64_t>(p.n), count = static_cast<std::uint64_t>(p.count);
  const std::uint64_t size = SizeOf(p.dtype);
  std::uint64_t bytes = masks * n;
  if (p.wants_values) bytes += std::min(n * size, count * std::max(size, sector)) + count * size;
  if (p.wants_indices) bytes += count * sizeof(std::int64_t);
  return {.bytes = bytes, .flops = n, .atomics = 0, .depth = depth};
}

}  // namespace tessera
