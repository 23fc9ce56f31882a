// Dot along a tree whose shape depends on n alone: the same bits from every grid, every block size,
// every GPU and the CPU.
//
// Against `single_pass`: the kernel is the same, and the chunks are those of FixedTree instead of
// as many as this device likes. A request may still choose grid and block: a block then takes
// several chunks in turn, a thread several lanes, and what is added to what stays as it is. A
// product is rounded before it is added, on every device: no fused multiply-add where it would
// change a bit. kernels/fixed_tree.h defines the tree, well enough to be written again;
// tests/tree_test.cc does that.
//
// Cost at n = 2^20, f32: 8 MiB read by 256 blocks, each of which sends 16 bytes; one launch.
//
// Right for any n, block size and alignment as `single_pass`. For 2^28 floats: at most 64 products
// are added in single precision, the rest is double.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/tree/tree.h"

namespace tessera {
namespace {

double Roundoff(const DotProblem& p) { return TreeDotRoundoff(FixedTreeOf(p), p.dtype, false); }

Cost CostOf(const DotProblem& p) {
  return TreeCost(p, FixedTreeOf(p), TreeWideBytes(ReduceOp::kSum, p.dtype, false));
}

template <bool kWide>
void Enqueue(const DotProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const TreeLaunch launch = {
      .tree = FixedTreeOf(p), .grid = p.launch.grid_size, .block = p.launch.block_size};
  DispatchDType(p.dtype, [&](auto zero) { LaunchTreeDot<decltype(zero), kWide>(p, launch, cuda); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotFixedTree = {
    .name = "fixed_tree",
    .summary = "one launch along a tree whose shape depends on n alone: the same bits everywhere",
    .source = "reproducible summation by a fixed tree, kernels/fixed_tree.h",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kTreeBlockSize, .grid_size = kAnyGridSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue<false>,
    .left_range = TreeLeftRange<DotProblem>,
    .launch_wide = Enqueue<true>,
    .reads_views = true,
};

}  // namespace tessera
