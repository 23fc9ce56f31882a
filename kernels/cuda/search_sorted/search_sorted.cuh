// Code that the strategies of SearchSorted share: their cost.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/problem/search_sorted.h"

namespace tessera {

// Returns the cost of a strategy in which each thread looks up `per_thread` keys one by one.
inline Cost CudaSearchSortedCost(const SearchSortedProblem& p, std::int64_t per_thread) {
  constexpr std::uint64_t kSector = 32;
  return SearchSortedCost(p, kSector, static_cast<std::uint64_t>(per_thread));
}

}  // namespace tessera
