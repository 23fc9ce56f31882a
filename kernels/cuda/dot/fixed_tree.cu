// Dot along a tree whose shape depends only on n: the result has the same bits for every grid,
// every block size, every GPU and the CPU. `compensated` does the same in twice the precision.
//
// Compared with `single_pass`, `fixed_tree` uses the same kernel, but with the chunks of FixedTree,
// not a number of chunks that suits the device. A request may still choose the grid and the block
// size. A block then takes several chunks in sequence and a thread takes several lanes, but the
// same terms are added in the same order. On every device, a product is rounded before it is added:
// there is no fused multiply-add where it would change a bit. kernels/same_bits/fixed_tree.h
// defines the tree precisely enough for an independent implementation, and tests/tree_test.cc
// contains one.
//
// In `compensated`, a sum keeps its digits even if products of both signs cancel. f32 and the
// 16-bit types are multiplied and added in double, in which their products are exact. There is no
// wider type for f64, so a column is a Pair: the sum so far and its rounding errors. TwoProduct
// computes the error of a product with one fused multiply-add. TwoSum computes the error of an
// addition with five more additions. The errors are added separately (Dot2). At the end, the value
// and the errors are added with one rounding:
//
//   |error| <= u |sum| + (depth u)^2 * sum of |products|     u = 2^-53, depth at most about 250
//
// Even if the terms of a sum are 10^16 times larger than the sum, the result is therefore correct
// to the last digits, as long as no product underflows. A pair of f64 elements takes 10 operations,
// and an SM of an H200 has time for about 50 while memory delivers the pair.
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/tree/tree.h"
#include "kernels/same_bits/tree_strategy.h"

namespace tessera {
namespace {

TreeLaunch LaunchOf(const DotProblem& p) {
  return {.tree = FixedTreeOf(p), .grid = p.launch.grid_size, .block = p.launch.block_size};
}

template <bool kCompensated>
struct DotTree {
  static double Roundoff(const DotProblem& p) {
    return TreeDotRoundoff(FixedTreeOf(p), p.dtype, kCompensated);
  }
  static Cost CostOf(const DotProblem& p) {
    return TreeCost(p, FixedTreeOf(p), TreeWideBytes(ReduceOp::kSum, p.dtype, kCompensated));
  }
  static void Launch(const DotProblem& p, Stream& stream) {
    CudaStream& cuda = Cuda(stream);
    DispatchDType(p.dtype, [&](auto zero) {
      LaunchTreeDot<decltype(zero), kCompensated>(p, LaunchOf(p), cuda);
    });
  }
  static void LaunchShared(const DotProblem& p, std::span<const TeamShare> shares, Stream& own) {
    DispatchDType(p.dtype, [&](auto zero) {
      LaunchTreeDotShared<decltype(zero), kCompensated>(p, LaunchOf(p), shares, Cuda(own));
    });
  }
};

constexpr LaunchLimits kLimits = {.block_size = kTreeBlockSize, .grid_size = kAnyGridSize};

}  // namespace

extern constexpr Strategy<DotProblem> kDotFixedTree = FixedTreeStrategy<DotProblem, DotTree>(
    {.name = "fixed_tree", .backend = Backend::kCuda, .limits = kLimits});
extern constexpr Strategy<DotProblem> kDotCompensated = CompensatedStrategy<DotProblem, DotTree>(
    {.name = "compensated", .backend = Backend::kCuda, .limits = kLimits});

}  // namespace tessera
