// Dot by a hierarchy: trees in blocks, and atomic additions between them. The plainest form of the
// pattern that the fast rows refine.
//
// The trees before were made for a single block, which has to hold as much as it can: two cells a
// thread. Once many blocks share the work that is no longer needed: a thread multiplies one pair of
// elements, keeps one cell, and the first halving has something to do for half of the threads.
//
// Cost at n = 2^20, f32, blocks of 256: 8 MiB read, 4096 blocks with 9 barriers each, 4096 atomic
// additions to one address. Against `tree_sequential` twice the blocks and atomics, half the shared
// memory. A thread does one multiplication for eight barriers, and its loads are the only ones that
// it has in flight: what bounds this row is starting blocks and waiting in them, not memory, which
// would take 2 us at 4.3 TB/s.
//
// Right for any n: threads beyond the end contribute 0, n = 0 is one block of zeros. For any block
// size: the tree rounds halves up. For any alignment: loads are scalar. For 2^28 floats: at most 1
// + 10 roundings in single precision lie on the way of a product; between blocks sums are double,
// in an order that differs from run to run.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/dot.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

Grid GridOf(const DotProblem& p) { return MakeGrid(p.n, p.launch, kBlock, 1); }

// *total += a . b. Dynamic shared memory: one Acc a thread.
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotHierarchical(const T* a, const T* b, std::int64_t n, DotWide<T>* total) {
  using F = DotFold<T>;
  const std::int64_t i = GridThread();
  const DotAcc<T> product = i < n ? F::Multiply(a[i], b[i]) : DotAcc<T>(0);
  const DotAcc<T> sum = FoldBlockTree<F>(product, DynamicShared<DotAcc<T>>());
  if (threadIdx.x == 0) AtomicAdd(total, F::Widen(sum));
}

template <class T>
void Run(const DotProblem& p, CudaStream& stream) {
  const Grid grid = GridOf(p);
  auto* total = MakeSum<DotWide<T>>(stream);
  DotHierarchical<T>
      <<<grid.blocks, grid.block_size, grid.block_size * sizeof(DotAcc<T>), stream.handle()>>>(
          static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, total);
  CUDA_CHECK_LAUNCH(DotHierarchical);
  FetchSum(total, p.result, stream);
}

double Roundoff(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return DotRoundoff(p.dtype, 1 + CeilLog2(grid.block_size), grid.blocks);
}

Cost CostOf(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return {.bytes = OperandBytes(p),
          .flops = 2 * static_cast<std::uint64_t>(p.n),
          .atomics = grid.blocks,
          .depth = 1u + static_cast<unsigned>(CeilLog2(grid.block_size)) + grid.blocks};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotHierarchical = {
    .name = "hierarchical",
    .summary = "one product a thread, a tree in shared memory a block, one atomic addition a block",
    .source = "hierarchical tree reduction of the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
