// Dot with a tree in which the active threads are adjacent.
//
// Compared with `tree_interleaved`, only the numbering changes: strides halve instead of doubling,
// and at stride s, thread t adds cell t + s to cell t, as long as t is below s.
//
//   live 8     0<------4  1<------5  2<------6  3<------7    threads 0 1 2 3
//   live 4     0<--2  1<--3                                  threads 0 1
//   live 2     0<1                                           thread  0
//
// In all active warps but one, all 32 threads have work, and inactive warps skip the addition as a
// whole. The test takes a comparison and no division. A warp's cells are 32 adjacent cells in 32
// different banks. There are as many barriers and atomic additions as in `tree_interleaved`, but a
// third of the instructions.
#include "kernels/cuda/dot/frame.cuh"

namespace tessera {
namespace {

// *total += a . b. Dynamic shared memory: two Acc per thread.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    DotTreeSequential(const T* a, const T* b, std::int64_t n, DotWide<T>* total) {
  using F = DotFold<T>;
  auto* products = DynamicShared<DotAcc<T>>();
  const std::int64_t begin = std::int64_t{2} * blockIdx.x * blockDim.x;
  for (unsigned i = threadIdx.x; i < 2 * blockDim.x; i += blockDim.x)
    products[i] = begin + i < n ? F::Multiply(a[begin + i], b[begin + i]) : DotAcc<T>(0);
  __syncthreads();  // every product of the block is in its cell
  for (unsigned live = 2 * blockDim.x; live > 1;) {
    const unsigned half = (live + 1) / 2;  // an odd cell waits for the next level
    if (threadIdx.x < live - half)
      products[threadIdx.x] = F::Combine(products[threadIdx.x], products[threadIdx.x + half]);
    __syncthreads();  // the upper half has been read, the lower half is written
    live = half;
  }
  if (threadIdx.x == 0) AtomicAdd(total, F::Widen(products[0]));
}

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 2);
  return {.grid = grid,
          .narrow_steps = 1 + CeilLog2(std::int64_t{2} * grid.block_size),
          .wide_steps = grid.blocks,
          .atomics = grid.blocks};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoOneSum(p, stream, [&](auto* a, auto* b, auto* total, cudaStream_t on) {
    DotTreeSequential<<<grid.blocks, grid.block_size, 2 * grid.block_size * AccBytes(p.dtype),
                        on>>>(a, b, p.n, total);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotTreeSequential = {
    .name = "tree_sequential",
    .summary = "a tree of halving strides in shared memory, one atomic addition per block",
    .source = "tree reduction without control divergence from the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
