// Reduce with one element per thread. The host folds the blocks.
//
// This is the kernel that most people write first once they know shared memory. Thread i loads
// element i, a tree in shared memory folds the elements of a block, and thread 0 stores the value.
// The host, which has to wait for the kernel anyway, folds the values of the blocks in a loop.
//
//   elements   0 1 2 3 | 4 5 6 7 | 8 9          blocks of 4 threads
//   tree       0<--2 1<--3, 0<1                 in each of them
//   partials   0         1         2            to the host
//
// Compared with `coarsened`, nothing is gained: a thread waits for a single load, and then half of
// the threads are idle in the tree's first level and more in every later level. The strategy is
// here for comparison with `grid_stride`. At n = 2^20 there are 4096 blocks with 9 barriers each.
// The round trip to the host takes ten times as long as the memory accesses.
#include "kernels/cuda/reduce/frame.cuh"

namespace tessera {
namespace {

// Folds the blockDim.x elements of each block into partials[block]. Dynamic shared memory: one Acc
// per thread.
template <class F, class T>
__global__ void __launch_bounds__(kMostThreads)
    ReduceNoStride(const T* x, std::int64_t n, typename F::Wide* partials) {
  using Acc = typename F::Acc;
  const std::int64_t i = GridThread();
  const Acc mine = i < n ? F::Load(x[i], i) : F::template Identity<Acc>();
  const Acc value = FoldBlockTree<F>(mine, DynamicShared<Acc>());
  if (threadIdx.x == 0) partials[blockIdx.x] = F::Widen(value);
}

LessonShape ShapeOf(const ReduceProblem& p) {
  const Grid grid = MakeGrid(p.n, p.launch, 256, 1);
  return {.grid = grid,
          .narrow_steps = CeilLog2(grid.block_size),
          .wide_steps = grid.blocks,
          .extra_bytes = grid.blocks * WideBytes(p.op, p.dtype)};
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  IntoPartials(p, grid.blocks, stream, [&]<class F>(auto* x, auto* partials, cudaStream_t on) {
    const std::size_t shared = grid.block_size * sizeof(typename F::Acc);
    ReduceNoStride<F><<<grid.blocks, grid.block_size, shared, on>>>(x, p.n, partials);
  });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceNoStride = {
    .name = "no_stride",
    .summary =
        "one element per thread, a tree in shared memory per block, the host folds the blocks",
    .source = "reduction without striding from the HIP training examples",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
