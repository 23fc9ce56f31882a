// The tree of kernels/same_bits/fixed_tree.h on the CPU, for the strategies fixed_tree and
// compensated. It applies the kinds of columns in kernels/same_bits/tree_columns.h in the same
// steps as on a GPU, so the bits are the same.
#pragma once

#include <span>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Folds p along FixedTree(p.n) on all cores and stores the result. Operands may be views, and the
// operand of Reduce may also be a map. `shares` covers all chunks, in order. Skips chunks once the
// stream of their share has been stopped.
void FoldTreeReduce(const ReduceProblem& p, bool compensated, std::span<const TeamShare> shares);
void FoldTreeDot(const DotProblem& p, bool compensated, std::span<const TeamShare> shares);

}  // namespace tessera
