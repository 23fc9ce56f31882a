// Reduce with one element per thread: `hierarchical` of Dot, but the host folds the blocks' values.
//
// This is the first kernel that most people write once they know shared memory. Compared with
// `coarsened`, nothing is gained: a thread waits for a single load, and then half of the threads
// are idle in the tree's first level and more in every later level. The strategy is here for
// comparison with `grid_stride`. At n = 2^20 there are 4096 blocks with 9 barriers each. The round
// trip to the host takes ten times as long as the memory accesses.
//
// Kernel: FoldOneEach. Lesson: kernels/lessons/sum_3_sequential.cu
#include "kernels/cuda/common/ladder.cuh"

namespace tessera {
namespace {

LessonShape ShapeOf(const ReduceProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 1);
  return {.grid = grid,
          .narrow_steps = CeilLog2(grid.block_size),
          .wide_steps = grid.blocks,
          .extra_bytes = grid.blocks * WideBytes(p)};
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoHost(p, grid.blocks, stream, [&]<class F>(auto terms, auto* values, cudaStream_t on) {
    const std::size_t shared = grid.block_size * sizeof(typename F::Acc);
    FoldOneEach<F><<<grid.blocks, grid.block_size, shared, on>>>(terms, p.n, ToValues<F>{values});
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceNoStride = Lesson<ShapeOf, Enqueue, ReduceProblem>({
    .name = "no_stride",
    .summary =
        "one element per thread, a tree in shared memory per block, the host folds the values",
    .source = "reduction without striding from the HIP training examples",
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
});

}  // namespace tessera
