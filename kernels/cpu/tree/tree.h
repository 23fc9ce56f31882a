// The tree of kernels/same_bits/fixed_tree.h on the CPU, for the strategies fixed_tree and
// compensated. It applies the kinds of kernels/same_bits/tree_columns.h step by step as on a GPU,
// with the same bits.
#pragma once

#include <span>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Folds p along FixedTree(p.n) over all cores and stores the result. Operands may be views, and
// Reduce's may be a map. shares: all chunks, in order. Skips chunks once the stream of their share
// has been stopped.
void FoldTreeReduce(const ReduceProblem& p, bool compensated, std::span<const TeamShare> shares);
void FoldTreeDot(const DotProblem& p, bool compensated, std::span<const TeamShare> shares);

}  // namespace tessera
