// Dot with several products per thread before the tree.
//
// Compared with `hierarchical`, a thread sums items_per_thread products (8 by default) in a
// register before the block's tree combines the threads' sums. The cost of the tree, its barriers
// and the atomic addition is paid once for all of these products, and proportionally fewer blocks
// start. The loads of eight products are in flight together, which keeps the memory busy
// (FoldThread in primitives.cuh). A block's part is contiguous. With T threads per block, each
// thread takes every T-th element of this part, so adjacent threads read adjacent elements:
//
//   block 0                      block 1                      blocks of 4, 2 items per thread
//   0  1  2  3 | 4  5  6  7      8  9 10 11 | 12 13 14 15     element
//   0  1  2  3 | 0  1  2  3      0  1  2  3 |  0  1  2  3     thread
//
// At n = 2^20 there are 512 blocks with 9 barriers and an atomic addition each. From about 2^24
// elements on, memory bandwidth is the limit.
//
// Kernel: FoldParts. Lesson: kernels/lessons/sum_4_coarsened.cu
#include "kernels/cuda/common/ladder.cuh"

namespace tessera {
namespace {

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 8);
  return WithChains(Items(p.launch), {.grid = grid,
                                      .wide_steps = CeilLog2(grid.block_size) + grid.blocks,
                                      .atomics = grid.blocks});
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoOneSum(p, stream, [&]<class F>(auto terms, auto end, cudaStream_t on) {
    FoldParts<F><<<grid.blocks, grid.block_size, grid.block_size * WideBytes(p), on>>>(
        terms, p.n, Items(p.launch), end);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotCoarsened = Lesson<ShapeOf, Enqueue, DotProblem>({
    .name = "coarsened",
    .summary =
        "several products per thread in a register, a tree and one atomic addition per block",
    .source = "thread coarsening, from the notes on dot products in Metal",
    .limits = {.block_size = kAnyBlockSize, .items_per_thread = kAnyItems},
});

}  // namespace tessera
