// Dot with a fixed grid and a tree in each block.
//
// Compared with `thread_partials`, the sums of a block's threads are combined in shared memory, a
// few cycles away, by a tree. Each level of the tree halves the number of sums, with a barrier
// between levels: log2(block) steps instead of the block - 1 steps of `block_serial`'s chain. Half
// of the threads are busy in the first level, and a quarter in the second. The host gets one value
// per block.
//
// At n = 2^20 there are 1024 blocks with 9 barriers each, and 8 KiB go to the host. What remains is
// the cost of this round trip, 10 us.
//
// Kernel: FoldWithStride, launched by StridesIntoHost. Lesson: kernels/lessons/sum_4_coarsened.cu
#include "kernels/cuda/common/ladder.cuh"

namespace tessera {

extern constexpr Strategy<DotProblem> kDotBlockPartials =
    Lesson<StridesIntoHostShape<DotProblem>, StridesIntoHost<DotProblem>, DotProblem>({
        .name = "block_partials",
        .summary = "grid-stride loops, a tree in shared memory per block, the host adds the sums",
        .source = "dot product with shared memory from the CUDA shared-memory tutorial",
        .deterministic = true,
        .limits = {.block_size = kAnyBlockSize, .grid_size = kAnyGridSize},
    });

}  // namespace tessera
