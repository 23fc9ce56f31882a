// Dot along a tree whose shape depends only on n: the result has the same bits for every grid,
// every block size, every GPU and the CPU. `compensated` does the same in twice the precision.
//
// `fixed_tree` uses the same kernel as `single_pass`, but with the chunks of FixedTree instead of
// as many chunks as suit the device. A request may still choose the grid and the block size. A
// block then takes several chunks in sequence and a thread takes several lanes, but the same
// terms are added in the same order. On every device, a product is rounded before it is added:
// there is no fused multiply-add where it would change a bit. kernels/same_bits/fixed_tree.h
// defines the tree precisely enough for an independent implementation, and tests/tree_test.cc
// contains one.
//
//   chunk 0      chunk 1      chunk 2        a chunk: TreeRows(n) rows of 4096 bytes
//   `- 256 lanes `- 256 lanes `- 256 lanes   halving tree: the value of the chunk
//       `------------`------------`--------- last block: 256 lanes of chunks, halving tree
//
// In `compensated`, a sum stays accurate even if products of both signs cancel. f32 and the 16-bit
// types are multiplied and added in double, in which their products are exact. There is no wider
// type for f64, so a column is a Pair: the sum so far and its rounding errors. TwoProduct computes
// the error of a product with one fused multiply-add. TwoSum computes the error of an addition with
// five more additions. The errors are added separately (Dot2). At the end, the value and the errors
// are added with one rounding:
//
//   |error| <= u |sum| + (depth u)^2 * sum of |products|     u = 2^-53, depth at most about 250
//
// Even if the terms of a sum are 10^16 times larger than the sum, the result is therefore correct
// to the last digits, as long as no product underflows. A pair of f64 elements takes 10 operations,
// and an SM of an H200 has time for about 50 while memory delivers the pair.
//
// Kernel: kernels/cuda/tree/kernel.cuh. Lesson: kernels/lessons/sum_8_fixed_order.cu
#include "kernels/cuda/tree/strategies.cuh"

namespace tessera {

using OnCuda = CudaTree<DotProblem>;

extern constexpr Strategy<DotProblem> kDotFixedTree = FixedTreeStrategy<DotProblem, OnCuda::In>(
    {.name = "fixed_tree", .backend = Backend::kCuda, .limits = OnCuda::kLimits});
extern constexpr Strategy<DotProblem> kDotCompensated = CompensatedStrategy<DotProblem, OnCuda::In>(
    {.name = "compensated", .backend = Backend::kCuda, .limits = OnCuda::kLimits});

}  // namespace tessera
