// Dot along the fixed tree (kernels/same_bits/fixed_tree.h), over all cores. The bits do not depend
// on the number of threads, and equal those of the CUDA strategies with the same names.
// kernels/cuda/dot/fixed_tree.cu explains the method.
//
// For f32, a core keeps 1024 columns, each of which adds 64 rows in f32. A vector instruction
// therefore processes twice as many elements as with the double accumulators of `cpu_parallel`.
// `compensated` adds in double; for a pair of f64 elements it takes 17 operations.
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
    .summary = "a tree whose shape depends only on n: the same bits on every device",
    .source = "reproducible summation by a fixed tree, kernels/same_bits/fixed_tree.h",
    .deterministic = true,
    .roundoff = Roundoff<false>,
    .cost = CostOf,
    .launch = Run<false>,
    .wide = {.left_range = TreeLeftRange<DotProblem>, .launch = Run<true>},
    .shared = {.launch = RunShared<false>, .launch_wide = RunShared<true>},
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
    .shared = {.launch = RunShared<true>},
    .reads_views = true,
};

}  // namespace tessera
