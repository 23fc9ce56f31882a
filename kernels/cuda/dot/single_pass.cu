// Dot in one launch, at the rate of the memory.
//
// Against `warp_shuffle`: a thread loads 16 bytes at a time, two vectors of each operand before it
// uses the first, and a column of products, always the same place of a thread's vectors, has its
// own accumulator. No cell of device memory has to be zeroed before, and none copied after: the
// last block to start receives the others' sums through the stream's mailbox, adds them in index
// order and writes the result, so that the same call gives the same bits. kernels/cuda/tree/ has
// the kernel and says how blocks meet; kernels/same_bits/fixed_tree.h says in which order values
// are added.
//
// A chunk is what one block folds: as long as the device's number of SMs makes it, so that every
// one of them has four blocks at once, or fewer in a short array.
//
// Cost at n = 2^20, f32: 8 MiB read by 256 blocks, each of which sends 16 bytes; one launch. Memory
// takes 2 us at 4.3 TB/s, starting the kernel twice as long.
//
// Right for any n: a lane takes what vectors there are and at most one in pieces; n = 0 is one
// chunk of zeros. For any block size: threads share out 256 lanes. For any alignment: operands that
// are off a multiple of 16 by the same distance are read like aligned ones; otherwise each vector
// costs a second load, from the L1 cache, and a shift. For 2^28 floats: at most 64 products are
// added in single precision, the rest is double.
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/tree/tree.h"

namespace tessera {
namespace {

Tree TreeOf(const DotProblem& p, int multiprocessors) {
  return SinglePassTree(p.n, static_cast<std::int64_t>(SizeOf(p.dtype)), p.launch, multiprocessors);
}

// Of the GPU that the cost is given for; the strategy asks the device.
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
    .summary = "one launch: 16-byte loads, the last block to start folds what the others send",
    .source = "decoupled look-back and the LL protocol of NCCL, applied to a reduction",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kTreeBlockSize,
               .grid_size = {1, static_cast<std::uint32_t>(kSinglePassChunks)}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
