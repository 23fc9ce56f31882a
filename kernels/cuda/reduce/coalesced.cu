// Reduce as a tree in device memory, with one launch per level, in two numberings.
//
// `interleaved` is `tree_global` of Dot with any operation. A block takes two elements per thread
// and folds them in place. With each step, fewer lanes of a warp are active, and their cells are
// further apart. At stride 16 each cell is a separate transaction. At n = 2^20, launches of 2048, 4
// and 1 blocks move 20 MiB.
//
// `coalesced` changes only the numbering, as `tree_sequential` of Dot does, but still in device
// memory. The 32 cells that a warp reads at a time are adjacent: one 128-byte transaction (f32)
// instead of up to 32 transactions.
//
// Kernel: FoldInMemory.
// Lessons: kernels/lessons/sum_2_tree.cu, kernels/lessons/sum_3_sequential.cu
#include "kernels/cuda/common/ladder.cuh"

namespace tessera {

extern constexpr Strategy<ReduceProblem> kReduceInterleaved =
    Lesson<InMemoryShape<ReduceProblem>, FoldInMemoryLevels<DoublingStrides, ReduceProblem>,
           ReduceProblem>({
        .name = "interleaved",
        .summary = "a tree of doubling strides in device memory, one launch per level",
        .source = "naive tree from the notes on CUDA reductions",
        .deterministic = true,
        .limits = {.block_size = kAnyBlockSize},
    });

extern constexpr Strategy<ReduceProblem> kReduceCoalesced =
    Lesson<InMemoryShape<ReduceProblem>, FoldInMemoryLevels<HalvingStrides, ReduceProblem>,
           ReduceProblem>({
        .name = "coalesced",
        .summary = "a tree of halving strides in device memory, one launch per level",
        .source = "coalesced tree, to avoid memory divergence, from the notes on CUDA reductions",
        .deterministic = true,
        .limits = {.block_size = kAnyBlockSize},
    });

}  // namespace tessera
