// Dot with a fixed grid and a tree in each block.
//
// Compared with `thread_partials`, the sums of a block's threads are combined in shared memory, a
// few cycles away, by a tree. Each level of the tree halves the number of sums, with a barrier
// between levels: log2(block) steps instead of the block - 1 steps of `block_serial`'s chain. Half
// of the threads are busy in the first level, and a quarter in the second. The host gets one value
// per block.
//
//   live 8     0<------4  1<------5  2<------6  3<------7
//   live 4     0<--2  1<--3
//   live 2     0<1
//
// At n = 2^20 there are 1024 blocks with 9 barriers each, and 8 KiB go to the host. What remains is
// the cost of this round trip, 10 us.
#include "kernels/cuda/dot/frame.cuh"

namespace tessera {
namespace {

// partials[block] = the block's part of a . b. Dynamic shared memory: one Wide per thread.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    DotBlockPartials(const T* a, const T* b, std::int64_t n, DotWide<T>* partials) {
  using F = DotFold<T>;
  auto* sums = DynamicShared<DotWide<T>>();
  sums[threadIdx.x] = FoldThreadInTurn<F>(GridThread(), n, GridThreads(),
                                          [=](std::int64_t i) { return F::Multiply(a[i], b[i]); });
  __syncthreads();  // the sum of every thread is in its cell
  for (unsigned live = blockDim.x; live > 1;) {
    const unsigned half = (live + 1) / 2;  // an odd cell waits for the next level
    if (threadIdx.x < live - half)
      sums[threadIdx.x] = F::Combine(sums[threadIdx.x], sums[threadIdx.x + half]);
    __syncthreads();  // the upper half has been read, the lower half is written
    live = half;
  }
  if (threadIdx.x == 0) partials[blockIdx.x] = sums[0];
}

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeFixedGrid(p.n, p.launch, 256, kFixedGrid);
  return WithChains(grid.per_thread, {.grid = grid,
                                      .narrow_steps = 1,
                                      .wide_steps = CeilLog2(grid.block_size) + grid.blocks,
                                      .extra_bytes = grid.blocks * sizeof(double)});
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoPartials(p, grid.blocks, stream, [&](auto* a, auto* b, auto* partials, cudaStream_t on) {
    DotBlockPartials<<<grid.blocks, grid.block_size, grid.block_size * sizeof(double), on>>>(
        a, b, p.n, partials);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotBlockPartials = {
    .name = "block_partials",
    .summary = "a fixed grid strides, a tree in shared memory per block, the host adds the blocks",
    .source = "dot product with shared memory from the CUDA shared-memory tutorial",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kAnyGridSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
