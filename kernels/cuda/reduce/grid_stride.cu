// Reduce with a fixed number of threads that stride through the input.
//
// Against `no_stride`: the grid is as large as the GPU likes it, whatever n is. A thread folds
// every threads-th element, so that neighbours always read neighbouring elements, and only then
// meets the others. Blocks are started once and trees are climbed once, however long the input is,
// and the host gets the same few values.
//
//   element   0  1  2  3 | 4  5  6  7 | 8  9          4 threads
//   thread    0  1  2  3 | 0  1  2  3 | 0  1
//
// Cost at n = 2^20, f32, 1024 blocks of 256: 4 MiB read, four elements a thread; 9 barriers a
// block; 8 KiB written, and fetched and folded by the host. Memory would take 1 us at 4.3 TB/s; the
// round trip to the host, about 10 us, is what is left to save.
//
// Right for any n and grid: a thread without elements contributes the identity. For any block size:
// the tree rounds halves up. For any alignment: loads are scalar. For 2^28 floats: chains of at
// most 64 elements in single precision, the rest double.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/reduce/finish.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

Grid GridOf(const ReduceProblem& p) { return MakeFixedGrid(p.n, p.launch, kBlock, kFixedGrid); }

// Folds the elements of each block's threads to partials[block]. Dynamic shared memory: one Wide a
// thread.
template <class F, class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    ReduceGridStride(const T* x, std::int64_t n, typename F::Wide* partials) {
  using Wide = typename F::Wide;
  const Wide mine = FoldThreadInTurn<F>(GridThread(), n, GridThreads(),
                                        [=](std::int64_t i) { return F::Load(x[i], i); });
  const Wide value = FoldBlockTree<F>(mine, DynamicShared<Wide>());
  if (threadIdx.x == 0) partials[blockIdx.x] = value;
}

template <ReduceOp op, class T>
void Run(const ReduceProblem& p, CudaStream& stream) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  const Grid grid = GridOf(p);
  auto* partials = static_cast<Wide*>(stream.Scratch(grid.blocks * sizeof(Wide)));
  ReduceGridStride<F>
      <<<grid.blocks, grid.block_size, grid.block_size * sizeof(Wide), stream.handle()>>>(
          static_cast<const T*>(p.x), p.n, partials);
  CUDA_CHECK_LAUNCH(ReduceGridStride);
  FinishOnHost<PartialFold<op, T>>(partials, grid.blocks, p.n, p.result, stream);
}

// Steps in Fold::Wide that follow a thread's chains.
std::int64_t WideSteps(const Grid& grid) {
  return CeilDiv(grid.per_thread, kMaxChain) + CeilLog2(grid.block_size) + grid.blocks;
}

double Roundoff(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  return ReduceRoundoff(p.op, p.dtype, p.n, std::min<std::int64_t>(grid.per_thread, kMaxChain),
                        WideSteps(grid));
}

Cost CostOf(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = n * SizeOf(p.dtype) + grid.blocks * WideBytes(p.op, p.dtype),
          .flops = n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(grid.per_thread + WideSteps(grid))};
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) {
    DispatchOp(p.op, [&](auto op) { Run<op(), decltype(zero)>(p, Cuda(stream)); });
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceGridStride = {
    .name = "grid_stride",
    .summary = "a fixed grid strides through the input, a tree a block, the host folds the blocks",
    .source = "reduction with striding of the HIP training examples",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kAnyGridSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
