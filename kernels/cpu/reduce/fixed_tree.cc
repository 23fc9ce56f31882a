// Reduce along the fixed tree (kernels/same_bits/fixed_tree.h), over all cores. The bits do not
// depend on the number of threads, and equal those of the CUDA strategies with the same names.
// kernels/cuda/reduce/fixed_tree.cu explains the method.
//
// For f32, a core keeps 1024 columns, each of which adds 64 rows in f32. `compensated` adds in
// double; for an f64 element it takes 7 operations.
#include "kernels/cpu/tree/tree.h"
#include "kernels/problem/strategy.h"
#include "kernels/same_bits/tree_columns.h"

namespace tessera {
namespace {

template <bool kCompensated>
double Roundoff(const ReduceProblem& p) {
  return TreeRoundoff(FixedTreeOf(p), p.op, p.dtype, kCompensated);
}

Cost CostOf(const ReduceProblem& p) { return TreeCost(p, FixedTreeOf(p), 0); }

template <bool kCompensated>
void Run(const ReduceProblem& p, Stream& stream) {
  const TeamShare all{&stream, 0, FixedTreeOf(p).chunks};
  FoldTreeReduce(p, kCompensated, {&all, 1});
}

template <bool kCompensated>
void RunShared(const ReduceProblem& p, std::span<const TeamShare> shares, Stream&) {
  FoldTreeReduce(p, kCompensated, shares);
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceCpuFixedTree = {
    .name = "fixed_tree",
    .summary = "a tree whose shape depends only on n: the same bits on every device",
    .source = "reproducible summation by a fixed tree, kernels/same_bits/fixed_tree.h",
    .deterministic = true,
    .roundoff = Roundoff<false>,
    .cost = CostOf,
    .launch = Run<false>,
    .wide = {.left_range = TreeLeftRange<ReduceProblem>, .launch = Run<true>},
    .shared = {.launch = RunShared<false>, .launch_wide = RunShared<true>},
    .reads_views = true,
};

extern constexpr Strategy<ReduceProblem> kReduceCpuCompensated = {
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
