// Dot with a fixed number of threads, each with its own sum.
//
// Neither barriers nor atomics are needed if no two threads write to the same location. The grid
// has a fixed size for any n. With T threads, a thread takes every T-th element, so adjacent
// threads always read adjacent elements. Each thread writes its sum to a separate cell in device
// memory. The host adds the cells.
//
//   element   0  1  2  3 | 4  5  6  7 | 8  9          4 threads
//   thread    0  1  2  3 | 0  1  2  3 | 0  1
//
// At n = 2^20, 1024 blocks of 256 threads take four elements per thread, without a barrier. The
// host fetches and adds 2 MiB of partial sums, which takes a hundred times as long as the kernel.
// As n grows, this transfer becomes a smaller part of the total time.
//
// Lesson: kernels/lessons/sum_4_coarsened.cu
#include "kernels/cuda/common/lesson.cuh"

namespace tessera {
namespace {

// The grid is limited, because the host adds one partial sum per thread.
constexpr LaunchLimits::Range kGridSize = {1, 4096};

// sums[thread] = the thread's part of a . b.
template <class F, class Terms>
__global__ void __launch_bounds__(kMostThreads)
    DotThreadPartials(Terms terms, std::int64_t n, typename F::Wide* sums) {
  sums[GridThread()] = FoldThreadInTurn<F>(GridThread(), n, GridThreads(), terms);
}

std::int64_t Threads(const Grid& grid) { return std::int64_t{grid.blocks} * grid.block_size; }

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeFixedGrid(p.n, p.launch, 256, kFixedGrid);
  LessonShape shape = WithChains(
      grid.per_thread, {.grid = grid,
                        .wide_steps = Threads(grid),
                        .extra_bytes = static_cast<std::uint64_t>(Threads(grid)) * WideBytes(p)});
  shape.depth = grid.per_thread + Threads(grid);
  return shape;
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoHost(p, Threads(grid), stream, [&]<class F>(auto terms, auto* sums, cudaStream_t on) {
    DotThreadPartials<F><<<grid.blocks, grid.block_size, 0, on>>>(terms, p.n, sums);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotThreadPartials = Lesson<ShapeOf, Enqueue, DotProblem>({
    .name = "thread_partials",
    .summary = "grid-stride loops over the operands; the host adds one value per thread",
    .source = "partial sums in global memory from the CUDA shared-memory tutorial",
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kGridSize},
});

}  // namespace tessera
