// Matmul as it is defined: one thread per element of c, with a loop over k.
//
// Consecutive threads compute consecutive columns. So the loads of b (unless it is transposed) and
// the stores of c coalesce, and all threads of a row load the same element of a. Still, every
// multiply-add takes two loads. Each element of a is loaded n times and each element of b m times,
// from a cache if one still holds it. So loads are the bottleneck, not arithmetic.
//
// Cost for 1024 x 1024 x 1024, f32: 2^31 flops; 2^31 loads (8 GiB) for operands of 8 MiB; no
// barriers; a chain of 1024 multiply-adds.
//
// Any block size works, since threads do not synchronize. Threads of a grid of the maximum size
// continue with further elements.
//
// Lesson: kernels/lessons/product_1_naive.cu
#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/team/shares.h"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

template <class A, class B, class O>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    MatmulNaive(Operand<A> a, Operand<B> b, std::int64_t k, O* c) {
  using Value = ValueOf<A>;
  for (std::int64_t e = GridThread(); e < a.extent * b.extent; e += GridThreads()) {
    const std::int64_t row = e / b.extent * a.stride;
    const std::int64_t column = e % b.extent * b.stride;
    MatmulAcc<A, O> sum = 0;
    for (std::int64_t l = 0; l < k; ++l) {
      sum = MultiplyAdd(static_cast<Value>(a.data[row + l * a.k_stride]),
                        static_cast<Value>(b.data[column + l * b.k_stride]), sum);
    }
    c[e] = static_cast<O>(sum);
  }
}

Cost CostOf(const MatmulProblem& p) { return MatmulCost(p, MatmulTileLoads(p, 1, 1)); }

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  const Grid grid = MakeGrid(p.m * p.n, p.launch, kBlock, 1);
  DispatchMixedMatmul(p, [&](auto a, auto b, auto o) {
    MatmulNaive<<<grid.blocks, grid.block_size, 0, stream.handle()>>>(
        OperandA<decltype(a)>(p), OperandB<decltype(b)>(p), p.k, static_cast<decltype(o)*>(p.c));
    CUDA_CHECK_LAUNCH(MatmulNaive);
  });
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulNaive = CudaMatmul({
    .name = "naive",
    .summary = "the definition: one thread per element, operands from device memory",
    .source = "the definition, with the thread hierarchy from the notes on hardware acceleration",
    .dtypes = kMatmulDTypes,
    .limits = {.block_size = kAnyBlockSize},
    .cost = CostOf,
    .launch = Enqueue,
    .shared = {.launch = LaunchGathered<kMatmulNaive>},
    .mixed = true,
});
template void LaunchGathered<kMatmulNaive>(const MatmulProblem&, std::span<const TeamShare>,
                                           Stream&);

}  // namespace tessera
