// Reduce with several elements a thread before the tree.
//
// Against `privatized`: a thread folds items_per_thread elements (8 by default) in a register
// before it meets the others, where it was two. The tree and its barriers are paid once for all of
// them, there are as many times fewer blocks to start and values to pass on, and the loads of eight
// elements are in flight together, which is what it takes to keep memory busy. The hardware would
// run so many blocks one after the other anyway; the loop does so without their trees.
//
//   block 0                      block 1                      block of 4, 2 items a thread
//   0  1  2  3 | 4  5  6  7      8  9 10 11 | 12 13 14 15     element
//   0  1  2  3 | 0  1  2  3      0  1  2  3 |  0  1  2  3     thread
//
// Cost at n = 2^20, f32, blocks of 256: 4 MiB read, and 4 KiB written and read again between
// levels; two launches of 512 and 1 blocks; 9 barriers a block. Memory takes 1 us at 4.3 TB/s; from
// about 2^25 elements on it is what bounds this row.
//
// Right for any n: a thread takes what there is of its items, n = 0 is one block of identities. For
// any block size: the tree rounds halves up. For any alignment: loads are scalar. For 2^28 floats:
// at most 64 elements are folded in single precision, by one thread; the rest is double.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/levels.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
constexpr std::uint32_t kItems = 8;

std::uint32_t BlockSize(const ReduceProblem& p) {
  return p.launch.block_size != 0 ? p.launch.block_size : kBlock;
}
std::int64_t Items(const ReduceProblem& p) {
  return p.launch.items_per_thread != 0 ? p.launch.items_per_thread : kItems;
}
std::int64_t PerBlock(const ReduceProblem& p) { return Items(p) * BlockSize(p); }

// Folds the items * blockDim.x values of each block to partials[block] or, in the last level, which
// has one block, to the result of a reduction of `count` elements. The first level reads elements,
// the others partial values. Dynamic shared memory: one Wide a thread.
template <class F, bool kFirst, class In>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    ReduceCoarsened(const In* x, std::int64_t n, std::int64_t items, std::int64_t count,
                    typename F::Wide* partials, Scalar* result) {
  const std::int64_t begin = blockIdx.x * items * blockDim.x;
  const std::int64_t end = min(n, begin + items * blockDim.x);
  const auto mine = FoldThread<F>(begin + threadIdx.x, end, blockDim.x, [=](std::int64_t i) {
    if constexpr (kFirst) {
      return F::Load(x[i], i);
    } else {
      return x[i];
    }
  });
  StoreBlock<F>(FoldBlockTree<F>(mine, DynamicShared<typename F::Wide>()), count, partials, result);
}

template <ReduceOp op, class T>
void Run(const ReduceProblem& p, CudaStream& stream) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  const std::uint32_t block = BlockSize(p);
  const std::int64_t items = Items(p);
  RunLevels<Wide>(
      p.n, PerBlock(p), stream,
      [&](unsigned blocks, Wide* to) {
        ReduceCoarsened<F, true><<<blocks, block, block * sizeof(Wide), stream.handle()>>>(
            static_cast<const T*>(p.x), p.n, items, p.n, to, p.result);
        CUDA_CHECK_LAUNCH(ReduceCoarsened);
      },
      [&](unsigned blocks, const Wide* from, std::int64_t n, Wide* to) {
        ReduceCoarsened<PartialFold<op, T>, false>
            <<<blocks, block, block * sizeof(Wide), stream.handle()>>>(from, n, items, p.n, to,
                                                                       p.result);
        CUDA_CHECK_LAUNCH(ReduceCoarsened);
      });
}

// Steps in Fold::Wide: of a first level, and of all.
std::int64_t FirstWideSteps(const ReduceProblem& p) {
  return CeilDiv(Items(p), kMaxChain) + CeilLog2(BlockSize(p));
}
std::int64_t WideSteps(const ReduceProblem& p) {
  // A chain of Wide ends in a Wide: one step more for every kMaxChain values.
  const std::int64_t later = Items(p) + CeilDiv(Items(p), kMaxChain) + CeilLog2(BlockSize(p));
  return FirstWideSteps(p) + MakeLaterLevels(p.n, PerBlock(p)).count * later;
}

double Roundoff(const ReduceProblem& p) {
  return ReduceRoundoff(p.op, p.dtype, p.n, std::min<std::int64_t>(Items(p), kMaxChain),
                        WideSteps(p));
}

Cost CostOf(const ReduceProblem& p) {
  const LaterLevels later = MakeLaterLevels(p.n, PerBlock(p));
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = n * SizeOf(p.dtype) +
                   2 * static_cast<std::uint64_t>(later.values) * WideBytes(p.op, p.dtype),
          .flops = n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(Items(p) + WideSteps(p))};
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) {
    DispatchOp(p.op, [&](auto op) { Run<op(), decltype(zero)>(p, Cuda(stream)); });
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceCoarsened = {
    .name = "coarsened",
    .summary =
        "several elements a thread in a register, then a tree a block, launches until one is left",
    .source = "thread coarsening in the notes on CUDA reductions",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .items_per_thread = kAnyItems},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
