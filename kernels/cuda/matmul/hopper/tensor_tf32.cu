// Matmul on Hopper's tensor cores, with f32 sums and f32 operands, of which 19 bits are used.
//
// Unlike in `tensor_bf16`, operands are not converted. The tensor cores read the sign, 8 exponent
// bits and 10 fraction bits of each element. They cut off the rest, always towards zero. This rest
// is up to 2^-10 of the element. So sums of terms with the same sign are too small in magnitude, by
// 7e-4 for uniformly distributed numbers. The speed is half that of bf16, since a k-tile of the
// same number of bytes is half as deep. f32 operands are multiplied this way only if a request
// names the strategy.
//
// For f32 operands in shared memory, wgmma requires k to be along the rows. A b that is not
// transposed, as in the plain product, has k across its rows. So the plain product is computed as
// its transpose, c' = b' a'. The first operand of wgmma may also come from registers, so a thread
// loads its elements of b from shared memory in either layout and rounds them to nearest on the way
// (MultiplyTurned in mainloop.cuh). Results are transposed back as they pass through shared memory.
// A transposed a is first copied, which also rounds it to nearest. On an otherwise idle H200, the
// kernel reaches 1.02 times the speed of cuBLAS in the same run at side 4096, and 1.01 times at
// 8192. With b transposed, the factors are 1.01 and 1.00. A variant that makes a transposed copy of
// b reaches only 0.93 and 0.97, because the copy alone takes 35 of 402 us.
//
// Cost for 1024 x 1024 x 1024: 2^31 flops and 96 MiB of loads in the tiles of 64 x 128 that are
// chosen (48 MiB in tiles of 128 x 256). Cost for 4096 x 4096 x 4096: 2^37 flops and 3 GiB of
// loads, most of them from the L2.
//
// NaN and infinities follow IEEE arithmetic, with one exception: a NaN counts as an infinity if all
// of its set fraction bits are among the 13 that are cut off. No arithmetic produces such a NaN.
//
// Lesson: kernels/lessons/hopper_product.cu
#include "kernels/cuda/matmul/hopper/strategy.cuh"

namespace tessera {
namespace {

using T = Tf32;

// A copy is rounded to nearest; elements that are read in place are truncated by the tensor cores.
TensorOperand<T> Prepared(const StoredMatrix& x, CudaStream& stream) {
  return x.IsReadable(sizeof(T)) ? x.InPlace<T>() : Copied<T, float>(x, stream);
}

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  const auto a =
      p.transpose_a ? Transposed<T, float>(StoredA(p), stream) : Prepared(StoredA(p), stream);
  const auto b = Prepared(StoredB(p), stream);
  // If b has k across its rows, the product is computed as c' = b' a'.
  const TensorProduct product =
      b.mn_major ? ProductOf(p.n, p.m, p.k, b, a, stream) : ProductOf(p.m, p.n, p.k, a, b, stream);
  const auto run = [&](auto tile, const TensorPlan& plan) {
    using C = decltype(tile);
    if (b.mn_major) {
      RunPlan<C, true, false>(p, b, a, plan, nullptr, stream, p.n);
    } else {
      RunPlan<C, false, false>(p, a, b, plan, nullptr, stream, p.n);
    }
  };
  RunBestPlan(product, tuning::kTilesTf32, run);
}

// Cutting off 13 bits costs up to 2^-10 of an element, twice as much as rounding to nearest.
double Roundoff(const MatmulProblem& p) { return Then(Then(0x1p-10, 0x1p-10), TensorRoundoff(p)); }

Cost CostOf(const MatmulProblem& p) {
  return TensorCost(p, 256, sizeof(T), 1, p.transpose_a || !StoredA(p).IsReadable(sizeof(T)),
                    !StoredB(p).IsReadable(sizeof(T)));
}

std::uint64_t ScratchOf(const MatmulProblem& p) {
  const auto copy = [](const StoredMatrix& x) {
    return x.IsReadable(sizeof(T)) ? 0 : CopyScratch<T>(x);
  };
  return SumsScratch(p) + (p.transpose_a ? CopyScratch<T>(p.m, p.k) : copy(StoredA(p))) +
         copy(StoredB(p));
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulTensorTf32 = HopperMatmul({
    .name = "tensor_tf32",
    .summary = "Hopper's tensor cores on f32 cut to 19 bits",
    .source = kTensorSource,
    .dtypes = DTypesOf(DType::kF32),
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .scratch = ScratchOf,
});

}  // namespace tessera
