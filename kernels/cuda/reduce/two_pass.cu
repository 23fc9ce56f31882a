// Reduce with two launches of the same kernel.
//
// Compared with `grid_stride`, the same kernel also folds the values of the blocks. Its second
// launch has a single block, with one thread for each block of the first launch, and writes the
// result. A kernel has no barrier between its blocks; the end of the first launch serves as one.
// Compared with `atomic`, there is a tree instead of a queue, and the bits are the same from run to
// run.
//
//   launch 1   [block 0] [block 1] ... [block g - 1]    each strides, folds a tree, leaves a value
//   launch 2   [   block of g threads   ]               thread t starts with value t
//
// The launches differ in their block size, so shared memory is dynamic: its size is an argument of
// the launch and not a constant of the kernel. The second launch has one thread for each block of
// the first, so there are at most 1024 blocks. At n = 2^20, starting the second launch takes about
// as long as the memory accesses.
#include "kernels/cuda/reduce/frame.cuh"

namespace tessera {
namespace {

constexpr LaunchLimits::Range kGridSize = {1, kMostThreads};

// Folds the values of each block's threads into partials[block]. If there is only one block, the
// value becomes the result of a reduction of `all` elements instead. Dynamic shared memory: one
// Wide per thread.
template <class F, bool kFirst, class In>
__global__ void __launch_bounds__(kMostThreads)
    ReduceTwoPass(const In* x, std::int64_t n, std::int64_t all, typename F::Wide* partials,
                  Scalar* result) {
  const auto mine = FoldThreadInTurn<F>(GridThread(), n, GridThreads(),
                                        [=](std::int64_t i) { return LoadValue<F, kFirst>(x, i); });
  StoreBlock<F>(FoldBlockTree<F>(mine, DynamicShared<typename F::Wide>()), all, partials, result);
}

LessonShape ShapeOf(const ReduceProblem& p) {
  const Grid grid = MakeFixedGrid(p.n, p.launch, 256, kFixedGrid);
  const bool twice = grid.blocks > 1;
  const std::int64_t second = twice ? WideChainSteps(1) + CeilLog2(grid.blocks) : 0;
  return WithChains(grid.per_thread,
                    {.grid = grid,
                     .wide_steps = CeilLog2(grid.block_size) + second,
                     .extra_bytes = twice ? 2 * grid.blocks * WideBytes(p.op, p.dtype) : 0});
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoSecondKernel(
      p, grid.blocks, stream,
      [&]<class F>(auto* x, auto* partials, cudaStream_t on) {
        const std::size_t shared = grid.block_size * sizeof(typename F::Wide);
        ReduceTwoPass<F, true>
            <<<grid.blocks, grid.block_size, shared, on>>>(x, p.n, p.n, partials, p.result);
      },
      [&]<class F>(auto* partials, cudaStream_t on) {
        if (grid.blocks == 1) return;  // it has written the result
        const std::size_t shared = grid.blocks * sizeof(typename F::Wide);
        ReduceTwoPass<F, false>
            <<<1, grid.blocks, shared, on>>>(partials, grid.blocks, p.n, nullptr, p.result);
      });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceTwoPass = {
    .name = "two_pass",
    .summary =
        "a fixed grid strides, a tree per block, a second launch of the kernel folds the blocks",
    .source = "reduction with two kernel calls from the HIP training examples",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kGridSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
