// Reduce with a fixed number of threads that stride through the input.
//
// Compared with `no_stride`, the grid has the size that suits the GPU, for any n. With T threads in
// the grid, each thread folds every T-th element, so adjacent threads always read adjacent
// elements. Only then does the tree of the block combine the threads' values. However long the
// input is, blocks start once and run the tree once, and the host gets the same small number of
// values.
//
//   element   0  1  2  3 | 4  5  6  7 | 8  9          4 threads
//   thread    0  1  2  3 | 0  1  2  3 | 0  1
//
// At n = 2^20, 1024 blocks of 256 threads fold four elements per thread, and 8 KiB go to the host.
// What remains is the cost of this round trip, about 10 us.
#include "kernels/cuda/reduce/frame.cuh"

namespace tessera {
namespace {

// Folds the elements of each block's threads into partials[block]. Dynamic shared memory: one Wide
// per thread.
template <class F, class T>
__global__ void __launch_bounds__(kMostThreads)
    ReduceGridStride(const T* x, std::int64_t n, typename F::Wide* partials) {
  using Acc = typename F::Acc;
  using Wide = typename F::Wide;
  std::int64_t i = GridThread();
  const std::int64_t step = GridThreads();
  Wide mine = F::template Identity<Wide>();
  while (i < n) {
    Acc chain = F::template Identity<Acc>();
    for (int folded = 0; folded < kMaxChain && i < n; ++folded, i += step)
      chain = F::Combine(chain, F::Load(x[i], i));
    mine = F::Combine(mine, Widened<F>(chain));
  }
  const Wide value = FoldBlockTree<F>(mine, DynamicShared<Wide>());
  if (threadIdx.x == 0) partials[blockIdx.x] = value;
}

LessonShape ShapeOf(const ReduceProblem& p) {
  const Grid grid = MakeFixedGrid(p.n, p.launch, 256, kFixedGrid);
  return WithChains(grid.per_thread, {.grid = grid,
                                      .wide_steps = CeilLog2(grid.block_size) + grid.blocks,
                                      .extra_bytes = grid.blocks * WideBytes(p.op, p.dtype)});
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoPartials(p, grid.blocks, stream, [&]<class F>(auto* x, auto* partials, cudaStream_t on) {
    const std::size_t shared = grid.block_size * sizeof(typename F::Wide);
    ReduceGridStride<F><<<grid.blocks, grid.block_size, shared, on>>>(x, p.n, partials);
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceGridStride = {
    .name = "grid_stride",
    .summary =
        "a fixed grid strides through the input, a tree per block, the host folds the blocks",
    .source = "reduction with striding from the HIP training examples",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = kAnyGridSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
