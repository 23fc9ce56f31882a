// Dot with several products per thread before the tree.
//
// Compared with `hierarchical`, a thread sums items_per_thread products (8 by default) in a
// register before the block's tree combines the threads' sums. The cost of the tree, its barriers
// and the atomic addition is paid once for all of these products, and proportionally fewer blocks
// start. The loads of eight products are in flight together, which keeps the memory busy. A block's
// part is contiguous. With T threads per block, each thread takes every T-th element of this part,
// so adjacent threads read adjacent elements:
//
//   block 0                      block 1                      blocks of 4, 2 items per thread
//   0  1  2  3 | 4  5  6  7      8  9 10 11 | 12 13 14 15     element
//   0  1  2  3 | 0  1  2  3      0  1  2  3 |  0  1  2  3     thread
//
// At n = 2^20 there are 512 blocks with 9 barriers and an atomic addition each. For about 2^24
// elements or more, memory bandwidth is the limit.
#include "kernels/cuda/dot/frame.cuh"

namespace tessera {
namespace {

// *total += a . b, with items * blockDim.x elements per block. Dynamic shared memory: 8 bytes per
// thread.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    DotCoarsened(const T* a, const T* b, std::int64_t n, std::int64_t items, DotWide<T>* total) {
  using F = DotFold<T>;
  const std::int64_t begin = blockIdx.x * items * blockDim.x;
  const std::int64_t end = min(n, begin + items * blockDim.x);
  const std::int64_t step = blockDim.x;
  DotWide<T> mine = 0;
  for (std::int64_t i = begin + threadIdx.x; i < end;) {
    DotAcc<T> chain = 0;
    for (int folded = 0; folded < kMaxChain && i < end; folded += kBatch) {
      if (i + (kBatch - 1) * step < end) {
        // All loads come before the first use, so that they are in flight together.
        DotAcc<T> batch[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) batch[j] = F::Multiply(a[i + j * step], b[i + j * step]);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) chain = F::Combine(chain, batch[j]);
        i += kBatch * step;
      } else {
        for (; i < end; i += step) chain = F::Combine(chain, F::Multiply(a[i], b[i]));
      }
    }
    mine = F::Combine(mine, F::Widen(chain));
  }
  const DotWide<T> sum = FoldBlockTree<F>(mine, DynamicShared<DotWide<T>>());
  if (threadIdx.x == 0) AtomicAdd(total, sum);
}

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 8);
  return WithChains(Items(p.launch), {.grid = grid,
                                      .narrow_steps = 1,
                                      .wide_steps = CeilLog2(grid.block_size) + grid.blocks,
                                      .atomics = grid.blocks});
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoOneSum(p, stream, [&](auto* a, auto* b, auto* total, cudaStream_t on) {
    DotCoarsened<<<grid.blocks, grid.block_size, grid.block_size * sizeof(double), on>>>(
        a, b, p.n, Items(p.launch), total);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotCoarsened = {
    .name = "coarsened",
    .summary =
        "several products per thread in a register, a tree and one atomic addition per block",
    .source = "thread coarsening, from the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .limits = {.block_size = kAnyBlockSize, .items_per_thread = kAnyItems},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
