// Dot, the first step: the GPU multiplies, the host adds.
//
// A kernel replaces the loop over elements by threads: thread i multiplies a[i] and b[i], and knows
// nothing of the others. What threads that do not talk to each other can not do is add up, so the
// products go to device memory, from there to the host piece by piece, and OpenMP reduces each
// piece over the cores.
//
// Cost at n = 2^20, f32: 8 MiB read and 4 MiB written by 4096 blocks of 256 without a barrier,
// which memory does in 3 us at 4.3 TB/s. Then 4 MiB cross the bus and are copied and read by the
// host, at 11 GB/s and a few times that: about 0.5 ms. The multiplications, all of the work that
// the GPU was given, are less than a hundredth of the time.
//
// Right for any n: threads beyond the end do nothing, and the sum of no products is 0. For any
// block size and alignment: threads do not meet, and loads are scalar. For 2^28 floats: a product
// rounds once, in single precision; the host adds in double, in an order that n alone decides.
#include <algorithm>
#include <memory>

#include "kernels/cpu/sum.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/dot.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;
// Products that the host fetches and adds up at a time: few enough for its caches, so that they do
// not travel to its memory and back.
constexpr std::int64_t kPiece = std::int64_t{1} << 21;

// products = a * b, element by element.
template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    DotElementwise(const T* a, const T* b, std::int64_t n, DotAcc<T>* products) {
  const std::int64_t i = GridThread();
  if (i < n) products[i] = DotFold<T>::Multiply(a[i], b[i]);
}

template <class T>
void Run(const DotProblem& p, CudaStream& stream) {
  const Grid grid = MakeGrid(p.n, p.launch, kBlock, 1);
  const auto n = static_cast<std::size_t>(p.n);
  auto* products = static_cast<DotAcc<T>*>(stream.Scratch(n * sizeof(DotAcc<T>)));
  DotElementwise<T><<<grid.blocks, grid.block_size, 0, stream.handle()>>>(
      static_cast<const T*>(p.a), static_cast<const T*>(p.b), p.n, products);
  CUDA_CHECK_LAUNCH(DotElementwise);
  // Not a vector, which would write zeros first.
  const auto piece = std::make_unique_for_overwrite<DotAcc<T>[]>(std::min(p.n, kPiece));
  WideOf<T> total = 0;
  for (std::int64_t at = 0; at < p.n; at += kPiece) {
    const std::int64_t count = std::min(kPiece, p.n - at);
    stream.CopyToHost(piece.get(), products + at, count * sizeof(DotAcc<T>));
    total = WrapAdd(total, ParallelSum(piece.get(), count, stream));
  }
  Finish(total, p.result);
}

// Additions that one product passes at most on the host.
std::int64_t HostDepth(const DotProblem& p) {
  return ParallelSumDepth(std::min(p.n, kPiece)) + CeilDiv(p.n, kPiece);
}

double Roundoff(const DotProblem& p) { return DotRoundoff(p.dtype, 1, HostDepth(p)); }

Cost CostOf(const DotProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.n);
  return {.bytes = OperandBytes(p) + n * AccBytes(p.dtype),
          .flops = 2 * n,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(1 + HostDepth(p))};
}

void Enqueue(const DotProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(stream)); });
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotElementwise = {
    .name = "elementwise",
    .summary = "the GPU multiplies into a vector, the host adds it up over all cores",
    .source =
        "multiplication on the GPU and OpenMP reduction of the notes on dot products in Metal",
    .backend = Backend::kCuda,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
