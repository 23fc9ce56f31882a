// Reduce with registers instead of shared memory: warps fold with shuffles.
//
// Compared with `two_kernels_unrolled`, the lanes of a warp read each other's registers. The five
// shuffles of a warp need neither a barrier nor memory, because they synchronize the warp. The
// block has a single barrier, before the values of its warps are folded. A thread folds
// items_per_thread elements (16 by default) and loads eight of them before it uses the first. If
// the grid is a single block, that block writes the result itself. The second kernel takes the
// partial values in index order, so the same input and launch give the same bits.
//
//   offset 16   lane l folds lane l + 16's value into its own
//   offset 8    lane l folds lane l + 8's ...
//   offset 1    lane 0 has the value of the warp
//
// At n = 2^20 there are 256 blocks in the first launch and one in the second, with one barrier
// each. Starting the second kernel takes about as long as the memory accesses. The mask of an
// incomplete warp contains only the lanes that exist.
#include "kernels/cuda/reduce/frame.cuh"

namespace tessera {
namespace {

// Returns the fold of the values of lanes 0 to lanes - 1, in lane 0. REQUIRES: all of these lanes
// call it, and no other lane of the warp does.
template <class F, class A>
__device__ A FoldLanes(A value, int lanes) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  const unsigned mask = lanes == kWarpSize ? kFullMask : (1u << lanes) - 1;
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const A other = ShuffleDown(mask, value, offset);
    if (lane + offset < lanes) value = F::Combine(value, other);  // else: undefined
  }
  return value;
}

// Folds the elements of each block into partials[block]. If there is only one block, its value
// becomes the result instead.
template <class F, class T>
__global__ void __launch_bounds__(kMostThreads)
    ReduceWarpShuffle(const T* x, std::int64_t n, typename F::Wide* partials, Scalar* result) {
  using Wide = typename F::Wide;
  Wide value = FoldThread<F>(GridThread(), n, GridThreads(),
                             [=](std::int64_t i) { return F::Load(x[i], i); });
  __shared__ Wide values[kWarpSize];  // one per warp of the block
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int threads = static_cast<int>(blockDim.x);
  value = FoldLanes<F>(value, min(kWarpSize, threads - warp * kWarpSize));
  if (lane == 0) values[warp] = value;
  __syncthreads();  // the value of every warp is in its cell
  const int warps = (threads + kWarpSize - 1) / kWarpSize;
  // The first warp has at least as many lanes as the block has warps.
  if (threadIdx.x < static_cast<unsigned>(warps)) value = FoldLanes<F>(values[lane], warps);
  StoreBlock<F>(value, n, partials, result);
}

// Computes the result of a reduction of `all` elements from the values of its blocks. The grid is
// one block, whose warps combine their values as above (FoldBlockShuffle).
template <class F>
__global__ void __launch_bounds__(kMostThreads)
    ReducePartials(const typename F::Wide* partials, std::int64_t blocks, std::int64_t all,
                   Scalar* result) {
  const auto value = FoldBlockShuffle<F>(
      FoldThread<F>(threadIdx.x, blocks, blockDim.x, [=](std::int64_t i) { return partials[i]; }));
  if (threadIdx.x == 0) F::Finish(value, all, result);
}

LessonShape ShapeOf(const ReduceProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 16);
  const bool twice = grid.blocks > 1;
  const std::int64_t second =
      WideChainSteps(CeilDiv(grid.blocks, kMostThreads)) + ShuffleDepth(kMostThreads);
  return WithChains(grid.per_thread,
                    {.grid = grid,
                     .wide_steps = ShuffleDepth(grid.block_size) + (twice ? second : 0),
                     .extra_bytes = twice ? 2 * grid.blocks * WideBytes(p.op, p.dtype) : 0});
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoSecondKernel(
      p, grid.blocks, stream,
      [&]<class F>(auto* x, auto* partials, cudaStream_t on) {
        ReduceWarpShuffle<F><<<grid.blocks, grid.block_size, 0, on>>>(x, p.n, partials, p.result);
      },
      [&]<class F>(auto* partials, cudaStream_t on) {
        if (grid.blocks == 1) return;  // it has written the result
        ReducePartials<F><<<1, kMostThreads, 0, on>>>(partials, grid.blocks, p.n, p.result);
      });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceWarpShuffle = {
    .name = "warp_shuffle",
    .summary =
        "several elements per thread, warps fold with shuffles, a second kernel folds the blocks",
    .source = "reduction with warp shuffles from the HIP training examples",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize,
               .grid_size = kAnyGridSize,
               .items_per_thread = kAnyItems},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
