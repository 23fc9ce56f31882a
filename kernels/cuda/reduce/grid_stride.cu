// Reduce with threads that stride through the input, and three ways to fold the blocks' values.
//
// `grid_stride` is `block_partials` of Dot with any operation. Compared with `no_stride`, the grid
// has the size that suits the GPU, for any n. However long the input is, blocks start once and run
// the tree once, and the host gets the same small number of values. At n = 2^20, 1024 blocks of 256
// threads fold four elements per thread, and 8 KiB go to the host. What remains is the cost of this
// round trip, about 10 us.
//
// `two_pass` uses the same kernel to fold the values of the blocks. A kernel has no barrier between
// its blocks; the end of the first launch serves as such a barrier. The second launch has a single
// block, with one thread for each block of the first launch, so there are at most 1024 blocks. At n
// = 2^20, starting the second launch takes about as long as the memory accesses.
//
//   launch 1   [block 0] [block 1] ... [block g - 1]    each strides, folds a tree, leaves a value
//   launch 2   [   block of g threads   ]               thread t starts with value t
//
// In `two_kernels_unrolled`, the grid is not fixed. Its size follows from n and from the number of
// elements per thread, items_per_thread (8 by default), which is the unroll factor. Each time the
// factor doubles, the numbers of blocks to start, trees to fold and values to pass on are halved.
// The kernel does not know the factor: it strides by the number of threads in the grid. There may
// be more than 1024 blocks, so the threads of the second launch stride through their values. At n =
// 2^20 there are 512 blocks in the first launch and one in the second.
//
// Kernel: FoldWithStride. Lesson: kernels/lessons/sum_4_coarsened.cu
#include "kernels/cuda/common/ladder.cuh"

namespace tessera {
namespace {

// --- two_pass ---

LessonShape TwoPassShape(const ReduceProblem& p) {
  const Grid grid = MakeFixedGrid(p.n, p.launch, 256, kFixedGrid);
  return SecondKernelShape(p, grid, CeilLog2(grid.block_size),
                           WideChainSteps(1) + CeilLog2(grid.blocks), /*twice=*/grid.blocks > 1);
}

void TwoPass(const ReduceProblem& p, Stream& stream) {
  const Grid grid = TwoPassShape(p).grid;
  IntoSecondKernel</*kAlways=*/false>(p, grid, grid.blocks, stream, LaunchStrides());
}

// --- two_kernels_unrolled ---

LessonShape UnrolledShape(const ReduceProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 8);
  const std::int64_t second =
      WideChainSteps(CeilDiv(grid.blocks, kMostThreads)) + CeilLog2(kMostThreads);
  return SecondKernelShape(p, grid, CeilLog2(grid.block_size), second, /*twice=*/true);
}

void Unrolled(const ReduceProblem& p, Stream& stream) {
  const Grid grid = UnrolledShape(p).grid;
  IntoSecondKernel</*kAlways=*/true>(p, grid, kMostThreads, stream, LaunchStrides());
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceGridStride =
    Lesson<StridesIntoHostShape<ReduceProblem>, StridesIntoHost<ReduceProblem>, ReduceProblem>({
        .name = "grid_stride",
        .summary = "grid-stride loops over the input, a tree per block, the host folds the values",
        .source = "reduction with striding from the HIP training examples",
        .deterministic = true,
        .limits = {.block_size = kAnyBlockSize, .grid_size = kAnyGridSize},
    });

extern constexpr Strategy<ReduceProblem> kReduceTwoPass =
    Lesson<TwoPassShape, TwoPass, ReduceProblem>({
        .name = "two_pass",
        .summary = "grid-stride loops, a tree per block, a second launch of the kernel folds "
                   "the blocks",
        .source = "reduction with two kernel calls from the HIP training examples",
        .deterministic = true,
        .limits = {.block_size = kAnyBlockSize, .grid_size = {1, kMostThreads}},
    });

extern constexpr Strategy<ReduceProblem> kReduceTwoKernelsUnrolled =
    Lesson<UnrolledShape, Unrolled, ReduceProblem>({
        .name = "two_kernels_unrolled",
        .summary = "items_per_thread elements per thread, a tree per block, a second kernel folds "
                   "the blocks",
        .source = "reduction with two kernels and unrolling from the HIP training examples",
        .deterministic = true,
        .limits = {.block_size = kAnyBlockSize, .items_per_thread = kAnyItems},
    });

}  // namespace tessera
