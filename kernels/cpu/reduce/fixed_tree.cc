// Reduce along the tree of kernels/fixed_tree.h, over all cores: the bits of the CUDA row of the
// same name, whatever the number of threads.
//
// Against cpu_parallel: the shape of the sum is written down, and a core's 1024 columns (of f32)
// add in f32, 64 rows deep. VARIANCE needs no division an element any more.
//
// Cost at n = 2^20 (f32 SUM): 4 MiB read, 2^20 flops, 256 chunks, depth 4 + 11 + 9.
#include "kernels/cpu/tree.h"
#include "kernels/strategy.h"
#include "kernels/tree_columns.h"

namespace tessera {
namespace {

double Roundoff(const ReduceProblem& p) {
  return TreeRoundoff(FixedTreeOf(p), p.op, p.dtype, false);
}

Cost CostOf(const ReduceProblem& p) { return TreeCost(p, FixedTreeOf(p), 0); }

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceCpuFixedTree = {
    .name = "fixed_tree",
    .summary = "the shape of the sum depends on n alone: the bits of every device",
    .source = "reproducible summation by a fixed tree, kernels/fixed_tree.h",
    .deterministic = true,
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = [](const ReduceProblem& p,
                 Stream& stream) { FoldTreeReduce(p, /*compensated=*/false, stream); },
    .left_range = TreeLeftRange<ReduceProblem>,
    .launch_wide = [](const ReduceProblem& p,
                      Stream& stream) { FoldTreeReduce(p, /*compensated=*/true, stream); },
    .reads_views = true,
};

}  // namespace tessera
