// The strategies `fixed_tree` and `compensated` of Dot and of Reduce, on either backend. Both fold
// along the tree of fixed_tree.h; `compensated` does so in twice the precision.
#pragma once

#include "kernels/problem/strategy.h"
#include "kernels/same_bits/tree_columns.h"

namespace tessera {

// These set the other fields of a strategy whose name, backend and limits are set.
// Tree<kCompensated> has the functions of a Strategy: Roundoff, CostOf, Launch and LaunchShared.
template <class Problem, template <bool kCompensated> class Tree>
constexpr Strategy<Problem> FixedTreeStrategy(Strategy<Problem> strategy) {
  strategy.summary = "a tree whose shape depends only on n: the same bits on every device";
  strategy.source = "reproducible summation by a fixed tree, kernels/same_bits/fixed_tree.h";
  strategy.deterministic = true;
  strategy.roundoff = Tree<false>::Roundoff;
  strategy.cost = Tree<false>::CostOf;
  strategy.launch = Tree<false>::Launch;
  strategy.wide = {.left_range = TreeLeftRange<Problem>, .launch = Tree<true>::Launch};
  strategy.shared = {.launch = Tree<false>::LaunchShared, .launch_wide = Tree<true>::LaunchShared};
  strategy.reads_views = true;
  return strategy;
}
template <class Problem, template <bool kCompensated> class Tree>
constexpr Strategy<Problem> CompensatedStrategy(Strategy<Problem> strategy) {
  strategy.summary = "the fixed tree in twice the precision of the operands";
  strategy.source = "Ogita, Rump and Oishi, Accurate sum and dot product, 2005";
  strategy.deterministic = true;
  strategy.roundoff = Tree<true>::Roundoff;
  strategy.cost = Tree<true>::CostOf;
  strategy.launch = Tree<true>::Launch;
  strategy.shared = {.launch = Tree<true>::LaunchShared};
  strategy.reads_views = true;
  return strategy;
}

}  // namespace tessera
