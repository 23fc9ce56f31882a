// Reduce with registers instead of shared memory, like Dot's `warp_shuffle` but for any operation.
//
// Unlike in `two_kernels_unrolled`, the lanes of a warp read each other's registers, so the block
// has a single barrier. A thread folds items_per_thread elements (16 by default) and loads
// eight of them before it uses the first. If the grid is a single block, that block writes the
// result itself. Otherwise a second launch of the kernel folds the blocks' values in index order,
// so the same input and launch give the same bits. At n = 2^20 there are 256 blocks in the first
// launch and one in the second. Starting the second takes about as long as the memory accesses.
//
// Kernel: FoldWithShuffles. Lesson: kernels/lessons/sum_5_shuffles.cu
#include "kernels/cuda/common/ladder.cuh"

namespace tessera {
namespace {

LessonShape ShapeOf(const ReduceProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 16);
  const std::int64_t second =
      WideChainSteps(CeilDiv(grid.blocks, kMostThreads)) + ShuffleDepth(kMostThreads);
  return SecondKernelShape(p, grid, ShuffleDepth(grid.block_size), second,
                           /*twice=*/grid.blocks > 1);
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoSecondKernel</*kAlways=*/false>(
      p, grid, kMostThreads, stream,
      [&]<class F>(const Grid& g, auto terms, std::int64_t n, auto end, cudaStream_t on) {
        FoldWithShuffles<F><<<g.blocks, g.block_size, 0, on>>>(terms, n, end);
      });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceWarpShuffle =
    Lesson<ShapeOf, Enqueue, ReduceProblem>({
        .name = "warp_shuffle",
        .summary = "several elements per thread, warps fold with shuffles, a second kernel folds "
                   "the blocks",
        .source = "reduction with warp shuffles from the HIP training examples",
        .deterministic = true,
        .limits = {.block_size = kAnyBlockSize,
                   .grid_size = kAnyGridSize,
                   .items_per_thread = kAnyItems},
    });

}  // namespace tessera
