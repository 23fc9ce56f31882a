// Reduce along a tree whose shape depends only on n: the result has the same bits for every grid,
// every block size, every GPU and the CPU. `compensated` does the same in twice the precision.
//
// Compared with `single_pass`, `fixed_tree` uses the same kernel, but with the chunks of FixedTree,
// not a number of chunks that suits the device. A request may still choose the grid and the block
// size. A block then takes several chunks in sequence and a thread takes several lanes, but the
// same terms are added in the same order. A result can therefore be repeated elsewhere, compared
// bit by bit and cached by its operands. kernels/same_bits/fixed_tree.h defines the tree precisely
// enough for an independent implementation, and tests/tree_test.cc contains one.
//
//   chunk 0      chunk 1      chunk 2        a chunk: TreeRows(n) rows of 4096 bytes
//   `- 256 lanes `- 256 lanes `- 256 lanes   halving tree: the value of the chunk
//       `------------`------------`--------- last block: 256 lanes of chunks, halving tree
//
// In `compensated`, a sum keeps its digits even if terms of both signs cancel. f32 and the 16-bit
// types are added in double starting with the first element: 53 bits instead of 24. There is no
// wider type for f64, so a column is a Pair: the sum so far and its rounding errors. TwoSum
// computes the error of an addition with five more additions. TwoProduct computes the error of a
// square with one fused multiply-add. The errors are added separately (Sum2). At the end, the value
// and the errors are added with one rounding:
//
//   |error| <= u |sum| + (depth u)^2 * sum of |terms|     u = 2^-53, depth at most about 250
//
// Even if the terms of a sum are 10^16 times larger than the sum, the result is therefore correct
// to the last digits. Integers and operations that do not round are computed as in `fixed_tree`.
// The same holds for variances of the smaller types, which are in double already. An f64 takes 7
// additions, and an SM of an H200 has time for about 25 while memory delivers the element.
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/tree/tree.h"
#include "kernels/same_bits/tree_strategy.h"

namespace tessera {
namespace {

TreeLaunch LaunchOf(const ReduceProblem& p) {
  return {.tree = FixedTreeOf(p), .grid = p.launch.grid_size, .block = p.launch.block_size};
}

template <bool kCompensated>
struct ReduceTree {
  static double Roundoff(const ReduceProblem& p) {
    return TreeRoundoff(FixedTreeOf(p), p.op, p.dtype, kCompensated);
  }
  static Cost CostOf(const ReduceProblem& p) {
    return TreeCost(p, FixedTreeOf(p), TreeWideBytes(p.op, p.dtype, kCompensated));
  }
  static void Launch(const ReduceProblem& p, Stream& stream) {
    CudaStream& cuda = Cuda(stream);
    DispatchDType(p.dtype, [&](auto zero) {
      LaunchTreeReduce<decltype(zero), kCompensated>(p, LaunchOf(p), cuda);
    });
  }
  static void LaunchShared(const ReduceProblem& p, std::span<const TeamShare> shares, Stream& own) {
    DispatchDType(p.dtype, [&](auto zero) {
      LaunchTreeReduceShared<decltype(zero), kCompensated>(p, LaunchOf(p), shares, Cuda(own));
    });
  }
};

constexpr LaunchLimits kLimits = {.block_size = kTreeBlockSize, .grid_size = kAnyGridSize};

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceFixedTree =
    FixedTreeStrategy<ReduceProblem, ReduceTree>(
        {.name = "fixed_tree", .backend = Backend::kCuda, .limits = kLimits});
extern constexpr Strategy<ReduceProblem> kReduceCompensated =
    CompensatedStrategy<ReduceProblem, ReduceTree>(
        {.name = "compensated", .backend = Backend::kCuda, .limits = kLimits});

}  // namespace tessera
