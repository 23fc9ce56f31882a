// Reduce with trees in shared memory, with one launch per level.
//
// Compared with `coalesced`, a block copies its part to the shared memory of its SM, where a step
// costs tens of cycles instead of hundreds. A thread loads two elements that are one block size
// apart and folds them immediately. The first step of the tree therefore costs nothing, and half as
// many cells are enough.
//
//   elements   0 1 2 3 | 4 5 6 7                    4 threads
//   load       0<4  1<5  2<6  3<7                   into shared memory
//   live 4     0<--2  1<--3                         threads 0 1
//   live 2     0<1                                  thread  0
//
// At n = 2^20 there are launches of 2048, 4 and 1 blocks with 9 barriers each, which pass 16 KiB
// from launch to launch.
#include "kernels/cuda/reduce/frame.cuh"

namespace tessera {
namespace {

// Folds the 2 * blockDim.x values of each block. The value goes to partials[block]. In the last
// level, which has one block, it becomes the result of a reduction of `all` elements instead.
// Dynamic shared memory: one accumulator per thread, Acc in the first level and Wide in the later
// ones.
template <class F, bool kFirst, class In>
__global__ void __launch_bounds__(kMostThreads)
    ReducePrivatized(const In* x, std::int64_t n, std::int64_t all, typename F::Wide* partials,
                     Scalar* result) {
  using A = std::conditional_t<kFirst, typename F::Acc, typename F::Wide>;
  const auto load = [=](std::int64_t i) -> A {
    if (i >= n) return F::template Identity<A>();
    return LoadValue<F, kFirst>(x, i);
  };
  const std::int64_t i = std::int64_t{2} * blockIdx.x * blockDim.x + threadIdx.x;
  A* cells = DynamicShared<A>();
  cells[threadIdx.x] = F::Combine(load(i), load(i + blockDim.x));
  __syncthreads();  // the fold of every pair is in its cell
  for (unsigned live = blockDim.x; live > 1;) {
    const unsigned half = (live + 1) / 2;
    if (threadIdx.x < live - half)
      cells[threadIdx.x] = F::Combine(cells[threadIdx.x], cells[threadIdx.x + half]);
    __syncthreads();  // the upper half has been read, the lower half is written
    live = half;
  }
  StoreBlock<F>(Widened<F>(cells[0]), all, partials, result);
}

LessonShape ShapeOf(const ReduceProblem& p) {
  const std::uint32_t block = BlockSize(p.launch);
  const LaterLevels later = MakeLaterLevels(p.n, 2 * block);
  const std::int64_t depth = 1 + CeilLog2(block);
  return {.grid = {.block_size = block},
          .narrow_steps = depth,
          .wide_steps = later.count * depth,
          .extra_bytes = 2 * static_cast<std::uint64_t>(later.values) * WideBytes(p.op, p.dtype)};
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const std::uint32_t block = BlockSize(p.launch);
  IntoLevels(p, 2 * block, stream,
             [&]<class F, bool kFirst>(auto* x, std::int64_t n, unsigned blocks, auto* partials,
                                       cudaStream_t on) {
               using A = std::conditional_t<kFirst, typename F::Acc, typename F::Wide>;
               ReducePrivatized<F, kFirst>
                   <<<blocks, block, block * sizeof(A), on>>>(x, n, p.n, partials, p.result);
             });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReducePrivatized = {
    .name = "privatized",
    .summary = "a tree in shared memory per block, two elements per thread, one launch per level",
    .source = "privatization, from the notes on CUDA reductions",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = RoundoffOf<ShapeOf>,
    .cost = CostOf<ShapeOf>,
    .launch = Enqueue,
};

}  // namespace tessera
