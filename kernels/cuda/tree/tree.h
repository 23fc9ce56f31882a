// Folds along the tree of kernels/same_bits/fixed_tree.h on a GPU, for the strategies single_pass,
// fixed_tree and compensated: the parameters of their launches, and the chunks of single_pass.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/same_bits/fixed_tree.h"
#include "kernels/same_bits/tree_columns.h"

namespace tessera {

// Vectors that a thread has in flight, for all operands together.
inline constexpr int kBatchVectors = 4;

// The parameters of a strategy's launch. grid 0: a block for each chunk. block 0: 256 threads.
struct TreeLaunch {
  Tree tree;
  std::uint32_t grid = 0;
  std::uint32_t block = 0;
};

// Block sizes that the strategies accept. The lanes are divided among the threads of a block.
inline constexpr LaunchLimits::Range kTreeBlockSize = {kWarpSize, kTreeLanes};

// The largest number of chunks of single_pass.
inline constexpr std::int64_t kSinglePassChunks = 18 * kTreeLanes;

// The tree of single_pass. It has launch.grid_size chunks if that is set. Otherwise it has as many
// chunks as `multiprocessors` SMs hold blocks at the same time, times 7 for long arrays, which
// evens out the end of the launch. A chunk has at least as many rows as a thread loads at a time.
// No device has fewer chunks than `multiprocessors` = 0 gives.
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

// A tree with at least the additions of single_pass on any device: as many within a chunk as with
// the fewest chunks, and as many between chunks as with the most.
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

// Like the functions above, with the chunks divided into shares. Each stream folds the chunks of
// its share and sends their values to the mailbox of `own`, which receives all of them. REQUIRES:
// at least two shares.
template <class T, bool kCompensated>
void LaunchTreeReduceShared(const ReduceProblem& p, const TreeLaunch& launch,
                            std::span<const TeamShare> shares, CudaStream& own);
template <class T, bool kCompensated>
void LaunchTreeDotShared(const DotProblem& p, const TreeLaunch& launch,
                         std::span<const TeamShare> shares, CudaStream& own);

}  // namespace tessera
