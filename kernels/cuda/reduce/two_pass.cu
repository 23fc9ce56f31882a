// Reduce by the same kernel twice.
//
// Against `grid_stride`: the blocks' values need not go to the host, since what they need is a
// reduction, and there is a kernel for that. A second launch of it, with one block that has a
// thread for each block of the first, folds them and writes the result. The end of the first launch
// is the barrier between the two that blocks do not have. Against `atomic`: a tree instead of a
// queue, and the same bits from run to run.
//
//   launch 1   [block 0] [block 1] ... [block g - 1]    each strides, climbs a tree, leaves a value
//   launch 2   [   block of g threads   ]               thread t starts with value t
//
// The two launches differ in their block size, so shared memory is dynamic: its size is an argument
// of the launch and not a constant of the kernel. And the grid of the first, being the block of the
// second, has at most 1024 blocks.
//
// Cost at n = 2^20, f32, 1024 blocks of 256: 4 MiB read, four elements a thread; 9 barriers a block
// and 11 in the last; 8 KiB written and read again. Memory takes 1 us at 4.3 TB/s, and starting the
// second launch about as long.
//
// Right for any n and grid: a thread without elements contributes the identity. For any block size,
// that of the second launch included: the tree rounds halves up. For any alignment: loads are
// scalar. For 2^28 floats: chains of at most 64 elements in single precision, the rest double.
#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
constexpr LaunchLimits::Range kGridSize = {1, kAnyBlockSize.max};

Grid GridOf(const ReduceProblem& p) { return MakeFixedGrid(p.n, p.launch, kBlock, kFixedGrid); }

// Folds the values of each block's threads to partials[block] or, when there is only one block, to
// the result of a reduction of `count` elements. The first pass reads elements, the second partial
// values. Dynamic shared memory: one Wide a thread.
template <class F, bool kFirst, class In>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    ReduceTwoPass(const In* x, std::int64_t n, std::int64_t count, typename F::Wide* partials,
                  Scalar* result) {
  const auto mine = FoldThreadInTurn<F>(GridThread(), n, GridThreads(), [=](std::int64_t i) {
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
  const Grid grid = GridOf(p);
  auto* partials = static_cast<Wide*>(stream.Scratch(grid.blocks * sizeof(Wide)));
  ReduceTwoPass<F, true>
      <<<grid.blocks, grid.block_size, grid.block_size * sizeof(Wide), stream.handle()>>>(
          static_cast<const T*>(p.x), p.n, p.n, partials, p.result);
  CUDA_CHECK_LAUNCH(ReduceTwoPass);
  if (grid.blocks == 1) return;  // it has written the result
  ReduceTwoPass<PartialFold<op, T>, false>
      <<<1, grid.blocks, grid.blocks * sizeof(Wide), stream.handle()>>>(
          static_cast<const Wide*>(partials), grid.blocks, p.n, nullptr, p.result);
  CUDA_CHECK_LAUNCH(ReduceTwoPass);
}

// Steps in Fold::Wide that follow a thread's chains; the second pass begins with a chain of one.
std::int64_t WideSteps(const Grid& grid) {
  std::int64_t steps = CeilDiv(grid.per_thread, kMaxChain) + CeilLog2(grid.block_size);
  if (grid.blocks > 1) steps += 2 + CeilLog2(grid.blocks);
  return steps;
}

double Roundoff(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  return ReduceRoundoff(p.op, p.dtype, p.n, std::min<std::int64_t>(grid.per_thread, kMaxChain),
                        WideSteps(grid));
}

Cost CostOf(const ReduceProblem& p) {
  const Grid grid = GridOf(p);
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = n * SizeOf(p.dtype) +
                   (grid.blocks > 1 ? 2 * grid.blocks * WideBytes(p.op, p.dtype) : 0),
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

extern constexpr Strategy<ReduceProblem> kReduceTwoPass = {
    .name = "two_pass",
    .summary = "a fixed grid strides, a tree a block, the same kernel again folds the blocks",
    .source = "reduction with two kernel calls of the HIP training examples",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kGridSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
