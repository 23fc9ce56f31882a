// The functions of the strategies single_pass, fixed_tree and compensated, for Dot and Reduce.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/tree/tree.h"
#include "kernels/same_bits/tree_strategy.h"

namespace tessera {

template <class Problem>
struct SinglePass {
  static std::int64_t Size(const Problem& p) { return static_cast<std::int64_t>(SizeOf(p.dtype)); }
  static Tree TreeOf(const Problem& p, int multiprocessors) {
    return SinglePassTree(p.n, Size(p), p.launch, multiprocessors);
  }
  static double Roundoff(const Problem& p) {
    return TreeRoundoff(p, SinglePassBound(p.n, Size(p), p.launch), false);
  }
  static Cost CostOf(const Problem& p) {
    // The SMs of the GPU for which the cost is stated. The launch uses the device's number.
    constexpr int kUsualMultiprocessors = 132;
    return TreeCost(p, TreeOf(p, kUsualMultiprocessors), TreeWideBytes(OpOf(p), p.dtype, false));
  }
  static void Launch(const Problem& p, Stream& stream) {
    CudaStream& cuda = Cuda(stream);
    const TreeLaunch launch = {.tree = TreeOf(p, cuda.device().info().multiprocessors),
                               .block = p.launch.block_size};
    DispatchDType(p.dtype, [&](auto zero) { LaunchTree<decltype(zero), false>(p, launch, cuda); });
  }
};

// Sets all fields of a strategy except its name, which is already set.
template <class Problem>
constexpr Strategy<Problem> SinglePassStrategy(Strategy<Problem> strategy) {
  strategy.summary =
      "one launch, 16-byte loads, the last block to start folds the values of all blocks";
  strategy.source = "decoupled look-back and NCCL's LL protocol, applied to a reduction";
  strategy.backend = Backend::kCuda;
  strategy.deterministic = true;
  strategy.limits = {.block_size = kTreeBlockSize,
                     .grid_size = {1, static_cast<std::uint32_t>(kSinglePassChunks)}};
  strategy.roundoff = SinglePass<Problem>::Roundoff;
  strategy.cost = SinglePass<Problem>::CostOf;
  strategy.launch = SinglePass<Problem>::Launch;
  return strategy;
}

// The functions for FixedTreeStrategy and CompensatedStrategy.
template <class Problem>
struct CudaTree {
  static constexpr LaunchLimits kLimits = {.block_size = kTreeBlockSize, .grid_size = kAnyGridSize};

  static TreeLaunch LaunchOf(const Problem& p) {
    return {.tree = FixedTreeOf(p), .grid = p.launch.grid_size, .block = p.launch.block_size};
  }

  template <bool kCompensated>
  struct In {
    static double Roundoff(const Problem& p) {
      return TreeRoundoff(p, FixedTreeOf(p), kCompensated);
    }
    static Cost CostOf(const Problem& p) {
      return TreeCost(p, FixedTreeOf(p), TreeWideBytes(OpOf(p), p.dtype, kCompensated));
    }
    static void Launch(const Problem& p, Stream& stream) {
      DispatchDType(p.dtype, [&](auto zero) {
        LaunchTree<decltype(zero), kCompensated>(p, LaunchOf(p), Cuda(stream));
      });
    }
    static void LaunchShared(const Problem& p, std::span<const TeamShare> shares, Stream& own) {
      DispatchDType(p.dtype, [&](auto zero) {
        LaunchTreeShared<decltype(zero), kCompensated>(p, LaunchOf(p), shares, Cuda(own));
      });
    }
  };
};

}  // namespace tessera
