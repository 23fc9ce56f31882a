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
// At n = 2^20 there are launches of 2048, 4 and 1 blocks with 9 barriers per block. The launches
// pass 16 KiB on to each other.
//
// Lesson: kernels/lessons/sum_3_sequential.cu
#include "kernels/cuda/common/lesson.cuh"

namespace tessera {
namespace {

// Folds 2 * blockDim.x terms per block. Dynamic shared memory: one accumulator per thread, Acc in
// the first level and Wide in the later ones.
template <class F, class Terms, class End>
__global__ void __launch_bounds__(kMostThreads)
    ReducePrivatized(Terms terms, std::int64_t n, End end) {
  using A = decltype(terms(0));
  const auto term = [=](std::int64_t i) { return i < n ? terms(i) : F::template Identity<A>(); };
  const std::int64_t i = std::int64_t{2} * blockIdx.x * blockDim.x + threadIdx.x;
  const A mine = F::Combine(term(i), term(i + blockDim.x));
  end(Widened<F>(FoldBlockTree<F>(mine, DynamicShared<A>())));
}

LessonShape ShapeOf(const ReduceProblem& p) {
  const std::uint32_t block = BlockSize(p.launch);
  const LaterLevels later = MakeLaterLevels(p.n, 2 * block);
  const std::int64_t depth = 1 + CeilLog2(block);
  return {.grid = {.block_size = block},
          .narrow_steps = depth,
          .wide_steps = later.count * depth,
          .extra_bytes = 2 * static_cast<std::uint64_t>(later.values) * WideBytes(p)};
}

void Enqueue(const ReduceProblem& p, Stream& stream) {
  const std::uint32_t block = BlockSize(p.launch);
  IntoLevels(p, 2 * block, stream,
             [&]<class F>(auto terms, std::int64_t n, unsigned blocks, auto end, cudaStream_t on) {
               const std::size_t shared = block * sizeof terms(0);
               ReducePrivatized<F><<<blocks, block, shared, on>>>(terms, n, end);
             });
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReducePrivatized =
    Lesson<ShapeOf, Enqueue, ReduceProblem>({
        .name = "privatized",
        .summary =
            "a tree in shared memory per block, two elements per thread, one launch per level",
        .source = "privatization, from the notes on CUDA reductions",
        .deterministic = true,
        .limits = {.block_size = kAnyBlockSize},
    });

}  // namespace tessera
