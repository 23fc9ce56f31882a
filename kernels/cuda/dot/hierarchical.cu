// Dot with a hierarchy: trees within blocks, and atomic additions between blocks. This is the
// plainest form of the pattern that the fast strategies refine.
//
// Compared with `tree_sequential`, a block does less work: a thread multiplies one pair of elements
// and keeps one cell instead of two. More blocks share the work, and the first level of the tree
// occupies half of the threads.
//
// At n = 2^20 there are 4096 blocks with 9 barriers and an atomic addition each. That is twice the
// blocks and atomics of `tree_sequential`, with half the shared memory. A thread does one
// multiplication for these 9 barriers and has one pair of loads in flight. The limit is the time to
// start blocks and to wait in them, not memory.
#include "kernels/cuda/dot/frame.cuh"

namespace tessera {
namespace {

// *total += a . b. Dynamic shared memory: one Acc per thread.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    DotHierarchical(const T* a, const T* b, std::int64_t n, DotWide<T>* total) {
  using F = DotFold<T>;
  const std::int64_t i = GridThread();
  const DotAcc<T> product = i < n ? F::Multiply(a[i], b[i]) : DotAcc<T>(0);
  const DotAcc<T> sum = FoldBlockTree<F>(product, DynamicShared<DotAcc<T>>());
  if (threadIdx.x == 0) AtomicAdd(total, F::Widen(sum));
}

LessonShape ShapeOf(const DotProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 1);
  return {.grid = grid,
          .narrow_steps = 1 + CeilLog2(grid.block_size),
          .wide_steps = grid.blocks,
          .atomics = grid.blocks};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoOneSum(p, stream, [&](auto* a, auto* b, auto* total, cudaStream_t on) {
    DotHierarchical<<<grid.blocks, grid.block_size, grid.block_size * AccBytes(p.dtype), on>>>(
        a, b, p.n, total);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotHierarchical = {
    .name = "hierarchical",
    .summary = "one product per thread, a tree in shared memory and one atomic addition per block",
    .source = "hierarchical tree reduction from the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
