// Dot with a fixed grid and a tree a block.
//
// Against `thread_partials`: the partial sums of a block's threads meet in shared memory, a few
// cycles away, where a tree adds them up. The tree halves what is left at every level and has a
// barrier between levels: log2(block) steps instead of the block - 1 of `block_serial`'s chain, and
// half of the threads, then a quarter, have work in them. The host gets one value a block.
//
//   live 8     0<------4  1<------5  2<------6  3<------7
//   live 4     0<--2  1<--3
//   live 2     0<1
//
// Cost at n = 2^20, f32, 1024 blocks of 256: 8 MiB read, four elements a thread; 9 barriers a
// block; 8 KiB written, and fetched and added by the host. Memory would take 2 us at 4.3 TB/s; the
// round trip to the host, about 10 us, is what is left to save.
//
// Right for any n and grid: a thread without elements contributes 0. For any block size: halves are
// rounded up. For any alignment: loads are scalar. For 2^28 floats: chains of at most 64 products
// in single precision, the rest double.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/dot.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

Grid GridOf(const DotProblem& p) { return MakeFixedGrid(p.n, p.launch, kBlock, kFixedGrid); }

// partials[block] = the part of a . b that belongs to the block. Dynamic shared memory: one Wide a
// thread.
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotBlockPartials(const T* a, const T* b, std::int64_t n, DotWide<T>* partials) {
  const DotWide<T> mine = FoldThreadInTurn<DotFold<T>>(
      GridThread(), n, GridThreads(),
      [=](std::int64_t i) { return DotFold<T>::Multiply(a[i], b[i]); });
  const DotWide<T> sum = FoldBlockTree<DotFold<T>>(mine, DynamicShared<DotWide<T>>());
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <class T>
void Run(const DotProblem& p, CudaStream& stream) {
  const Grid grid = GridOf(p);
  auto* partials = static_cast<DotWide<T>*>(stream.Scratch(grid.blocks * sizeof(DotWide<T>)));
  DotBlockPartials<T>
      <<<grid.blocks, grid.block_size, grid.block_size * sizeof(DotWide<T>), stream.handle()>>>(
          static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, partials);
  CUDA_CHECK_LAUNCH(DotBlockPartials);
  SumOnHost(partials, grid.blocks, p.result, stream);
}

// Steps in Wide that follow a thread's chains.
std::int64_t WideSteps(const Grid& grid) {
  return CeilDiv(grid.per_thread, kMaxChain) + CeilLog2(grid.block_size) + grid.blocks;
}

double Roundoff(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return DotRoundoff(p.dtype, 1 + std::min<std::int64_t>(grid.per_thread, kMaxChain),
                     WideSteps(grid));
}

Cost CostOf(const DotProblem& p) {
  const Grid grid = GridOf(p);
  return {.bytes = OperandBytes(p) + std::uint64_t{grid.blocks} * sizeof(double),
          .flops = 2 * static_cast<std::uint64_t>(p.n),
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(grid.per_thread + WideSteps(grid))};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotBlockPartials = {
    .name = "block_partials",
    .summary = "a fixed grid strides, a tree in shared memory a block, the host adds the blocks",
    .source = "dot product with shared memory of the CUDA shared-memory tutorial",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kAnyGridSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
