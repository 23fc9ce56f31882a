// Dot with registers instead of shared memory: threads stride through the operands, warps sum by
// shuffles.
//
// Two changes against `hierarchical`. A thread takes items_per_thread products (16 by default),
// eight of them loaded before the first is used, so that memory has enough requests in flight and
// the work of a block outweighs its start. And a warp sums by reading each other's registers: five
// shuffles, no barrier, since a warp runs in step; the block needs one barrier for the sums of its
// warps to meet, instead of one a level.
//
// Cost at n = 2^20, f32, blocks of 256: 8 MiB read, 256 blocks with one barrier each, 256 atomic
// additions to one address, in an order that differs from run to run.
//
// Right for any n and grid: thread t takes elements t, t + threads, ... as long as there are any.
// For any block size: a warp that is not full names the lanes it has. For any alignment: loads are
// scalar, and a warp's 32 coalesce. For 2^28 floats: at most 64 products are summed in single
// precision, by one thread; the rest, also in a fixed small grid, is double.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

template <class T>
using Sum = Fold<ReduceOp::kSum, T>;

constexpr std::uint32_t kBlock = 256;
constexpr std::uint32_t kItems = 16;

Grid GridOf(const DotProblem& p) { return MakeGrid(p.n, p.launch, kBlock, kItems); }

// *sum += a . b
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotWarpShuffle(const T* a, const T* b, std::int64_t n, double* sum) {
  const double mine = FoldThread<Sum<T>>(GridThread(), n, GridThreads(),
                                         [=](std::int64_t i) { return a[i] * b[i]; });
  const double block_sum = FoldBlockShuffle<Sum<T>>(mine);
  if (threadIdx.x == 0) atomicAdd(sum, block_sum);
}

template <class T>
void Run(const DotProblem& p, CudaLane& lane) {
  const Grid grid = GridOf(p);
  auto* sum = static_cast<double*>(lane.Scratch(sizeof(double)));
  CUDA_CHECK(cudaMemsetAsync(sum, 0, sizeof(double), lane.stream()));
  DotWarpShuffle<T><<<grid.blocks, grid.block_size, 0, lane.stream()>>>(
      static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, sum);
  CUDA_CHECK_LAUNCH(DotWarpShuffle);
  CUDA_CHECK(
      cudaMemcpyAsync(&p.result->real, sum, sizeof(double), cudaMemcpyDeviceToHost, lane.stream()));
}

// Steps in double that follow a thread's chains.
std::int64_t WideSteps(const Grid& grid) {
  return CeilDiv(grid.per_thread, kMaxChain) + ShuffleDepth(grid.block_size) + grid.blocks;
}

double Roundoff(const DotProblem& p) {
  const Grid grid = GridOf(p);
  const std::int64_t chain = std::min<std::int64_t>(grid.per_thread, kMaxChain);
  return Then(static_cast<double>(chain + 1) * UnitRoundoff(p.dtype),
              static_cast<double>(WideSteps(grid)) * kRoundoffF64);
}

Cost CostOf(const DotProblem& p) {
  const Grid grid = GridOf(p);
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = 2 * n * SizeOf(p.dtype),
          .flops = 2 * n,
          .atomics = grid.blocks,
          .depth = static_cast<std::uint64_t>(grid.per_thread + WideSteps(grid))};
}

void Enqueue(const DotProblem& p, Lane& lane) {
  DispatchReal(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(lane)); });
}

}  // namespace

extern const Strategy<DotProblem> kDotWarpShuffle;
constexpr Strategy<DotProblem> kDotWarpShuffle = {
    .name = "warp_shuffle",
    .summary = "several products a thread, warps sum by shuffles, one atomic addition a block",
    .source = "grid-stride loop of the CUDA shared-memory tutorial, shuffles of the HIP reductions",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .min_compute_capability = kBaseComputeCapability,
    .deterministic = false,
    .limits = {.block_size = kAnyBlockSize,
               .grid_size = {1, 1u << 20},
               .items_per_thread = {1, 256}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = nullptr,
};

}  // namespace tessera
