// Reduce with two different kernels, the first of which has an unroll factor.
//
// Compared with `two_pass`, the grid is not fixed. Its size follows from n and from the number of
// elements per thread, items_per_thread (8 by default), which is the unroll factor. Each time the
// factor doubles, the number of blocks to start, of trees to fold and of values to pass on is
// halved. The kernel does not know the factor: it strides by the number of threads in the grid.
// There may be more than 1024 blocks, so the second kernel is a different one: a single block whose
// threads first stride through the values.
//
//   kernel 1   grid = ceil(n / (block size * items))    strides, a tree and a value per block
//   kernel 2   grid = 1                                 strides through the values, a tree
//
// At n = 2^20 there are 512 blocks in the first launch and one in the second.
#include "kernels/cuda/reduce/frame.cuh"

namespace tessera {
namespace {

// Folds the elements of each block's threads into partials[block]. Dynamic shared memory: one Wide
// per thread.
template <class F, class T>
__global__ void __launch_bounds__(kMostThreads)
    ReduceUnrolled(const T* x, std::int64_t n, typename F::Wide* partials) {
  using Wide = typename F::Wide;
  const Wide mine = FoldThreadInTurn<F>(GridThread(), n, GridThreads(),
                                        [=](std::int64_t i) { return F::Load(x[i], i); });
  const Wide value = FoldBlockTree<F>(mine, DynamicShared<Wide>());
  if (threadIdx.x == 0) partials[blockIdx.x] = value;
}

// Computes the result of a reduction of `all` elements from the values of its blocks. The grid is
// one block of kMostThreads threads.
template <class F>
__global__ void __launch_bounds__(kMostThreads)
    ReduceBlockValues(const typename F::Wide* partials, std::int64_t blocks, std::int64_t all,
                      Scalar* result) {
  using Wide = typename F::Wide;
  __shared__ Wide cells[kMostThreads];
  const Wide mine = FoldThreadInTurn<F>(threadIdx.x, blocks, kMostThreads,
                                        [=](std::int64_t i) { return partials[i]; });
  const Wide value = FoldBlockTree<F>(mine, cells);
  if (threadIdx.x == 0) F::Finish(value, all, result);
}

LessonShape ShapeOf(const ReduceProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 8);
  const std::int64_t second =
      WideChainSteps(CeilDiv(grid.blocks, kMostThreads)) + CeilLog2(kMostThreads);
  return WithChains(grid.per_thread, {.grid = grid,
                                      .wide_steps = CeilLog2(grid.block_size) + second,
                                      .extra_bytes = 2 * grid.blocks * WideBytes(p.op, p.dtype)});
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoSecondKernel(
      p, grid.blocks, stream,
      [&]<class F>(auto* x, auto* partials, cudaStream_t on) {
        const std::size_t shared = grid.block_size * sizeof(typename F::Wide);
        ReduceUnrolled<F><<<grid.blocks, grid.block_size, shared, on>>>(x, p.n, partials);
      },
      [&]<class F>(auto* partials, cudaStream_t on) {
        ReduceBlockValues<F><<<1, kMostThreads, 0, on>>>(partials, grid.blocks, p.n, p.result);
      });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceTwoKernelsUnrolled = {
    .name = "two_kernels_unrolled",
    .summary =
        "items_per_thread elements per thread, a tree per block, a second kernel folds the blocks",
    .source = "reduction with two kernels and unrolling from the HIP training examples",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .items_per_thread = kAnyItems},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
