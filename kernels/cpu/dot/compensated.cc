// Dot in twice the precision of its operands, along the tree of kernels/fixed_tree.h: the bits of
// the CUDA row of the same name, which says how.
//
// Cost at n = 2^20 (f32): 8 MiB read, 2^21 flops in double; f64: 16 MiB and 17 flops a pair.
#include "kernels/cpu/tree.h"
#include "kernels/strategy.h"
#include "kernels/tree_columns.h"

namespace tessera {
namespace {

double Roundoff(const DotProblem& p) { return TreeDotRoundoff(FixedTreeOf(p), p.dtype, true); }

Cost CostOf(const DotProblem& p) { return TreeCost(p, FixedTreeOf(p), 0); }

}  // namespace

extern constexpr Strategy<DotProblem> kDotCpuCompensated = {
    .name = "compensated",
    .summary = "the fixed tree in twice the precision of the operands",
    .source = "Ogita, Rump and Oishi, Accurate sum and dot product, 2005",
    .deterministic = true,
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = [](const DotProblem& p,
                 Stream& stream) { FoldTreeDot(p, /*compensated=*/true, stream); },
    .reads_views = true,
};

}  // namespace tessera
