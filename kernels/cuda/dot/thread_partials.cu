// Dot with a fixed number of threads, each with a sum of its own.
//
// The naive kernel, in which every thread adds to one cell, loses most of what it adds. The
// simplest cure needs neither shared memory and barriers nor atomics: no thread writes where
// another does. The grid is fixed, whatever n is; a thread strides through the operands by the
// number of threads, so that neighbours always read neighbouring elements, and leaves its sum in
// its own cell of device memory. The host adds the cells.
//
//   element   0  1  2  3 | 4  5  6  7 | 8  9          4 threads
//   thread    0  1  2  3 | 0  1  2  3 | 0  1
//
// Cost at n = 2^20, f32, 1024 blocks of 256: 8 MiB read in rounds of 2^18 elements, four a thread,
// without a barrier; 2 MiB of partial sums written, and fetched and added by the host. Memory would
// take 2 us at 4.3 TB/s, the host needs a hundred times as long. With n the share of the host
// falls: the cells stay as many as there are threads.
//
// Right for any n and grid: a thread without elements leaves 0. For any block size and alignment:
// threads do not meet, and loads are scalar. For 2^28 floats: chains of at most 64 products in
// single precision, the rest double.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/dot.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
// Every thread costs the host a partial sum.
constexpr LaunchLimits::Range kGridSize = {1, 4096};

Grid GridOf(const DotProblem& p) { return MakeFixedGrid(p.n, p.launch, kBlock, kFixedGrid); }

// partials[thread] = the part of a . b that belongs to the thread.
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotThreadPartials(const T* a, const T* b, std::int64_t n, DotWide<T>* partials) {
  partials[GridThread()] = FoldThreadInTurn<DotFold<T>>(
      GridThread(), n, GridThreads(),
      [=](std::int64_t i) { return DotFold<T>::Multiply(a[i], b[i]); });
}

std::int64_t Threads(const Grid& grid) { return std::int64_t{grid.blocks} * grid.block_size; }

template <class T>
void Run(const DotProblem& p, CudaStream& stream) {
  const Grid grid = GridOf(p);
  const std::int64_t threads = Threads(grid);
  auto* partials = static_cast<DotWide<T>*>(
      stream.Scratch(static_cast<std::size_t>(threads) * sizeof(DotWide<T>)));
  DotThreadPartials<T><<<grid.blocks, grid.block_size, 0, stream.handle()>>>(
      static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, partials);
  CUDA_CHECK_LAUNCH(DotThreadPartials);
  SumOnHost(partials, threads, p.result, stream);
}

double Roundoff(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return DotRoundoff(p.dtype, 1 + std::min<std::int64_t>(grid.per_thread, kMaxChain),
                     CeilDiv(grid.per_thread, kMaxChain) + Threads(grid));
}

Cost CostOf(const DotProblem& p) {
  const Grid grid = GridOf(p);
  const auto threads = static_cast<std::uint64_t>(Threads(grid));
  return {.bytes = OperandBytes(p) + threads * sizeof(double),
          .flops = 2 * static_cast<std::uint64_t>(p.n),
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(grid.per_thread) + threads};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotThreadPartials = {
    .name = "thread_partials",
    .summary = "a fixed grid strides through the operands, the host adds one value a thread",
    .source = "partial sums in global memory of the CUDA shared-memory tutorial",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kGridSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
