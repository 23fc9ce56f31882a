// Reduce along the tree of `fixed_tree` of Dot, whose shape depends only on n. A result can
// therefore be reproduced elsewhere, compared bit by bit, and cached by its operands.
//
// `compensated` adds f32 and the 16-bit types in double from the first element on: 53 bits instead
// of 24. For f64, a column is a Pair, as in Dot: TwoSum computes the error of an addition, and
// TwoProduct the error of a square. An f64 takes 7 additions, and an SM of an H200 has time for
// about 25 while memory delivers the element. Integers and operations that do not round are
// computed as in `fixed_tree`. The same holds for variances of the smaller types, which are in
// double already.
//
// Kernel: kernels/cuda/tree/kernel.cuh. Lesson: kernels/lessons/sum_8_fixed_order.cu
#include "kernels/cuda/tree/strategies.cuh"

namespace tessera {

using OnCuda = CudaTree<ReduceProblem>;

extern constexpr Strategy<ReduceProblem> kReduceFixedTree =
    FixedTreeStrategy<ReduceProblem, OnCuda::In>(
        {.name = "fixed_tree", .backend = Backend::kCuda, .limits = OnCuda::kLimits});
extern constexpr Strategy<ReduceProblem> kReduceCompensated =
    CompensatedStrategy<ReduceProblem, OnCuda::In>(
        {.name = "compensated", .backend = Backend::kCuda, .limits = OnCuda::kLimits});

}  // namespace tessera
