// Reduce with several elements per thread before the tree.
//
// Compared with `privatized`, a thread folds items_per_thread elements (8 by default) instead of
// two in a register before the block's tree combines the threads' values. The cost of the tree and
// its barriers is paid once for all of these elements, and proportionally fewer blocks start and
// fewer values are passed on. The loads of eight elements are in flight together, which keeps the
// memory busy.
//
//   block 0                      block 1                      blocks of 4, 2 items per thread
//   0  1  2  3 | 4  5  6  7      8  9 10 11 | 12 13 14 15     element
//   0  1  2  3 | 0  1  2  3      0  1  2  3 |  0  1  2  3     thread
//
// At n = 2^20 there are launches of 512 and 1 blocks. For about 2^25 elements or more, memory
// bandwidth is the limit.
#include "kernels/cuda/reduce/frame.cuh"

namespace tessera {
namespace {

// Folds the items * blockDim.x values of each block. The value goes to partials[block]. In the last
// level, which has one block, it becomes the result of a reduction of `all` elements instead.
// Dynamic shared memory: one Wide per thread.
template <class F, bool kFirst, class In>
__global__ void __launch_bounds__(kMostThreads)
    ReduceCoarsened(const In* x, std::int64_t n, std::int64_t items, std::int64_t all,
                    typename F::Wide* partials, Scalar* result) {
  using Wide = typename F::Wide;
  using A = decltype(LoadValue<F, kFirst>(x, 0));
  const std::int64_t begin = blockIdx.x * items * blockDim.x;
  const std::int64_t end = min(n, begin + items * blockDim.x);
  const std::int64_t step = blockDim.x;
  Wide mine = F::template Identity<Wide>();
  for (std::int64_t i = begin + threadIdx.x; i < end;) {
    A chain = F::template Identity<A>();
    for (int folded = 0; folded < kMaxChain && i < end; folded += kBatch) {
      A batch[kBatch];
      if (i + (kBatch - 1) * step < end) {
        // All loads come before the first use, so that they are in flight together.
#pragma unroll
        for (int j = 0; j < kBatch; ++j) batch[j] = LoadValue<F, kFirst>(x, i + j * step);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) chain = F::Combine(chain, batch[j]);
        i += kBatch * step;
      } else {
        for (; i < end; i += step) chain = F::Combine(chain, LoadValue<F, kFirst>(x, i));
      }
    }
    mine = F::Combine(mine, Widened<F>(chain));
  }
  StoreBlock<F>(FoldBlockTree<F>(mine, DynamicShared<Wide>()), all, partials, result);
}

LessonShape ShapeOf(const ReduceProblem& p) {
  const std::uint32_t block = BlockSize(p.launch);
  const std::int64_t items = Items(p.launch);
  const LaterLevels later = MakeLaterLevels(p.n, items * block);
  const std::int64_t tree = CeilLog2(block);
  return WithChains(items, {.grid = {.block_size = block},
                            .wide_steps = tree + later.count * (WideChainSteps(items) + tree),
                            .extra_bytes = 2 * static_cast<std::uint64_t>(later.values) *
                                           WideBytes(p.op, p.dtype)});
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const std::uint32_t block = BlockSize(p.launch);
  const std::int64_t items = Items(p.launch);
  IntoLevels(p, items * block, stream,
             [&]<class F, bool kFirst>(auto* x, std::int64_t n, unsigned blocks, auto* partials,
                                       cudaStream_t on) {
               ReduceCoarsened<F, kFirst><<<blocks, block, block * sizeof(typename F::Wide), on>>>(
                   x, n, items, p.n, partials, p.result);
             });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceCoarsened = {
    .name = "coarsened",
    .summary = "several elements per thread in a register, a tree per block, one launch per level",
    .source = "thread coarsening, from the notes on CUDA reductions",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .items_per_thread = kAnyItems},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
