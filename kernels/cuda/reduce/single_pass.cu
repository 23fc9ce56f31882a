// Reduce in one launch, at the speed of memory.
//
// Compared with `warp_shuffle`, a thread loads 16 bytes at a time, and four such vectors before it
// uses the first. A quarter of the instructions therefore keep the same number of bytes in flight.
// The elements at one position of a thread's vectors form a column, and each column has its own
// accumulator: a thread has four or more short chains instead of one long one. There is no second
// kernel. The last block to start receives the values of the other blocks through the stream's
// mailbox and folds them in index order, so the time to start a kernel, about 3 us, is paid only
// once. kernels/cuda/tree/ contains the kernel and explains how blocks communicate without a fence
// and without a memset. kernels/same_bits/fixed_tree.h defines the order in which values are added.
//
//   warp 0, row 0   | lane 0: 16 bytes | lane 1: 16 bytes | ... | lane 31 |   one 512-byte request
//           row 1   ...       4096 bytes further: the block's 256 threads take a row
//
// A chunk is the part that one block folds. Its length depends on the device's number of SMs: every
// SM has four blocks at a time, or fewer for a short array. The same device therefore gives the
// same bits again, but another device may give different bits. `fixed_tree` avoids that.
//
// Cost at n = 2^20, f32: 256 blocks read 4 MiB and send 16 bytes each, in one launch. Reading takes
// 1 us at 4.3 TB/s, and starting the kernel takes four times as long.
//
// The kernel is correct for any n: a lane takes whole vectors and at most one incomplete vector,
// and n = 0 is one chunk of identities. It is correct for any block size, because the threads
// divide 256 lanes among them. It is correct for any alignment: if an address is not a multiple of
// 16, each vector costs a shift and a second load, which hits the L1 cache. It is accurate for 2^28
// floats: at most 64 elements are added in single precision, and the rest in double.
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/tree/tree.h"

namespace tessera {
namespace {

Tree TreeOf(const ReduceProblem& p, int multiprocessors) {
  return SinglePassTree(p.n, static_cast<std::int64_t>(SizeOf(p.dtype)), p.launch, multiprocessors);
}

// The number of SMs of the GPU for which the cost is stated. The strategy itself uses the device's
// number.
constexpr int kUsualMultiprocessors = 132;

double Roundoff(const ReduceProblem& p) {
  return TreeRoundoff(SinglePassBound(p.n, static_cast<std::int64_t>(SizeOf(p.dtype)), p.launch),
                      p.op, p.dtype, false);
}

Cost CostOf(const ReduceProblem& p) {
  return TreeCost(p, TreeOf(p, kUsualMultiprocessors), TreeWideBytes(p.op, p.dtype, false));
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const TreeLaunch launch = {.tree = TreeOf(p, cuda.device().info().multiprocessors),
                             .block = p.launch.block_size};
  DispatchDType(p.dtype,
                [&](auto zero) { LaunchTreeReduce<decltype(zero), false>(p, launch, cuda); });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceSinglePass = {
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
