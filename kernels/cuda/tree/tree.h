// Folds along the tree of kernels/same_bits/fixed_tree.h on a GPU, for the strategies single_pass,
// fixed_tree and compensated. This file has the parameters of their launches and the chunks of
// single_pass.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/same_bits/fixed_tree.h"
#include "kernels/same_bits/tree_columns.h"

namespace tessera {

// The number of vectors that a thread has in flight, for all operands together.
inline constexpr int kBatchVectors = 4;

// The parameters of a strategy's launch. A grid size of 0 means one block per chunk, and a block
// size of 0 means 256 threads.
struct TreeLaunch {
  Tree tree;
  std::uint32_t grid = 0;
  std::uint32_t block = 0;
};

// Block sizes that the strategies accept. The lanes are divided among the threads of a block.
inline constexpr LaunchLimits::Range kTreeBlockSize = {kWarpSize, kTreeLanes};

inline constexpr std::int64_t kSinglePassChunks = 18 * kTreeLanes;

// Returns the tree of single_pass. If launch.grid_size is set, the tree has that many chunks.
// Otherwise it has one chunk for each block that `multiprocessors` SMs hold at the same time, and
// up to 7 times as many for long arrays, which evens out the end of the launch. A chunk has at
// least as many rows as a thread loads at a time. If `multiprocessors` is 0, the tree has the
// smallest number of chunks that it has on any device.
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

// Returns a tree with at least as many additions as single_pass has on any device. Within a chunk
// it has as many additions as with the smallest number of chunks, and between chunks as many as
// with the largest.
inline Tree SinglePassBound(std::int64_t n, std::int64_t size, const Launch& launch) {
  Tree tree = SinglePassTree(n, size, launch, 0);
  if (launch.grid_size == 0 && tree.chunks > 1) tree.chunks = kSinglePassChunks;
  return tree;
}

// Enqueues the fold of a Dot or a Reduce along the tree. It is instantiated in kernels/cuda/tree/
// for every T, so that strategies share the kernels.
template <class T, bool kCompensated, class Problem>
void LaunchTree(const Problem& p, const TreeLaunch& launch, CudaStream& stream);

// Like LaunchTree, with the chunks divided into shares. Each stream folds the chunks of its share
// and sends their values to the mailbox of `own`, which receives all of them. REQUIRES: at least
// two shares.
template <class T, bool kCompensated, class Problem>
void LaunchTreeShared(const Problem& p, const TreeLaunch& launch, std::span<const TeamShare> shares,
                      CudaStream& own);

}  // namespace tessera
