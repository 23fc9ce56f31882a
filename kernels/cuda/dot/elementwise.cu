// Dot, the first step: the GPU multiplies, and the host adds.
//
// A kernel replaces the loop over elements with threads: thread i multiplies a[i] and b[i],
// independently of all other threads. Threads that do not communicate cannot add their products.
// The products therefore go to device memory and from there to the host in slices, and OpenMP adds
// each slice on all cores.
//
// Most of the time goes into copying the products to the host and adding them there. Each product
// is rounded once to single precision. The host adds in double, in an order that depends only on n.
//
// Lesson: kernels/lessons/sum_1_atomics.cu
#include <algorithm>
#include <memory>

#include "kernels/cpu/runtime/sum.h"
#include "kernels/cuda/common/lesson.cuh"

namespace tessera {
namespace {

// The number of products that the host fetches and adds at a time. A slice of this size stays in
// the host's caches.
constexpr std::int64_t kSlice = std::int64_t{1} << 21;

template <class F, class Terms>
__global__ void __launch_bounds__(kMostThreads)
    DotElementwise(Terms terms, std::int64_t n, typename F::Acc* products) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) products[i] = terms(i);
}

LessonShape ShapeOf(const DotProblem& p) {
  return {.grid = MakeGrid(p.n, p.launch, 256, 1),
          .wide_steps = ParallelSumDepth(std::min(p.n, kSlice)) + CeilDiv(p.n, kSlice),
          .extra_bytes = static_cast<std::uint64_t>(p.n) * AccBytes(p)};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  const Grid grid = ShapeOf(p).grid;
  CudaStream& cuda = Cuda(stream);
  DispatchTerms(p, [&]<class F>(auto terms) {
    using Acc = typename F::Acc;
    auto* products = static_cast<Acc*>(cuda.Scratch(static_cast<std::size_t>(p.n) * sizeof(Acc)));
    DotElementwise<F><<<grid.blocks, grid.block_size, 0, cuda.handle()>>>(terms, p.n, products);
    CUDA_CHECK_LAUNCH(DotElementwise);
    // A std::vector would write zeros first.
    const auto slice = std::make_unique_for_overwrite<Acc[]>(std::min(p.n, kSlice));
    typename F::Wide sum = 0;
    for (std::int64_t at = 0; at < p.n; at += kSlice) {
      const std::int64_t count = std::min(kSlice, p.n - at);
      cuda.CopyToHost(slice.get(), products + at, count * sizeof(Acc));
      sum = WrapAdd(sum, ParallelSum(slice.get(), count, cuda));
    }
    Finish(sum, p.result);
  });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotElementwise = Lesson<ShapeOf, Enqueue, DotProblem>({
    .name = "elementwise",
    .summary = "the GPU multiplies into a vector, the host adds the vector's elements on all cores",
    .source =
        "multiplication on the GPU and OpenMP reduction from the notes on dot products in Metal",
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
});

}  // namespace tessera
