// Dot along a tree whose shape depends on n alone: the same bits from every grid, every block size,
// every GPU and the CPU. And the same in twice the precision.
//
// `fixed_tree`, against `single_pass`: the kernel is the same, and the chunks are those of
// FixedTree instead of as many as this device likes. A request may still choose grid and block: a
// block then takes several chunks in turn, a thread several lanes, and what is added to what stays
// as it is. A product is rounded before it is added, on every device: no fused multiply-add where
// it would change a bit. kernels/same_bits/fixed_tree.h defines the tree, well enough to be written
// again; tests/tree_test.cc does that.
//
// `compensated`: where products of both signs cancel, the sum keeps its digits. f32 and the 16-bit
// types multiply and add in double, in which their products are exact. f64 has nothing wider, so a
// column is a Pair, the sum and what rounding has taken from it so far: TwoProduct finds the error
// of a product with one fused multiply-add, TwoSum that of an addition with five more, and the
// errors are added up on the side (Dot2). In the end value and errors meet in one rounding:
//
//   |error| <= u |sum| + (depth u)^2 * sum of |products|     u = 2^-53, depth at most about 250
//
// so that a sum whose terms are 10^16 times larger than itself is still right to the last digits,
// as long as no product underflows. 10 operations per pair of f64, where memory leaves an H200's SM
// time for about 50.
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/tree/tree.h"

namespace tessera {
namespace {

template <bool kCompensated>
double Roundoff(const DotProblem& p) {
  return TreeDotRoundoff(FixedTreeOf(p), p.dtype, kCompensated);
}

template <bool kCompensated>
Cost CostOf(const DotProblem& p) {
  return TreeCost(p, FixedTreeOf(p), TreeWideBytes(ReduceOp::kSum, p.dtype, kCompensated));
}

template <bool kCompensated>
void Enqueue(const DotProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const TreeLaunch launch = {
      .tree = FixedTreeOf(p), .grid = p.launch.grid_size, .block = p.launch.block_size};
  DispatchDType(p.dtype,
                [&](auto zero) { LaunchTreeDot<decltype(zero), kCompensated>(p, launch, cuda); });
}

template <bool kCompensated>
void EnqueueShared(const DotProblem& p, std::span<const TeamShare> shares, Stream& own) {
  const TreeLaunch launch = {
      .tree = FixedTreeOf(p), .grid = p.launch.grid_size, .block = p.launch.block_size};
  DispatchDType(p.dtype, [&](auto zero) {
    LaunchTreeDotShared<decltype(zero), kCompensated>(p, launch, shares, Cuda(own));
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotFixedTree = {
    .name = "fixed_tree",
    .summary = "one launch along a tree whose shape depends on n alone: the same bits everywhere",
    .source = "reproducible summation by a fixed tree, kernels/same_bits/fixed_tree.h",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kTreeBlockSize, .grid_size = kAnyGridSize},
    .roundoff = Roundoff<false>,
    .cost = CostOf<false>,
    .launch = Enqueue<false>,
    .left_range = TreeLeftRange<DotProblem>,
    .launch_wide = Enqueue<true>,
    .launch_shared = EnqueueShared<false>,
    .launch_wide_shared = EnqueueShared<true>,
    .reads_views = true,
};

extern constexpr Strategy<DotProblem> kDotCompensated = {
    .name = "compensated",
    .summary = "the fixed tree in twice the precision of the operands",
    .source = "Ogita, Rump and Oishi, Accurate sum and dot product, 2005",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kTreeBlockSize, .grid_size = kAnyGridSize},
    .roundoff = Roundoff<true>,
    .cost = CostOf<true>,
    .launch = Enqueue<true>,
    .launch_shared = EnqueueShared<true>,
    .reads_views = true,
};

}  // namespace tessera
