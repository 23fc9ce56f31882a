// The strategies `fixed_tree` and `compensated` of Dot and of Reduce, on either backend. Both fold
// along the tree of fixed_tree.h; `compensated` does so in twice the precision.
#pragma once

#include "kernels/problem/strategy.h"
#include "kernels/same_bits/tree_columns.h"

namespace tessera {

// Tree<kCompensated> has the functions of a Strategy: Roundoff, CostOf, Launch and LaunchShared.
template <class Problem, template <bool kCompensated> class Tree>
constexpr Strategy<Problem> FixedTreeStrategy(Backend backend, LaunchLimits limits = {}) {
  return {
      .name = "fixed_tree",
      .summary = "a tree whose shape depends only on n: the same bits on every device",
      .source = "reproducible summation by a fixed tree, kernels/same_bits/fixed_tree.h",
      .backend = backend,
      .deterministic = true,
      .limits = limits,
      .roundoff = Tree<false>::Roundoff,
      .cost = Tree<false>::CostOf,
      .launch = Tree<false>::Launch,
      .wide = {.left_range = TreeLeftRange<Problem>, .launch = Tree<true>::Launch},
      .shared = {.launch = Tree<false>::LaunchShared, .launch_wide = Tree<true>::LaunchShared},
      .reads_views = true,
  };
}

template <class Problem, template <bool kCompensated> class Tree>
constexpr Strategy<Problem> CompensatedStrategy(Backend backend, LaunchLimits limits = {}) {
  return {
      .name = "compensated",
      .summary = "the fixed tree in twice the precision of the operands",
      .source = "Ogita, Rump and Oishi, Accurate sum and dot product, 2005",
      .backend = backend,
      .deterministic = true,
      .limits = limits,
      .roundoff = Tree<true>::Roundoff,
      .cost = Tree<true>::CostOf,
      .launch = Tree<true>::Launch,
      .shared = {.launch = Tree<true>::LaunchShared},
      .reads_views = true,
  };
}

}  // namespace tessera
