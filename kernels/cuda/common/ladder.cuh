// The ladder of sums: the kernels that the lessons of Dot and Reduce share. Each kernel changes one
// thing about the kernel before it. `terms` is a function from an index to a term, and `end` takes
// the value of each block (lesson.cuh explains both), so one kernel adds products, folds elements
// with any operation, and folds the values of an earlier launch.
//
// Invariant of all kernels: each of the terms [0, n) is folded into the value of one block exactly
// once, in an order that depends only on n and the launch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/common/lesson.cuh"

namespace tessera {

// A tree in device memory (`tree_global`, `interleaved`, `coalesced`). A block folds 2 * blockDim.x
// cells in place. In the first launch it writes the terms to the cells, because operands must not
// change. In a later launch, the cells hold the values of the launch before it.
template <class Strides, class F, class Terms, class A, class End>
__global__ void __launch_bounds__(kMostThreads)
    FoldInMemory(Terms terms, std::int64_t n, A* cells, End end) {
  const std::int64_t begin = std::int64_t{2} * blockIdx.x * blockDim.x;
  const auto count = static_cast<unsigned>(min(n - begin, std::int64_t{2} * blockDim.x));
  if constexpr (!std::is_same_v<Terms, Values<F>>) {
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) cells[begin + i] = terms(begin + i);
    __syncthreads();  // the cells of the block are written
  }
  Strides::template Fold<F>(cells + begin, count);
  end(count == 0 ? F::template Identity<typename F::Wide>() : Widened<F>(cells[begin]));
}

template <class Strides, class Problem>
void FoldInMemoryLevels(const Problem& p, Stream& stream) {
  const std::uint32_t block = BlockSize(p.launch);
  IntoLevels(p, 2 * block, stream,
             [&]<class F>(auto terms, std::int64_t n, unsigned blocks, auto end, cudaStream_t on) {
               if constexpr (std::is_same_v<decltype(terms), Values<F>>) {
                 FoldInMemory<Strides, F><<<blocks, block, 0, on>>>(terms, n, terms.values, end);
               } else {
                 using Acc = typename F::Acc;
                 auto* cells = static_cast<Acc*>(
                     Cuda(stream).Scratch(static_cast<std::size_t>(n) * sizeof(Acc)));
                 FoldInMemory<Strides, F><<<blocks, block, 0, on>>>(terms, n, cells, end);
               }
             });
}

template <class Problem>
LessonShape InMemoryShape(const Problem& p) {
  const std::uint32_t block = BlockSize(p.launch);
  const LaterLevels later = MakeLaterLevels(p.n, 2 * block);
  const std::int64_t depth = CeilLog2(2 * block);
  return {.grid = {.block_size = block},
          .narrow_steps = depth,
          .wide_steps = later.count * depth,
          // Every cell is written once, and every fold reads two cells and writes one.
          .extra_bytes = 4 * (static_cast<std::uint64_t>(p.n) * AccBytes(p) +
                              static_cast<std::uint64_t>(later.values) * WideBytes(p))};
}

// One term per thread, and a tree in shared memory (`hierarchical`, `no_stride`). Dynamic shared
// memory: an Acc per thread.
template <class F, class Terms, class End>
__global__ void __launch_bounds__(kMostThreads) FoldOneEach(Terms terms, std::int64_t n, End end) {
  using Acc = typename F::Acc;
  const std::int64_t i = GridThread();
  const Acc mine = i < n ? terms(i) : F::template Identity<Acc>();
  end(F::Widen(FoldBlockTree<F>(mine, DynamicShared<Acc>())));
}

// A grid that strides over the terms: each of T threads folds every T-th term before the tree
// (`block_partials`, `grid_stride`, `two_pass`, `two_kernels_unrolled`). Dynamic shared memory: a
// Wide per thread.
template <class F, class Terms, class End>
__global__ void __launch_bounds__(kMostThreads)
    FoldWithStride(Terms terms, std::int64_t n, End end) {
  const auto mine = FoldThreadInTurn<F>(GridThread(), n, GridThreads(), terms);
  end(FoldBlockTree<F>(mine, DynamicShared<typename F::Wide>()));
}

// Launches the kernel, with shared memory for the tree.
struct LaunchStrides {
  template <class F>
  void operator()(const Grid& grid, auto terms, std::int64_t n, auto end, cudaStream_t on) const {
    const std::size_t shared = grid.block_size * sizeof(typename F::Wide);
    FoldWithStride<F><<<grid.blocks, grid.block_size, shared, on>>>(terms, n, end);
  }
};

// A fixed grid whose blocks' values the host folds (`block_partials`, `grid_stride`).
template <class Problem>
LessonShape StridesIntoHostShape(const Problem& p) {
  const Grid grid = MakeFixedGrid(p.n, p.launch, 256, kFixedGrid);
  return WithChains(grid.per_thread, {.grid = grid,
                                      .wide_steps = CeilLog2(grid.block_size) + grid.blocks,
                                      .extra_bytes = grid.blocks * WideBytes(p)});
}

template <class Problem>
void StridesIntoHost(const Problem& p, Stream& stream) {
  const Grid grid = StridesIntoHostShape(p).grid;
  IntoHost(p, grid.blocks, stream, [&]<class F>(auto terms, auto* values, cudaStream_t on) {
    LaunchStrides().operator()<F>(grid, terms, p.n, ToValues<F>{values}, on);
  });
}

// One contiguous part of items * blockDim.x terms per block, with eight loads in flight per thread
// (`coarsened`). Dynamic shared memory: a Wide per thread.
template <class F, class Terms, class End>
__global__ void __launch_bounds__(kMostThreads)
    FoldParts(Terms terms, std::int64_t n, std::int64_t items, End end) {
  const std::int64_t first = blockIdx.x * items * blockDim.x;
  const auto mine = FoldThread<F>(first + threadIdx.x, min(n, first + items * blockDim.x),
                                  std::int64_t{blockDim.x}, terms);
  end(FoldBlockTree<F>(mine, DynamicShared<typename F::Wide>()));
}

// A grid that strides over the terms with eight loads in flight per thread, and a tree in registers
// (`warp_shuffle`).
template <class F, class Terms, class End>
__global__ void __launch_bounds__(kMostThreads)
    FoldWithShuffles(Terms terms, std::int64_t n, End end) {
  end(FoldBlockShuffle<F>(FoldThread<F>(GridThread(), n, GridThreads(), terms)));
}

}  // namespace tessera
