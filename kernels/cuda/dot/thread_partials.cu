// Dot with a fixed number of threads, each with its own sum.
//
// Neither barriers nor atomics are needed if no two threads write to the same location. The grid
// has a fixed size for any n. A thread strides through the operands by the number of threads, so
// adjacent threads always read adjacent elements. It writes its sum to its own cell in device
// memory. The host adds the cells.
//
//   element   0  1  2  3 | 4  5  6  7 | 8  9          4 threads
//   thread    0  1  2  3 | 0  1  2  3 | 0  1
//
// At n = 2^20, 1024 blocks of 256 threads take four elements per thread, without a barrier. The
// host fetches and adds 2 MiB of partial sums. This takes a hundred times as long as the kernel,
// but as n grows, it becomes a smaller part of the total time.
#include <algorithm>

#include "kernels/cuda/dot/frame.cuh"

namespace tessera {
namespace {

// The grid is limited, because the host adds one partial sum per thread.
constexpr LaunchLimits::Range kGridSize = {1, 4096};

// partials[thread] = the thread's part of a . b.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    DotThreadPartials(const T* a, const T* b, std::int64_t n, DotWide<T>* partials) {
  using F = DotFold<T>;
  DotWide<T> sum = 0;
  for (std::int64_t i = GridThread(); i < n;) {
    DotAcc<T> chain = 0;
    for (int folded = 0; folded < kMaxChain && i < n; ++folded, i += GridThreads())
      chain = F::Combine(chain, F::Multiply(a[i], b[i]));
    sum = F::Combine(sum, F::Widen(chain));
  }
  partials[GridThread()] = sum;
}

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeFixedGrid(p.n, p.launch, 256, kFixedGrid);
  const std::int64_t threads = std::int64_t{grid.blocks} * grid.block_size;
  return {.grid = grid,
          .narrow_steps = 1 + std::min<std::int64_t>(grid.per_thread, kMaxChain),
          .wide_steps = CeilDiv(grid.per_thread, kMaxChain) + threads,
          .extra_bytes = static_cast<std::uint64_t>(threads) * sizeof(double),
          .depth = grid.per_thread + threads};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  const std::int64_t threads = std::int64_t{grid.blocks} * grid.block_size;
  IntoPartials(p, threads, stream, [&](auto* a, auto* b, auto* partials, cudaStream_t on) {
    DotThreadPartials<<<grid.blocks, grid.block_size, 0, on>>>(a, b, p.n, partials);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotThreadPartials = {
    .name = "thread_partials",
    .summary = "a fixed grid strides through the operands, the host adds one value per thread",
    .source = "partial sums in global memory from the CUDA shared-memory tutorial",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kGridSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
