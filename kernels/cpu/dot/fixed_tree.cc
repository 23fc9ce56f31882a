// Dot along the fixed tree (kernels/same_bits/fixed_tree.h), on all cores. The bits do not depend
// on the number of threads, and equal those of the CUDA strategies with the same names.
// kernels/cuda/dot/fixed_tree.cu explains the method.
//
// For f32, a core keeps 1024 columns, each of which adds 64 rows in f32. A vector instruction
// therefore processes twice as many elements as with the double accumulators of `cpu_parallel`.
// `compensated` adds in double; for a pair of f64 elements it takes 17 operations.
#include "kernels/cpu/tree/tree.h"
#include "kernels/problem/strategy.h"
#include "kernels/same_bits/tree_strategy.h"

namespace tessera {
namespace {

template <bool kCompensated>
struct DotTree {
  static double Roundoff(const DotProblem& p) {
    return TreeRoundoff(p, FixedTreeOf(p), kCompensated);
  }
  static Cost CostOf(const DotProblem& p) { return TreeCost(p, FixedTreeOf(p), 0); }
  static void Launch(const DotProblem& p, Stream& stream) {
    const TeamShare all{&stream, 0, FixedTreeOf(p).chunks};
    FoldTreeDot(p, kCompensated, {&all, 1});
  }
  static void LaunchShared(const DotProblem& p, std::span<const TeamShare> shares, Stream&) {
    FoldTreeDot(p, kCompensated, shares);
  }
};

}  // namespace

extern constexpr Strategy<DotProblem> kDotCpuFixedTree =
    FixedTreeStrategy<DotProblem, DotTree>({.name = "fixed_tree"});
extern constexpr Strategy<DotProblem> kDotCpuCompensated =
    CompensatedStrategy<DotProblem, DotTree>({.name = "compensated"});

}  // namespace tessera
