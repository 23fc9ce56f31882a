// Dot with registers instead of shared memory: threads stride through the operands, warps sum by
// shuffles.
//
// Against `coarsened`: a warp sums by reading each other's registers. Five shuffles need no barrier
// and no memory, since a warp runs in step; the block needs one barrier for the sums of its warps
// to meet, instead of one a level. And the grid strides: a request may fix the number of blocks
// instead of the items of a thread (16 by default).
//
//   offset 16   lane l adds lane l + 16's value to its own
//   offset 8    lane l adds lane l + 8's ...
//   offset 1    lane 0 has the sum of the warp
//
// Cost at n = 2^20, f32, blocks of 256: 8 MiB read, 256 blocks with one barrier each, 256 atomic
// additions to one address, in an order that differs from run to run. Memory takes 2 us at 4.3
// TB/s.
//
// Right for any n and grid: thread t takes elements t, t + threads, ... as long as there are any.
// For any block size: a warp that is not full names the lanes it has. For any alignment: loads are
// scalar, and a warp's 32 coalesce. For 2^28 floats: at most 64 products are summed in single
// precision, by one thread; the rest, also in a fixed small grid, is double.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/dot.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
constexpr std::uint32_t kItems = 16;

Grid GridOf(const DotProblem& p) { return MakeGrid(p.n, p.launch, kBlock, kItems); }

// *total += a . b
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotWarpShuffle(const T* a, const T* b, std::int64_t n, DotWide<T>* total) {
  using F = DotFold<T>;
  const DotWide<T> mine = FoldThread<F>(GridThread(), n, GridThreads(),
                                        [=](std::int64_t i) { return F::Multiply(a[i], b[i]); });
  const DotWide<T> sum = FoldBlockShuffle<F>(mine);
  if (threadIdx.x == 0) AtomicAdd(total, sum);
}

template <class T>
void Run(const DotProblem& p, CudaStream& stream) {
  const Grid grid = GridOf(p);
  auto* total = MakeSum<DotWide<T>>(stream);
  DotWarpShuffle<T><<<grid.blocks, grid.block_size, 0, stream.handle()>>>(
      static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, total);
  CUDA_CHECK_LAUNCH(DotWarpShuffle);
  FetchSum(total, p.result, stream);
}

// Steps in Wide that follow a thread's chains.
std::int64_t WideSteps(const Grid& grid) {
  return CeilDiv(grid.per_thread, kMaxChain) + ShuffleDepth(grid.block_size) + grid.blocks;
}

double Roundoff(const DotProblem& p) {
  const Grid grid = GridOf(p);
  const std::int64_t chain = std::min<std::int64_t>(grid.per_thread, kMaxChain);
  return DotRoundoff(p.dtype, 1 + chain, WideSteps(grid));
}

Cost CostOf(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return {.bytes = OperandBytes(p),
          .flops = 2 * static_cast<std::uint64_t>(p.n),
          .atomics = grid.blocks,
          .depth = static_cast<std::uint64_t>(grid.per_thread + WideSteps(grid))};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotWarpShuffle = {
    .name = "warp_shuffle",
    .summary = "several products a thread, warps sum by shuffles, one atomic addition a block",
    .source = "grid-stride loop of the CUDA shared-memory tutorial, shuffles of the HIP reductions",
    .backend = Backend::kCuda,
    .limits = {.block_size = kAnyBlockSize,
               .grid_size = kAnyGridSize,
               .items_per_thread = kAnyItems},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
