// Reduce with registers instead of shared memory: threads stride through the input, warps fold by
// shuffles, and a second kernel folds what the blocks have left.
//
// Against `privatized`: a thread folds items_per_thread elements (16 by default) before it meets
// others, eight of them loaded before the first is used; a warp folds its values by reading each
// other's registers, five shuffles without a barrier, since it runs in step; the warps of a block
// meet once. Two launches are enough for any n, and one when the grid is a single block. The second
// kernel is one block that takes the partial values in index order: the same input and launch give
// the same bits.
//
// Cost at n = 2^20, f32, blocks of 256: 4 MiB read; 256 blocks and one more, with one barrier each;
// 2 KiB written and read again in between.
//
// Right for any n and grid: thread t takes elements t, t + threads, ... as long as there are any; n
// = 0 is one block of identities. For any block size: a warp that is not full names the lanes it
// has. For any alignment: loads are scalar, and a warp's 32 coalesce. For 2^28 floats: at most 64
// elements are folded in single precision, by one thread; the rest, also in a fixed small grid, is
// double.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
constexpr std::uint32_t kItems = 16;
constexpr std::uint32_t kLastBlock = 1024;

Grid GridOf(const ReduceProblem& p) { return MakeGrid(p.n, p.launch, kBlock, kItems); }

// Folds the elements of each block to partials[block] or, when there is only one block, to the
// result.
template <class F, class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    ReduceWarpShuffle(const T* x, std::int64_t n, typename F::Wide* partials, Scalar* result) {
  const auto value = FoldBlockShuffle<F>(FoldThread<F>(
      GridThread(), n, GridThreads(), [=](std::int64_t i) { return F::Load(x[i], i); }));
  if (threadIdx.x != 0) return;
  if (gridDim.x == 1) {
    F::Finish(value, n, result);
  } else {
    partials[blockIdx.x] = value;
  }
}

// The result of a reduction of `count` elements, from the values of its blocks. One block.
template <class F>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    ReducePartials(const typename F::Wide* partials, std::int64_t blocks, std::int64_t count,
                   Scalar* result) {
  const auto value = FoldBlockShuffle<F>(
      FoldThread<F>(threadIdx.x, blocks, blockDim.x, [=](std::int64_t i) { return partials[i]; }));
  if (threadIdx.x == 0) F::Finish(value, count, result);
}

template <class F, class T>
void Run(const ReduceProblem& p, CudaLane& lane) {
  using Wide = typename F::Wide;
  const Grid grid = GridOf(p);
  auto* partials = static_cast<Wide*>(lane.Scratch(grid.blocks * sizeof(Wide)));
  ReduceWarpShuffle<F><<<grid.blocks, grid.block_size, 0, lane.stream()>>>(
      static_cast<const T*>(p.x), p.n, partials, p.result);
  CUDA_CHECK_LAUNCH(ReduceWarpShuffle);
  if (grid.blocks == 1) return;
  ReducePartials<F><<<1, kLastBlock, 0, lane.stream()>>>(partials, grid.blocks, p.n, p.result);
  CUDA_CHECK_LAUNCH(ReducePartials);
}

// Steps in Fold::Wide that follow a thread's chains.
std::int64_t WideSteps(const Grid& grid) {
  std::int64_t steps = CeilDiv(grid.per_thread, kMaxChain) + ShuffleDepth(grid.block_size);
  if (grid.blocks > 1) steps += CeilDiv(grid.blocks, kLastBlock) + ShuffleDepth(kLastBlock);
  return steps;
}

double Roundoff(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  return ReduceRoundoff(p.op, p.dtype, p.n, std::min<std::int64_t>(grid.per_thread, kMaxChain),
                        WideSteps(grid));
}

Cost CostOf(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  const std::uint64_t wide = IsArg(p.op) ? sizeof(Indexed<double>) : sizeof(double);
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = n * SizeOf(p.dtype) + (grid.blocks > 1 ? 2 * wide * grid.blocks : 0),
          .flops = n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(grid.per_thread + WideSteps(grid))};
}

void Enqueue(const ReduceProblem& p, Lane& lane) {
  DispatchReal(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    DispatchOp(p.op, [&](auto op) { Run<Fold<op(), T>, T>(p, Cuda(lane)); });
  });
}

}  // namespace

extern const Strategy<ReduceProblem> kReduceWarpShuffle;
constexpr Strategy<ReduceProblem> kReduceWarpShuffle = {
    .name = "warp_shuffle",
    .summary =
        "several elements a thread, warps fold by shuffles, a second kernel folds the blocks",
    .source = "reduction with warp shuffles of the HIP training examples",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .min_compute_capability = kBaseComputeCapability,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize,
               .grid_size = {1, 1u << 20},
               .items_per_thread = {1, 256}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = nullptr,
};

}  // namespace tessera
