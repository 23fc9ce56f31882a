// Folds along the tree of kernels/same_bits/fixed_tree.h on a GPU, as the strategies single_pass,
// fixed_tree and compensated do: what they ask for, and the chunks of single_pass.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/same_bits/fixed_tree.h"
#include "kernels/same_bits/tree_columns.h"

namespace tessera {

// Vectors that a thread has in flight, of all operands together.
inline constexpr int kBatchVectors = 4;

// What a strategy asks for. grid, block: 0 for a block a chunk of 256 threads.
struct TreeLaunch {
  Tree tree;
  std::uint32_t grid = 0;
  std::uint32_t block = 0;
};

// Block sizes of the strategies: lanes are shared out to whatever threads there are.
inline constexpr LaunchLimits::Range kTreeBlockSize = {kWarpSize, kTreeLanes};

// Chunks of single_pass at most.
inline constexpr std::int64_t kSinglePassChunks = 18 * kTreeLanes;

// The tree of single_pass: launch.grid_size chunks. Or as many as `multiprocessors` hold blocks at
// once, times 7 in long arrays, which evens out what is left when the first blocks end; but no
// fewer rows than a thread loads at once. On every device no fewer chunks than with no SMs.
inline Tree SinglePassTree(std::int64_t n, std::int64_t size, const Launch& launch,
                           int multiprocessors) {
  constexpr std::int64_t kLeast = 32, kMost = kSinglePassChunks / 4;
  const std::int64_t total = TreeTotalRows(n, size);
  if (launch.grid_size != 0)
    return MakeTree(n, size, std::max<std::int64_t>(1, CeilDiv(total, launch.grid_size)));
  if (total <= 8) return MakeTree(n, size, 8);
  const std::int64_t wave = 4 * std::clamp<std::int64_t>(multiprocessors, kLeast, kMost);
  const std::int64_t waves =
      std::clamp<std::int64_t>(total / (wave * kTreeSegmentRows), 1,
                               std::clamp<std::int64_t>(kSinglePassChunks / wave, 1, 7));
  return MakeTree(n, size, std::max<std::int64_t>(kBatchVectors, CeilDiv(total, waves * wave)));
}

// The additions of single_pass on any device: of the fewest chunks inside them, of the most
// between.
inline Tree SinglePassBound(std::int64_t n, std::int64_t size, const Launch& launch) {
  Tree tree = SinglePassTree(n, size, launch, 0);
  if (launch.grid_size == 0 && tree.chunks > 1) tree.chunks = kSinglePassChunks;
  return tree;
}

// Instantiated in kernels/cuda/tree/ for every T, so that strategies share the kernels.
template <class T, bool kCompensated>
void LaunchTreeReduce(const ReduceProblem& p, const TreeLaunch& launch, CudaStream& stream);
template <class T, bool kCompensated>
void LaunchTreeDot(const DotProblem& p, const TreeLaunch& launch, CudaStream& stream);

// The same with chunks shared out: each stream folds those of its share and sends their values to
// the mailbox of `own`, which receives all. Two shares at least.
template <class T, bool kCompensated>
void LaunchTreeReduceShared(const ReduceProblem& p, const TreeLaunch& launch,
                            std::span<const TeamShare> shares, CudaStream& own);
template <class T, bool kCompensated>
void LaunchTreeDotShared(const DotProblem& p, const TreeLaunch& launch,
                         std::span<const TeamShare> shares, CudaStream& own);

}  // namespace tessera
