// Reduce with the tree of `interleaved` in device memory, but with active threads that are
// adjacent.
//
// Compared with `interleaved`, only the numbering changes: strides halve instead of doubling, and
// at stride s, thread t folds cell t + s into cell t, as long as t is below s.
//
//   live 8     0<------4  1<------5  2<------6  3<------7    threads 0 1 2 3
//   live 4     0<--2  1<--3                                  threads 0 1
//   live 2     0<1                                           thread  0
//
// The 32 cells that a warp reads at a time are adjacent: one 128-byte transaction (f32) instead of
// up to 32 transactions. The active threads are adjacent too, so a warp works with all of its lanes
// or not at all. The cells are still in device memory, and every step waits for this memory.
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
  for (unsigned live = count; live > 1;) {
    const unsigned half = (live + 1) / 2;  // an odd cell waits for the next level
    if (threadIdx.x < live - half)
      mine[threadIdx.x] = F::Combine(mine[threadIdx.x], mine[threadIdx.x + half]);
    __syncthreads();  // the upper half has been read, the lower half is written
    live = half;
  }
  StoreBlock<F>(part == 0 ? F::template Identity<typename F::Wide>() : Widened<F>(cells[begin]),
                all, partials, result);
}

// The first level. cells[0, n) are scratch, because the operand must not change.
template <class F, class T>
__global__ void __launch_bounds__(kMostThreads)
    ReduceCoalesced(const T* x, std::int64_t n, typename F::Acc* cells, typename F::Wide* partials,
                    Scalar* result) {
  for (std::int64_t i = std::int64_t{2} * blockIdx.x * blockDim.x + threadIdx.x, copied = 0;
       copied < 2 && i < n; ++copied, i += blockDim.x)
    cells[i] = F::Load(x[i], i);
  __syncthreads();  // the block's cells are written
  FoldPart<F>(cells, n, n, partials, result);
}

// The later levels. cells[0, n) are the values of the previous level's blocks.
template <class F>
__global__ void __launch_bounds__(kMostThreads)
    ReduceCoalescedLevel(typename F::Wide* cells, std::int64_t n, std::int64_t all,
                         typename F::Wide* partials, Scalar* result) {
  FoldPart<F>(cells, n, all, partials, result);
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const std::uint32_t block = BlockSize(p.launch);
  IntoLevelsInPlace(
      p, 2 * block, stream,
      [&]<class F>(auto* x, auto* cells, unsigned blocks, auto* partials, cudaStream_t on) {
        ReduceCoalesced<F><<<blocks, block, 0, on>>>(x, p.n, cells, partials, p.result);
      },
      [&]<class F>(auto* cells, std::int64_t n, unsigned blocks, auto* partials, cudaStream_t on) {
        ReduceCoalescedLevel<F><<<blocks, block, 0, on>>>(cells, n, p.n, partials, p.result);
      });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceCoalesced = {
    .name = "coalesced",
    .summary = "a tree of halving strides in device memory, one launch per level",
    .source = "coalesced tree against memory divergence, from the notes on CUDA reductions",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = RoundoffOf<TreesInPlace>,
    .cost = CostOf<TreesInPlace>,
    .launch = Enqueue,
};

}  // namespace tessera
