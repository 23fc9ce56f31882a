// Dot with registers instead of shared memory: warps sum with shuffles.
//
// Compared with `coarsened`, the lanes of a warp read each other's registers. The five shuffles of
// a warp need neither a barrier nor memory, because they synchronize the warp. Instead of one
// barrier per level, the block has a single barrier, before the sums of its warps are added
// (FoldBlockShuffle in primitives.cuh). In addition, the grid strides over the elements, so a
// request may set the number of blocks instead of the items per thread (16 by default).
//
//   offset 16   lane l adds lane l + 16's value to its own
//   offset 8    lane l adds lane l + 8's ...
//   offset 1    lane 0 has the sum of the warp
//
// At n = 2^20 there are 256 blocks with one barrier and an atomic addition each.
//
// Kernel: FoldWithShuffles. Lesson: kernels/lessons/sum_5_shuffles.cu
#include "kernels/cuda/common/ladder.cuh"

namespace tessera {
namespace {

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 16);
  return WithChains(grid.per_thread, {.grid = grid,
                                      .wide_steps = ShuffleDepth(grid.block_size) + grid.blocks,
                                      .atomics = grid.blocks});
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoOneSum(p, stream, [&]<class F>(auto terms, auto end, cudaStream_t on) {
    FoldWithShuffles<F><<<grid.blocks, grid.block_size, 0, on>>>(terms, p.n, end);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotWarpShuffle = Lesson<ShapeOf, Enqueue, DotProblem>({
    .name = "warp_shuffle",
    .summary =
        "several products per thread, warps sum with shuffles, one atomic addition per block",
    .source =
        "grid-stride loop from the CUDA shared-memory tutorial, shuffles from the HIP reductions",
    .limits = {.block_size = kAnyBlockSize,
               .grid_size = kAnyGridSize,
               .items_per_thread = kAnyItems},
});

}  // namespace tessera
