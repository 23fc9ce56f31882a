// Reduce with several elements per thread before the tree: `coarsened` of Dot with any operation.
//
// Compared with `privatized`, a thread folds items_per_thread elements (8 by default) instead of
// two, with their loads in flight together. The values of the blocks are not folded atomically,
// because few operations can be, but by another launch of the same kernel. At n = 2^20 there are
// launches of 512 and 1 blocks. From about 2^25 elements on, memory bandwidth is the limit.
//
// Kernel: FoldParts. Lesson: kernels/lessons/sum_4_coarsened.cu
#include "kernels/cuda/common/ladder.cuh"

namespace tessera {
namespace {

LessonShape ShapeOf(const ReduceProblem& p) {
  const std::uint32_t block = BlockSize(p.launch);
  const std::int64_t items = Items(p.launch);
  const LaterLevels later = MakeLaterLevels(p.n, items * block);
  const std::int64_t tree = CeilLog2(block);
  return WithChains(items,
                    {.grid = {.block_size = block},
                     .wide_steps = tree + later.count * (WideChainSteps(items) + tree),
                     .extra_bytes = 2 * static_cast<std::uint64_t>(later.values) * WideBytes(p)});
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const std::uint32_t block = BlockSize(p.launch);
  const std::int64_t items = Items(p.launch);
  IntoLevels(p, items * block, stream,
             [&]<class F>(auto terms, std::int64_t n, unsigned blocks, auto end, cudaStream_t on) {
               const std::size_t shared = block * sizeof(typename F::Wide);
               FoldParts<F><<<blocks, block, shared, on>>>(terms, n, items, end);
             });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceCoarsened =
    Lesson<ShapeOf, Enqueue, ReduceProblem>({
        .name = "coarsened",
        .summary =
            "several elements per thread in a register, a tree per block, one launch per level",
        .source = "thread coarsening, from the notes on CUDA reductions",
        .deterministic = true,
        .limits = {.block_size = kAnyBlockSize, .items_per_thread = kAnyItems},
    });

}  // namespace tessera
