// Dot along a tree whose shape depends on n alone: the same bits from every grid, every block size,
// every GPU and the CPU. `compensated` does the same in twice the precision.
//
// Compared with `single_pass`, `fixed_tree` has the same kernel, but the chunks are those of
// FixedTree instead of a number that suits the device. A request may still choose grid and block. A
// block then takes several chunks in sequence and a thread several lanes, but the same terms are
// added in the same order. A product is rounded before it is added, on every device: there is no
// fused multiply-add where it would change a bit. kernels/same_bits/fixed_tree.h defines the tree
// well enough to be implemented independently, and tests/tree_test.cc does that.
//
// `compensated`: where products of both signs cancel, the sum keeps its digits. f32 and the 16-bit
// types multiply and add in double, in which their products are exact. There is no wider type for
// f64, so a column is a Pair: the sum and its rounding errors so far. TwoProduct finds the error of
// a product with one fused multiply-add. TwoSum finds that of an addition with five more additions.
// The errors are added separately (Dot2). In the end, the value and the errors are added in one
// rounding:
//
//   |error| <= u |sum| + (depth u)^2 * sum of |products|     u = 2^-53, depth at most about 250
//
// A sum whose terms are 10^16 times larger than itself is therefore still right to the last digits,
// as long as no product underflows. A pair of f64 takes 10 operations, and the memory of an H200
// leaves an SM time for about 50.
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
