// Dot with registers instead of shared memory: warps sum with shuffles.
//
// Compared with `coarsened`, the lanes of a warp read each other's registers. The five shuffles of
// a warp need neither a barrier nor memory, because they synchronize the warp. Instead of one
// barrier per level, the block has a single barrier, before the sums of its warps are added. In
// addition, the grid strides, so a request may fix the number of blocks instead of the items per
// thread (16 by default).
//
//   offset 16   lane l adds lane l + 16's value to its own
//   offset 8    lane l adds lane l + 8's ...
//   offset 1    lane 0 has the sum of the warp
//
// At n = 2^20 there are 256 blocks with one barrier and an atomic addition each. The mask of an
// incomplete warp contains only the lanes that exist.
#include "kernels/cuda/dot/frame.cuh"

namespace tessera {
namespace {

// Returns the sum of the values of lanes 0 to lanes - 1, in lane 0. REQUIRES: all of these lanes
// call it, and no other lane of the warp does.
template <class F>
__device__ typename F::Wide SumOfWarp(typename F::Wide value, int lanes) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  const unsigned mask = lanes == kWarpSize ? kFullMask : (1u << lanes) - 1;
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const auto other = ShuffleDown(mask, value, offset);
    if (lane + offset < lanes) value = F::Combine(value, other);  // else: undefined
  }
  return value;
}

// *total += a . b
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    DotWarpShuffle(const T* a, const T* b, std::int64_t n, DotWide<T>* total) {
  using F = DotFold<T>;
  DotWide<T> sum = FoldThread<F>(GridThread(), n, GridThreads(),
                                 [=](std::int64_t i) { return F::Multiply(a[i], b[i]); });
  __shared__ DotWide<T> sums[kWarpSize];  // one per warp of the block
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int threads = static_cast<int>(blockDim.x);
  sum = SumOfWarp<F>(sum, min(kWarpSize, threads - warp * kWarpSize));
  if (lane == 0) sums[warp] = sum;
  __syncthreads();  // the sum of every warp is in its cell
  const int warps = (threads + kWarpSize - 1) / kWarpSize;
  // The first warp has at least as many lanes as the block has warps.
  if (threadIdx.x < static_cast<unsigned>(warps)) sum = SumOfWarp<F>(sums[lane], warps);
  if (threadIdx.x == 0) AtomicAdd(total, sum);
}

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 16);
  return WithChains(grid.per_thread, {.grid = grid,
                                      .narrow_steps = 1,
                                      .wide_steps = ShuffleDepth(grid.block_size) + grid.blocks,
                                      .atomics = grid.blocks});
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoOneSum(p, stream, [&](auto* a, auto* b, auto* total, cudaStream_t on) {
    DotWarpShuffle<<<grid.blocks, grid.block_size, 0, on>>>(a, b, p.n, total);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotWarpShuffle = {
    .name = "warp_shuffle",
    .summary =
        "several products per thread, warps sum with shuffles, one atomic addition per block",
    .source =
        "grid-stride loop from the CUDA shared-memory tutorial, shuffles from the HIP reductions",
    .backend = Backend::kCuda,
    .limits = {.block_size = kAnyBlockSize,
               .grid_size = kAnyGridSize,
               .items_per_thread = kAnyItems},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
