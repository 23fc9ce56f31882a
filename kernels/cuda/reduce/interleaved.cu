// Reduce as a tree in device memory, with one launch per level, until a single value is left.
//
// A block takes two elements per thread and folds them in place, with a barrier between the steps.
// Thread t works on cell 2t and folds another cell into it, first the one at distance 1, then 2, 4,
// ...
//
//   stride 1   0<1 2<3 4<5 6<7    threads 0 1 2 3
//   stride 2   0<--2   4<--6      threads 0   2
//   stride 4   0<------4          thread  0
//
// A barrier only stops the threads of one block. Each block therefore writes its value to an array,
// and the next launch folds that array in the same way. The launch with only one block writes the
// result. At n = 2^20, launches of 2048, 4 and 1 blocks move 20 MiB. From step to step fewer lanes
// of a warp are active, on cells that are further apart. At stride 16 each cell is a separate
// transaction.
#include "kernels/cuda/reduce/frame.cuh"

namespace tessera {
namespace {

// Folds this block's 2 * blockDim.x cells of cells[0, n) in place. The value goes to
// partials[block]. In the last level, which has one block, it becomes the result of a reduction of
// `all` elements instead.
template <class F, class A>
__device__ void FoldPart(A* cells, std::int64_t n, std::int64_t all, typename F::Wide* partials,
                         Scalar* result) {
  const std::int64_t begin = std::int64_t{2} * blockIdx.x * blockDim.x;
  const std::int64_t part = min(n - begin, std::int64_t{2} * blockDim.x);
  const auto count = static_cast<unsigned>(part);
  A* mine = cells + begin;
  const unsigned to = 2 * threadIdx.x;
  for (unsigned stride = 1; stride < count; stride *= 2) {
    if (threadIdx.x % stride == 0 && to + stride < count)
      mine[to] = F::Combine(mine[to], mine[to + stride]);
    __syncthreads();  // multiples of 2 * stride are written, and the cells between have been read
  }
  StoreBlock<F>(part == 0 ? F::template Identity<typename F::Wide>() : Widened<F>(cells[begin]),
                all, partials, result);
}

// The first level. cells[0, n) are scratch, because the operand must not change.
template <class F, class T>
__global__ void __launch_bounds__(kMostThreads)
    ReduceInterleaved(const T* x, std::int64_t n, typename F::Acc* cells,
                      typename F::Wide* partials, Scalar* result) {
  for (std::int64_t i = std::int64_t{2} * blockIdx.x * blockDim.x + threadIdx.x, copied = 0;
       copied < 2 && i < n; ++copied, i += blockDim.x)
    cells[i] = F::Load(x[i], i);
  __syncthreads();  // the block's cells are written
  FoldPart<F>(cells, n, n, partials, result);
}

// The later levels. cells[0, n) are the values of the previous level's blocks.
template <class F>
__global__ void __launch_bounds__(kMostThreads)
    ReduceInterleavedLevel(typename F::Wide* cells, std::int64_t n, std::int64_t all,
                           typename F::Wide* partials, Scalar* result) {
  FoldPart<F>(cells, n, all, partials, result);
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const std::uint32_t block = BlockSize(p.launch);
  IntoLevelsInPlace(
      p, 2 * block, stream,
      [&]<class F>(auto* x, auto* cells, unsigned blocks, auto* partials, cudaStream_t on) {
        ReduceInterleaved<F><<<blocks, block, 0, on>>>(x, p.n, cells, partials, p.result);
      },
      [&]<class F>(auto* cells, std::int64_t n, unsigned blocks, auto* partials, cudaStream_t on) {
        ReduceInterleavedLevel<F><<<blocks, block, 0, on>>>(cells, n, p.n, partials, p.result);
      });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceInterleaved = {
    .name = "interleaved",
    .summary = "a tree of doubling strides in device memory, one launch per level",
    .source = "naive tree from the notes on CUDA reductions",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = RoundoffOf<TreesInPlace>,
    .cost = CostOf<TreesInPlace>,
    .launch = Enqueue,
};

}  // namespace tessera
