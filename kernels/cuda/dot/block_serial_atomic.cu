// Dot without the host: like `block_serial`, but the sums of the blocks are added on the GPU.
//
// Blocks cannot wait for each other. If two of them read a cell, add to it and write it back, one
// addition may be lost. An atomic addition reads, adds and writes in one step, which the memory
// system does in the L2 cache. Every block therefore adds its sum to one cell atomically, in the
// order in which the blocks end, and only the result leaves the GPU.
//
// At n = 2^20 there are 4096 atomic additions to one address. They are serialized, but other blocks
// run their chains in the meantime. There is no wait for the host, because the request ends with
// the kernel. The drawback is that the order of the additions varies, so the last bits of a
// floating-point result differ from run to run.
#include "kernels/cuda/dot/frame.cuh"

namespace tessera {
namespace {

// *total += a . b. Dynamic shared memory: one Acc per thread.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    DotBlockSerialAtomic(const T* a, const T* b, std::int64_t n, DotWide<T>* total) {
  using F = DotFold<T>;
  auto* products = DynamicShared<DotAcc<T>>();
  const std::int64_t i = GridThread();
  products[threadIdx.x] = i < n ? F::Multiply(a[i], b[i]) : DotAcc<T>(0);
  __syncthreads();  // every product of the block is in its cell
  if (threadIdx.x != 0) return;
  DotWide<T> sum = 0;
  for (unsigned j = 0; j < blockDim.x; ++j) sum = F::Combine(sum, F::Widen(products[j]));
  AtomicAdd(total, sum);
}

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 1);
  return {.grid = grid,
          .narrow_steps = 1,
          .wide_steps = std::int64_t{grid.block_size} + grid.blocks,
          .atomics = grid.blocks};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoOneSum(p, stream, [&](auto* a, auto* b, auto* total, cudaStream_t on) {
    DotBlockSerialAtomic<<<grid.blocks, grid.block_size, grid.block_size * AccBytes(p.dtype), on>>>(
        a, b, p.n, total);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotBlockSerialAtomic = {
    .name = "block_serial_atomic",
    .summary = "thread 0 of each block adds the block's products, one atomic addition per block",
    .source = "reduction on the GPU from the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
