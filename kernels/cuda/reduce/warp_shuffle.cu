// Reduce with registers instead of shared memory: threads stride through the input, warps fold by
// shuffles, and a second kernel folds what the blocks have left.
//
// Against `two_kernels_unrolled`: a warp folds its values by reading each other's registers, five
// shuffles that need no barrier and no memory, since it runs in step; the warps of a block meet
// once. A thread folds items_per_thread elements (16 by default) before it meets others, eight of
// them loaded before the first is used. And when the grid is a single block, it writes the result
// itself. The second kernel is one block that takes the partial values in index order: the same
// input and launch give the same bits.
//
//   offset 16   lane l folds lane l + 16's value into its own
//   offset 8    lane l folds lane l + 8's ...
//   offset 1    lane 0 has the value of the warp
//
// Cost at n = 2^20, f32, blocks of 256: 4 MiB read; 256 blocks and one more, with one barrier each;
// 2 KiB written and read again in between. Memory takes 1 us at 4.3 TB/s, and starting the second
// kernel about as long.
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
  StoreBlock<F>(value, n, partials, result);
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

template <ReduceOp op, class T>
void Run(const ReduceProblem& p, CudaStream& stream) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  const Grid grid = GridOf(p);
  auto* partials = static_cast<Wide*>(stream.Scratch(grid.blocks * sizeof(Wide)));
  ReduceWarpShuffle<F><<<grid.blocks, grid.block_size, 0, stream.handle()>>>(
      static_cast<const T*>(p.x), p.n, partials, p.result);
  CUDA_CHECK_LAUNCH(ReduceWarpShuffle);
  if (grid.blocks == 1) return;
  ReducePartials<PartialFold<op, T>>
      <<<1, kLastBlock, 0, stream.handle()>>>(partials, grid.blocks, p.n, p.result);
  CUDA_CHECK_LAUNCH(ReducePartials);
}

// Steps in Fold::Wide that follow a thread's chains.
std::int64_t WideSteps(const Grid& grid) {
  std::int64_t steps = CeilDiv(grid.per_thread, kMaxChain) + ShuffleDepth(grid.block_size);
  if (grid.blocks > 1) {
    const std::int64_t left = CeilDiv(grid.blocks, kLastBlock);
    steps += left + CeilDiv(left, kMaxChain) + ShuffleDepth(kLastBlock);
  }
  return steps;
}

double Roundoff(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  return ReduceRoundoff(p.op, p.dtype, p.n, std::min<std::int64_t>(grid.per_thread, kMaxChain),
                        WideSteps(grid));
}

Cost CostOf(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = n * SizeOf(p.dtype) +
                   (grid.blocks > 1 ? 2 * grid.blocks * WideBytes(p.op, p.dtype) : 0),
          .flops = n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(grid.per_thread + WideSteps(grid))};
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) {
    DispatchOp(p.op, [&](auto op) { Run<op(), decltype(zero)>(p, Cuda(stream)); });
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceWarpShuffle = {
    .name = "warp_shuffle",
    .summary =
        "several elements a thread, warps fold by shuffles, a second kernel folds the blocks",
    .source = "reduction with warp shuffles of the HIP training examples",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize,
               .grid_size = kAnyGridSize,
               .items_per_thread = kAnyItems},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
