// The accumulators of WindowSum and the numbers that its strategies share.
#pragma once

#include <cstdint>

#include "kernels/base/element.h"
#include "kernels/cuda/common/primitives.cuh"
#include "kernels/same_bits/reduction.h"

namespace tessera {

template <class T>
using WindowFold = Fold<ReduceOp::kSum, T>;

constexpr std::int64_t WindowWidth(const WindowSumProblem& p) { return 2 * p.radius + 1; }

constexpr std::int64_t WindowResults(const WindowSumProblem& p) {
  return p.results_end() - p.first;
}

constexpr std::uint64_t WindowOutBytes(const WindowSumProblem& p) {
  return static_cast<std::uint64_t>(p.n) * SizeOf(ResultDType(ReduceOp::kSum, p.dtype));
}

// Returns the roundoff of a window that one thread adds in FoldThreadInTurn, in `pieces` pieces.
constexpr double WindowLoopRoundoff(const WindowSumProblem& p, std::int64_t pieces) {
  const std::int64_t width = WindowWidth(p);
  return SumRoundoff(p.dtype,
                     {std::min<std::int64_t>(width, kMaxChain), width / kMaxChain + 1 + pieces});
}

}  // namespace tessera
