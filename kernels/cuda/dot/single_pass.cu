// Dot in one launch, at the speed of memory.
//
// Compared with `warp_shuffle`, a thread loads 16 bytes at a time, and two such vectors of each
// operand before it uses the first. A quarter of the instructions therefore keep the same number of
// bytes in flight. The products at one position of a thread's vectors form a column, and each
// column has its own accumulator. No cell in device memory has to be zeroed before the launch or
// copied after it. The last block to start receives the sums of the other blocks through the
// stream's mailbox, adds them in index order and writes the result.
//
//   warp 0, row 0   | lane 0: 16 bytes | lane 1: 16 bytes | ... | lane 31 |   one 512-byte request
//           row 1   ...       4096 bytes further: the block's 256 threads take a row
//
// A chunk is the part that one block folds. Its length depends on the device's number of SMs: every
// SM has four blocks at a time, or fewer for a short array. The same device therefore gives the
// same bits again, but another device may give different bits. `fixed_tree` avoids that.
//
// Cost at n = 2^20, f32: 256 blocks read 8 MiB and send 16 bytes each, in one launch. Reading takes
// 2 us at 4.3 TB/s, and starting the kernel takes twice as long.
//
// The kernel is correct for any n: a lane takes whole vectors and at most one incomplete vector,
// and n = 0 is one chunk of zeros. It is correct for any block size, because the threads divide 256
// lanes among them. It is correct for any alignment: operands with the same address modulo 16 are
// read like aligned ones, and otherwise each vector costs a shift and a second load, which hits the
// L1 cache. It is accurate for 2^28 floats: at most 64 products are added in single precision, and
// the rest in double.
//
// Kernel: kernels/cuda/tree/kernel.cuh.
// Lessons: kernels/lessons/sum_6_vectors.cu, kernels/lessons/sum_7_one_launch.cu
#include "kernels/cuda/tree/strategies.cuh"

namespace tessera {

extern constexpr Strategy<DotProblem> kDotSinglePass =
    SinglePassStrategy<DotProblem>({.name = "single_pass"});

}  // namespace tessera
