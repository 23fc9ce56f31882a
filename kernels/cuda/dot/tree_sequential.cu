// Dot with a tree in shared memory, in two numberings.
//
// `tree_interleaved` is the tree of `tree_global`, but the products of a block (two per thread) are
// in shared memory, where a step costs tens of cycles instead of hundreds. Each block adds its
// value to the result with an atomic addition, so no further launch is needed. DoublingStrides and
// HalvingStrides in primitives.cuh show the steps of both numberings.
//
// Thread t is active at stride s if s divides t. The test takes a division, and adjacent threads
// get different results: a warp executes the addition if any of its 32 threads needs it. At stride
// 2 all warps do half of the work in the full time, at stride 4 a quarter, and so on. The cells
// that a warp reads are 2s apart. Shared memory has 32 banks, and at s = 16 all of a warp's cells
// are in one bank. At n = 2^20 there are 2048 blocks with 10 barriers and an atomic addition each.
//
// `tree_sequential` changes only the numbering: strides halve instead of doubling, and thread t
// adds the cell one stride further on to cell t, as long as t is below the stride. In all active
// warps but one, all 32 threads have work, and inactive warps skip the addition as a
// whole. The test takes a comparison and no division. A warp's cells are 32 adjacent ones in 32
// different banks. There are as many barriers and atomic additions as in `tree_interleaved`, but a
// third of the instructions.
//
// Lessons: kernels/lessons/sum_2_tree.cu, kernels/lessons/sum_3_sequential.cu
#include "kernels/cuda/common/lesson.cuh"

namespace tessera {
namespace {

// Strides: DoublingStrides or HalvingStrides (primitives.cuh), which fold the cells. Dynamic shared
// memory: two Acc per thread.
template <class Strides, class F, class Terms, class End>
__global__ void __launch_bounds__(kMostThreads) DotTree(Terms terms, std::int64_t n, End end) {
  using Acc = typename F::Acc;
  Acc* products = DynamicShared<Acc>();
  const std::int64_t begin = std::int64_t{2} * blockIdx.x * blockDim.x;
  for (unsigned i = threadIdx.x; i < 2 * blockDim.x; i += blockDim.x)
    products[i] = begin + i < n ? terms(begin + i) : Acc(0);
  __syncthreads();  // every product of the block is in its cell
  Strides::template Fold<F>(products, 2 * blockDim.x);
  end(F::Widen(products[0]));
}

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 2);
  return {.grid = grid,
          .narrow_steps = CeilLog2(std::int64_t{2} * grid.block_size),
          .wide_steps = grid.blocks,
          .atomics = grid.blocks};
}

template <class Strides>
void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoOneSum(p, stream, [&]<class F>(auto terms, auto end, cudaStream_t on) {
    DotTree<Strides, F>
        <<<grid.blocks, grid.block_size, 2 * grid.block_size * AccBytes(p), on>>>(terms, p.n, end);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotTreeInterleaved =
    Lesson<ShapeOf, Enqueue<DoublingStrides>, DotProblem>({
        .name = "tree_interleaved",
        .summary = "a tree of doubling strides in shared memory, one atomic addition per block",
        .source = "tree reduction in threadgroup memory from the notes on dot products in Metal",
        .limits = {.block_size = kAnyBlockSize},
    });

extern constexpr Strategy<DotProblem> kDotTreeSequential =
    Lesson<ShapeOf, Enqueue<HalvingStrides>, DotProblem>({
        .name = "tree_sequential",
        .summary = "a tree of halving strides in shared memory, one atomic addition per block",
        .source =
            "tree reduction without control divergence from the notes on dot products in Metal",
        .limits = {.block_size = kAnyBlockSize},
    });

}  // namespace tessera
