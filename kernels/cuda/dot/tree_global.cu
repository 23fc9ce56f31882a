// Dot as a tree in device memory, with one launch per level until a single value is left.
//
// Compared with `block_partials`, the host does none of the work. A block multiplies two pairs of
// elements per thread, stores the products in device memory and sums its part in place, with a
// barrier between the steps. Thread t works on cell 2t and adds another cell to it, first the one
// at distance 1, then 2, 4, ... (DoublingStrides in primitives.cuh).
//
// A barrier only stops the threads of one block. Each block therefore writes its value to an array.
// The next launch, which starts when the previous one has ended, sums that array in the same way.
// The launch with only one block writes the result. At n = 2^20, launches of 2048, 4 and 1 blocks
// move 24 MiB. Much of this data stays in the caches, but every step waits hundreds of cycles for
// its data.
//
// Kernel: FoldInMemory. Lesson: kernels/lessons/sum_2_tree.cu
#include "kernels/cuda/common/ladder.cuh"

namespace tessera {

extern constexpr Strategy<DotProblem> kDotTreeGlobal =
    Lesson<InMemoryShape<DotProblem>, FoldInMemoryLevels<DoublingStrides, DotProblem>, DotProblem>({
        .name = "tree_global",
        .summary = "a tree over the products in device memory, in place, one launch per level",
        .source = "tree reduction in device memory from the notes on dot products in Metal",
        .deterministic = true,
        .limits = {.block_size = kAnyBlockSize},
    });

}  // namespace tessera
