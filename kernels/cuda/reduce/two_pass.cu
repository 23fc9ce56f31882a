// Reduce by the same kernel twice.
//
// Against `grid_stride`: the values of the blocks need a reduction, and there is a kernel for that.
// A second launch of it, with one block that has a thread for each block of the first, folds them
// and writes the result. The end of the first launch is the barrier between the two that blocks do
// not have. Against `atomic`: a tree instead of a queue, and the same bits from run to run.
//
//   launch 1   [block 0] [block 1] ... [block g - 1]    each strides, climbs a tree, leaves a value
//   launch 2   [   block of g threads   ]               thread t starts with value t
//
// The launches differ in their block size, so shared memory is dynamic: its size is an argument of
// the launch, no constant of the kernel. The grid of the first, being the block of the second, has
// at most 1024 blocks. At n = 2^20, starting the second launch takes about as long as memory does.
#include <algorithm>

#include "kernels/cuda/reduce/frame.cuh"

namespace tessera {
namespace {

constexpr LaunchLimits::Range kGridSize = {1, kMostThreads};

// Folds the values of each block's threads to partials[block] or, when there is only one block, to
// the result of a reduction of `all` elements. Dynamic shared memory: one Wide per thread.
template <class F, bool kFirst, class In>
__global__ void __launch_bounds__(kMostThreads)
    ReduceTwoPass(const In* x, std::int64_t n, std::int64_t all, typename F::Wide* partials,
                  Scalar* result) {
  const auto mine = FoldThreadInTurn<F>(GridThread(), n, GridThreads(),
                                        [=](std::int64_t i) { return LoadValue<F, kFirst>(x, i); });
  StoreBlock<F>(FoldBlockTree<F>(mine, DynamicShared<typename F::Wide>()), all, partials, result);
}

ReduceShape ShapeOf(const ReduceProblem& p) {
  const Grid grid = MakeFixedGrid(p.n, p.launch, 256, kFixedGrid);
  const bool twice = grid.blocks > 1;
  // The second pass begins with a chain of one.
  const std::int64_t wide_steps = CeilDiv(grid.per_thread, kMaxChain) + CeilLog2(grid.block_size) +
                                  (twice ? 2 + CeilLog2(grid.blocks) : 0);
  return {.grid = grid,
          .narrow_steps = std::min<std::int64_t>(grid.per_thread, kMaxChain),
          .wide_steps = wide_steps,
          .extra_bytes = twice ? 2 * grid.blocks * WideBytes(p.op, p.dtype) : 0,
          .depth = grid.per_thread + wide_steps};
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  CudaStream& cuda = Cuda(stream);
  DispatchFold(p, [&]<class F>(auto* x) {
    using Wide = typename F::Wide;
    auto* partials = static_cast<Wide*>(cuda.Scratch(grid.blocks * sizeof(Wide)));
    ReduceTwoPass<F, true>
        <<<grid.blocks, grid.block_size, grid.block_size * sizeof(Wide), cuda.handle()>>>(
            x, p.n, p.n, partials, p.result);
    CUDA_CHECK_LAUNCH(ReduceTwoPass);
    if (grid.blocks == 1) return;  // it has written the result
    ReduceTwoPass<PartialFold<F>, false>
        <<<1, grid.blocks, grid.blocks * sizeof(Wide), cuda.handle()>>>(partials, grid.blocks, p.n,
                                                                        nullptr, p.result);
    CUDA_CHECK_LAUNCH(ReduceTwoPass);
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceTwoPass = {
    .name = "two_pass",
    .summary = "a fixed grid strides, a tree per block, the same kernel again folds the blocks",
    .source = "reduction with two kernel calls of the HIP training examples",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kGridSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
