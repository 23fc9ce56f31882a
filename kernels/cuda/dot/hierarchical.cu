// Dot with a hierarchy: trees within blocks, and atomic additions between blocks. This is the
// plainest form of the pattern that the fast strategies refine.
//
// Compared with `tree_sequential`, a block does less work: a thread multiplies one pair of elements
// and keeps one cell instead of two. More blocks share the work, and the first level of the tree
// occupies half of the threads.
//
// At n = 2^20 there are 4096 blocks with 9 barriers and an atomic addition each. These are twice as
// many blocks and atomics as in `tree_sequential`, with half the shared memory. A thread does one
// multiplication for these 9 barriers and has one pair of loads in flight. The time to start blocks
// and to wait at barriers is the limit, not memory.
//
// Kernel: FoldOneEach. Lesson: kernels/lessons/sum_3_sequential.cu
#include "kernels/cuda/common/ladder.cuh"

namespace tessera {
namespace {

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 1);
  return {.grid = grid,
          .narrow_steps = CeilLog2(grid.block_size),
          .wide_steps = grid.blocks,
          .atomics = grid.blocks};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoOneSum(p, stream, [&]<class F>(auto terms, auto end, cudaStream_t on) {
    FoldOneEach<F>
        <<<grid.blocks, grid.block_size, grid.block_size * AccBytes(p), on>>>(terms, p.n, end);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotHierarchical = Lesson<ShapeOf, Enqueue, DotProblem>({
    .name = "hierarchical",
    .summary = "one product per thread, a tree in shared memory and one atomic addition per block",
    .source = "hierarchical tree reduction from the notes on dot products in Metal",
    .limits = {.block_size = kAnyBlockSize},
});

}  // namespace tessera
