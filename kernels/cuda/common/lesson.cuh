// Types that describe the launches of the lessons, the strategies that teach Dot and Reduce step by
// step. The error bounds and costs of the lessons are derived from this description.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/problem/strategy.h"

namespace tessera {

struct LessonShape {
  Grid grid;
  // The largest number of roundings or other steps that a term goes through: first in Fold::Acc
  // (narrow), then in Fold::Wide (wide).
  std::int64_t narrow_steps = 0;
  std::int64_t wide_steps = 0;
  std::uint64_t extra_bytes = 0;  // moved in addition to the operands
  std::uint64_t atomics = 0;      // number of atomics on one address
  std::int64_t depth = 0;         // longest chain of dependent steps; 0 means the sum of the steps
};

// Returns the shape of a lesson whose threads each fold `terms` terms, in chains of kMaxChain.
// `others` holds the steps before and after the chains.
constexpr LessonShape WithChains(std::int64_t terms, LessonShape others) {
  others.narrow_steps += std::min<std::int64_t>(terms, kMaxChain);
  others.wide_steps += CeilDiv(terms, kMaxChain);
  others.depth = terms + others.wide_steps;
  return others;
}

// Returns the number of steps in which a thread folds `values` values that are already Wide. Every
// kMaxChain values take one additional step, which folds the chain into the total.
constexpr std::int64_t WideChainSteps(std::int64_t values) {
  return values + CeilDiv(values, kMaxChain);
}

// Return the launch's value of the parameter, or the default if the launch does not set it.
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
