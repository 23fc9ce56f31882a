// Reduce along the fixed tree (kernels/same_bits/fixed_tree.h), on all cores. The bits do not
// depend on the number of threads, and equal those of the CUDA strategies with the same names.
// kernels/cuda/reduce/fixed_tree.cu explains the method.
//
// For f32, a core keeps 1024 columns, each of which adds 64 rows in f32. `compensated` adds in
// double; for an f64 element it takes 7 operations.
#include "kernels/cpu/tree/tree.h"
#include "kernels/problem/strategy.h"
#include "kernels/same_bits/tree_strategy.h"

namespace tessera {
namespace {

template <bool kCompensated>
struct ReduceTree {
  static double Roundoff(const ReduceProblem& p) {
    return TreeRoundoff(p, FixedTreeOf(p), kCompensated);
  }
  static Cost CostOf(const ReduceProblem& p) { return TreeCost(p, FixedTreeOf(p), 0); }
  static void Launch(const ReduceProblem& p, Stream& stream) {
    const TeamShare all{&stream, 0, FixedTreeOf(p).chunks};
    FoldTreeReduce(p, kCompensated, {&all, 1});
  }
  static void LaunchShared(const ReduceProblem& p, std::span<const TeamShare> shares, Stream&) {
    FoldTreeReduce(p, kCompensated, shares);
  }
};

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceCpuFixedTree =
    FixedTreeStrategy<ReduceProblem, ReduceTree>({.name = "fixed_tree"});
extern constexpr Strategy<ReduceProblem> kReduceCpuCompensated =
    CompensatedStrategy<ReduceProblem, ReduceTree>({.name = "compensated"});

}  // namespace tessera
