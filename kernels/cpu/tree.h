// The tree of kernels/fixed_tree.h on the CPU, for the strategies fixed_tree and compensated: the
// kinds of kernels/tree_columns.h step by step as on a GPU, the same bits.
#pragma once

#include <span>

#include "kernels/device.h"
#include "kernels/strategy.h"

namespace tessera {

// Folds p along FixedTree(p.n) over all cores and leaves the result; operands may be views, that of
// Reduce a map. shares:
// all chunks, in order. Leaves chunks out once the stream of their share has been stopped.
void FoldTreeReduce(const ReduceProblem& p, bool compensated, std::span<const TeamShare> shares);
void FoldTreeDot(const DotProblem& p, bool compensated, std::span<const TeamShare> shares);

// Strategy::launch_part.
void FoldTreeReducePart(const ReduceProblem& p, bool compensated, const ArrayPart& part,
                        void* values, Stream& stream);
void FoldTreeDotPart(const DotProblem& p, bool compensated, const ArrayPart& part, void* values,
                     Stream& stream);

// What the values of all chunks of an array of n elements give, those of any device (step 5 of
// kernels/fixed_tree.h); values may lie anyhow. Those of a Dot as of SUM.
void FinishTree(ReduceOp op, DType dtype, bool compensated, std::int64_t n, const void* values,
                Scalar* result);
// Zeros between the fields of values, which else are bytes of whatever was there before.
void ClearPadding(ReduceOp op, DType dtype, bool compensated, std::int64_t count, void* values);

}  // namespace tessera
