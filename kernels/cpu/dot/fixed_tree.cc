// Dot along the tree of kernels/same_bits/fixed_tree.h, over all cores. It gives the bits of the
// CUDA strategies of the same names for any number of threads. kernels/cuda/dot/fixed_tree.cu says
// how.
//
// Compared with cpu_parallel, the shape of the sum is specified. The 1024 columns (of f32) of a
// core add in f32, 64 rows deep, so that vector instructions take twice as many elements as with
// double accumulators. compensated adds in double, and takes 17 operations per pair for f64.
#include "kernels/cpu/tree/tree.h"
#include "kernels/problem/strategy.h"
#include "kernels/same_bits/tree_columns.h"

namespace tessera {
namespace {

template <bool kCompensated>
double Roundoff(const DotProblem& p) {
  return TreeDotRoundoff(FixedTreeOf(p), p.dtype, kCompensated);
}

Cost CostOf(const DotProblem& p) { return TreeCost(p, FixedTreeOf(p), 0); }

template <bool kCompensated>
void Run(const DotProblem& p, Stream& stream) {
  const TeamShare all{&stream, 0, FixedTreeOf(p).chunks};
  FoldTreeDot(p, kCompensated, {&all, 1});
}

template <bool kCompensated>
void RunShared(const DotProblem& p, std::span<const TeamShare> shares, Stream&) {
  FoldTreeDot(p, kCompensated, shares);
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotCpuFixedTree = {
    .name = "fixed_tree",
    .summary = "the shape of the sum depends on n alone: the bits of every device",
    .source = "reproducible summation by a fixed tree, kernels/same_bits/fixed_tree.h",
    .deterministic = true,
    .roundoff = Roundoff<false>,
    .cost = CostOf,
    .launch = Run<false>,
    .left_range = TreeLeftRange<DotProblem>,
    .launch_wide = Run<true>,
    .launch_shared = RunShared<false>,
    .launch_wide_shared = RunShared<true>,
    .reads_views = true,
};

extern constexpr Strategy<DotProblem> kDotCpuCompensated = {
    .name = "compensated",
    .summary = "the fixed tree in twice the precision of the operands",
    .source = "Ogita, Rump and Oishi, Accurate sum and dot product, 2005",
    .deterministic = true,
    .roundoff = Roundoff<true>,
    .cost = CostOf,
    .launch = Run<true>,
    .launch_shared = RunShared<true>,
    .reads_views = true,
};

}  // namespace tessera
