// Dot in one launch, at the speed of memory.
//
// Compared with `warp_shuffle`, a thread loads 16 bytes at a time, and two such vectors of each
// operand before it uses the first. The products at one position of a thread's vectors form a
// column, and each column has its own accumulator. No cell in device memory has to be zeroed before
// the launch or copied after it. The last block to start receives the sums of the other blocks
// through the stream's mailbox, adds them in index order and writes the result, so the same call
// gives the same bits. kernels/cuda/tree/ contains the kernel and explains how blocks communicate.
// kernels/same_bits/fixed_tree.h defines the order in which values are added.
//
// A chunk is the part that one block folds. Its length depends on the device's number of SMs: every
// SM has four blocks at a time, or fewer for a short array.
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
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/tree/tree.h"

namespace tessera {
namespace {

Tree TreeOf(const DotProblem& p, int multiprocessors) {
  return SinglePassTree(p.n, static_cast<std::int64_t>(SizeOf(p.dtype)), p.launch, multiprocessors);
}

// The number of SMs of the GPU for which the cost is stated. The strategy itself uses the device's
// number.
constexpr int kUsualMultiprocessors = 132;

double Roundoff(const DotProblem& p) {
  return TreeDotRoundoff(SinglePassBound(p.n, static_cast<std::int64_t>(SizeOf(p.dtype)), p.launch),
                         p.dtype, false);
}

Cost CostOf(const DotProblem& p) {
  return TreeCost(p, TreeOf(p, kUsualMultiprocessors),
                  TreeWideBytes(ReduceOp::kSum, p.dtype, false));
}

void Enqueue(const DotProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const TreeLaunch launch = {.tree = TreeOf(p, cuda.device().info().multiprocessors),
                             .block = p.launch.block_size};
  DispatchDType(p.dtype, [&](auto zero) { LaunchTreeDot<decltype(zero), false>(p, launch, cuda); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotSinglePass = {
    .name = "single_pass",
    .summary = "one launch, 16-byte loads, the last block to start folds the values of all blocks",
    .source = "decoupled look-back and NCCL's LL protocol, applied to a reduction",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kTreeBlockSize,
               .grid_size = {1, static_cast<std::uint32_t>(kSinglePassChunks)}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
