// Dot with several products a thread before the tree.
//
// Against `hierarchical`: a thread sums items_per_thread products (8 by default) in a register
// before it meets the others. The tree, its barriers and the atomic addition are paid once for all
// of them, there are as many times fewer blocks to start, and the loads of eight products are in
// flight together, which is what it takes to keep memory busy. A block's part is contiguous, and
// its threads take every blockDim-th element of it, so that in each step neighbours read
// neighbours:
//
//   block 0                      block 1                      block of 4, 2 items a thread
//   0  1  2  3 | 4  5  6  7      8  9 10 11 | 12 13 14 15     element
//   0  1  2  3 | 0  1  2  3      0  1  2  3 |  0  1  2  3     thread
//
// Cost at n = 2^20, f32, blocks of 256: 8 MiB read, 512 blocks with 9 barriers each, 512 atomic
// additions to one address. Memory takes 2 us at 4.3 TB/s; from about 2^24 elements on it is what
// bounds this row.
//
// Right for any n: a thread takes what there is of its items, n = 0 is one block of zeros. For any
// block size: the tree rounds halves up. For any alignment: loads are scalar. For 2^28 floats: at
// most 64 products are summed in single precision, the rest is double, and between blocks in an
// order that differs from run to run.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/dot.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
constexpr std::uint32_t kItems = 8;

std::int64_t Items(const DotProblem& p) {
  return p.launch.items_per_thread != 0 ? p.launch.items_per_thread : kItems;
}

Grid GridOf(const DotProblem& p) { return MakeGrid(p.n, p.launch, kBlock, kItems); }

// *total += a . b, items * blockDim.x elements a block. Dynamic shared memory: one Wide a thread.
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotCoarsened(const T* a, const T* b, std::int64_t n, std::int64_t items, DotWide<T>* total) {
  using F = DotFold<T>;
  const std::int64_t begin = blockIdx.x * items * blockDim.x;
  const std::int64_t end = min(n, begin + items * blockDim.x);
  const DotWide<T> mine = FoldThread<F>(begin + threadIdx.x, end, blockDim.x,
                                        [=](std::int64_t i) { return F::Multiply(a[i], b[i]); });
  const DotWide<T> sum = FoldBlockTree<F>(mine, DynamicShared<DotWide<T>>());
  if (threadIdx.x == 0) AtomicAdd(total, sum);
}

template <class T>
void Run(const DotProblem& p, CudaStream& stream) {
  const Grid grid = GridOf(p);
  auto* total = MakeSum<DotWide<T>>(stream);
  DotCoarsened<T>
      <<<grid.blocks, grid.block_size, grid.block_size * sizeof(DotWide<T>), stream.handle()>>>(
          static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, Items(p), total);
  CUDA_CHECK_LAUNCH(DotCoarsened);
  FetchSum(total, p.result, stream);
}

// Steps in Wide that follow a thread's chains.
std::int64_t WideSteps(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return CeilDiv(Items(p), kMaxChain) + CeilLog2(grid.block_size) + grid.blocks;
}

double Roundoff(const DotProblem& p) {
  return DotRoundoff(p.dtype, 1 + std::min<std::int64_t>(Items(p), kMaxChain), WideSteps(p));
}

Cost CostOf(const DotProblem& p) {
  return {.bytes = OperandBytes(p),
          .flops = 2 * static_cast<std::uint64_t>(p.n),
          .atomics = GridOf(p).blocks,
          .depth = static_cast<std::uint64_t>(Items(p) + WideSteps(p))};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotCoarsened = {
    .name = "coarsened",
    .summary =
        "several products a thread in a register, then a tree and one atomic addition a block",
    .source = "thread coarsening of the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .limits = {.block_size = kAnyBlockSize, .items_per_thread = kAnyItems},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
