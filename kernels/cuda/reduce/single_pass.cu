// Reduce in one launch, at the rate of the memory.
//
// Against `warp_shuffle`: a thread loads 16 bytes at a time and four such vectors before it uses
// the first, so that a quarter of the instructions keep as many bytes under way. A column of
// elements, always the same place of a thread's vectors, has its own accumulator: four or more
// short chains per thread instead of one. And there is no second kernel: the last block to start
// receives the others' values through the stream's mailbox and folds them in index order, so that
// starting a kernel, about 3 us, is paid once. kernels/cuda/tree/ has the kernel and says how
// blocks meet without a fence and without a memset; kernels/same_bits/fixed_tree.h says in which
// order values are added.
//
//   warp 0, row 0   | lane 0: 16 bytes | lane 1: 16 bytes | ... | lane 31 |   512 bytes, one
//   request row 1 ...       4096 bytes on: the block's 256 threads take a row
//
// A chunk is what one block folds: as long as the device's number of SMs makes it, so that every
// one of them has four blocks at once, or fewer in a short array. Thus the same device repeats its
// bits, and another may give others: that is what `fixed_tree` changes.
//
// Cost at n = 2^20, f32: 4 MiB read by 256 blocks, each of which sends 16 bytes; one launch. Memory
// takes 1 us at 4.3 TB/s, starting the kernel four times as long.
//
// Right for any n: a lane takes what vectors there are and at most one in pieces; n = 0 is one
// chunk of identities. For any block size: threads share out 256 lanes. For any alignment: an
// address that is not a multiple of 16 costs a second load, from the L1 cache, and a shift. For
// 2^28 floats: at most 64 elements are added in single precision, the rest is double.
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/tree/tree.h"

namespace tessera {
namespace {

Tree TreeOf(const ReduceProblem& p, int multiprocessors) {
  return SinglePassTree(p.n, static_cast<std::int64_t>(SizeOf(p.dtype)), p.launch, multiprocessors);
}

// Of the GPU that the cost is given for; the strategy asks the device.
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
