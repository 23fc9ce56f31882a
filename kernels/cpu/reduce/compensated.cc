// Reduce in twice the precision of its operand, along the tree of kernels/fixed_tree.h: the bits of
// the CUDA row of the same name, which says how.
//
// Cost at n = 2^20 (f32 SUM): 4 MiB read, 2^20 flops in double; f64: 8 MiB and 7 flops an element.
#include "kernels/cpu/tree.h"
#include "kernels/strategy.h"
#include "kernels/tree_columns.h"

namespace tessera {
namespace {

double Roundoff(const ReduceProblem& p) {
  return TreeRoundoff(FixedTreeOf(p), p.op, p.dtype, true);
}

Cost CostOf(const ReduceProblem& p) { return TreeCost(p, FixedTreeOf(p), 0); }

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceCpuCompensated = {
    .name = "compensated",
    .summary = "the fixed tree in twice the precision of the operands",
    .source = "Ogita, Rump and Oishi, Accurate sum and dot product, 2005",
    .deterministic = true,
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = [](const ReduceProblem& p,
                 Stream& stream) { FoldTreeReduce(p, /*compensated=*/true, stream); },
    .reads_views = true,
};

}  // namespace tessera
