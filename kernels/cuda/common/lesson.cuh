// A lesson of Dot or Reduce describes its launches with these types. Its error bound and its cost
// are derived from them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/problem/strategy.h"

namespace tessera {

struct LessonShape {
  Grid grid;
  // The largest number of roundings or other steps of a term: in Fold::Acc, then in
  // Fold::Wide.
  std::int64_t narrow_steps = 0;
  std::int64_t wide_steps = 0;
  std::uint64_t extra_bytes = 0;  // moved in addition to the operands
  std::uint64_t atomics = 0;      // on one address
  std::int64_t depth = 0;         // longest chain of dependent operations; 0: the sum of the steps
};

// The shape of a lesson whose threads fold `terms` terms each, in chains of kMaxChain; `others` has
// the steps before and after.
constexpr LessonShape WithChains(std::int64_t terms, LessonShape others) {
  others.narrow_steps += std::min<std::int64_t>(terms, kMaxChain);
  others.wide_steps += CeilDiv(terms, kMaxChain);
  others.depth = terms + others.wide_steps;
  return others;
}

// Steps of a thread that folds values that are already Wide. Every kMaxChain of them add one step,
// the fold of the chain into the total.
constexpr std::int64_t WideChainSteps(std::int64_t values) {
  return values + CeilDiv(values, kMaxChain);
}

// The value that the launch names, or the default.
constexpr std::uint32_t BlockSize(const Launch& launch) {
  return launch.block_size != 0 ? launch.block_size : 256;
}
constexpr std::int64_t Items(const Launch& launch) {
  return launch.items_per_thread != 0 ? launch.items_per_thread : 8;
}

constexpr Cost CostOfShape(const LessonShape& shape, std::uint64_t operand_bytes,
                           std::uint64_t flops) {
  return {.bytes = operand_bytes + shape.extra_bytes,
          .flops = flops,
          .atomics = shape.atomics,
          .depth = static_cast<std::uint64_t>(
              shape.depth != 0 ? shape.depth : shape.narrow_steps + shape.wide_steps)};
}

}  // namespace tessera
