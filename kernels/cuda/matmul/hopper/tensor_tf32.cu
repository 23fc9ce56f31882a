// Matmul on the tensor cores of Hopper, operands in f32 of which 19 bits count, sums in f32.
//
// Against `tensor_bf16`: operands stay what they are, and the tensor cores read of each the sign, 8
// bits of exponent and 10 of the fraction. The rest is cut off: up to 2^-10 of an element, and
// always towards zero, so that sums of one sign come out too small, by 7e-4 for uniform numbers.
// Half the speed of bf16, since a k-tile of the same bytes is half as deep. Never the choice for
// f32 operands unless it is asked for by name.
//
// wgmma wants k along the rows of f32 operands in shared memory. A b that is not transposed, as in
// the plain product, has it across. So the plain product is computed as its transpose, c' = b' a':
// the first operand of wgmma may also come from registers, and a thread can load what it needs of b
// from shared memory either way around, rounded to nearest on the way (MultiplyTurned in
// gemm.cuh). Results are turned back as they pass through shared memory. A transposed a goes
// through a copy, also rounded to nearest. Against cuBLAS on an idle H200, in the same run:
// 1.02 and 1.01 times its speed at 4096 and 8192, with b transposed 1.01 and 1.00. A transposed
// copy of b instead gives 0.93 and 0.97: the copy alone takes 35 of 402 us.
//
// Cost for 1024 x 1024 x 1024: 2^31 flops, 48 MiB of loads in tiles of 128 x 256, 96 in those of 64
// x 128 that are taken; for 4096 x 4096 x 4096, 2^37 flops, 3 GiB of loads, most from the L2.
//
// Right for any m, n and k, all transposes, pitches and alignments: see gemm.cuh. NaN and
// infinities are those of IEEE arithmetic, except that a NaN whose fraction has bits set only among
// the 13 that are cut off counts as an infinity; no arithmetic produces such.
#include "kernels/cuda/matmul/hopper/strategy.cuh"

namespace tessera {
namespace {

using T = Tf32;

// A copy is rounded to nearest; in place, the tensor cores cut.
TensorOperand<T> Prepared(const void* data, std::int64_t rows, std::int64_t columns,
                          std::int64_t pitch, bool mn_major, CudaStream& stream) {
  const auto* elements = static_cast<const float*>(data);
  if (!IsBoxAligned(data, rows, pitch * static_cast<std::int64_t>(sizeof(T))))
    return Copied<T>(elements, rows, columns, pitch, mn_major, stream);
  return {static_cast<const T*>(data), rows, columns, pitch, mn_major};
}

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  const auto a = p.transpose_a
                     ? Transposed<T>(static_cast<const float*>(p.a), p.m, p.k, p.lda, stream)
                     : Prepared(p.a, p.m, p.k, p.lda, false, stream);
  const auto b = p.transpose_b ? Prepared(p.b, p.n, p.k, p.ldb, false, stream)
                               : Prepared(p.b, p.k, p.n, p.ldb, true, stream);
  // c' = b' a' where b has k across the rows.
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

// Cutting 13 bits off costs up to 2^-10 of an element, twice what rounding to nearest does.
double Roundoff(const MatmulProblem& p) {
  return Then(Then(0x1p-10, 0x1p-10), TensorSumRoundoff(p.k));
}

Cost CostOf(const MatmulProblem& p) {
  return TensorCost(p, 256, 4, 1, p.transpose_a || !IsBoxAligned(p.a, p.m, p.lda * 4),
                    !IsBoxAligned(p.b, p.transpose_b ? p.n : p.k, p.ldb * 4));
}

std::uint64_t ScratchOf(const MatmulProblem& p) {
  const auto copy = [](const void* data, std::int64_t rows, std::int64_t columns,
                       std::int64_t pitch) {
    return IsBoxAligned(data, rows, pitch * 4) ? 0 : CopyScratch<T>(rows, columns);
  };
  return SumsScratch(p) + (p.transpose_a ? CopyScratch<T>(p.m, p.k) : copy(p.a, p.m, p.k, p.lda)) +
         (p.transpose_b ? copy(p.b, p.n, p.k, p.ldb) : copy(p.b, p.k, p.n, p.ldb));
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulTensorTf32 = {
    .name = "tensor_tf32",
    .summary = "Hopper's tensor cores on f32 cut to 19 bits",
    .source =
        "the warp-specialised kernels of CUTLASS 3, and public work on reaching cuBLAS on the H100 "
        "(P. Shankhdhar, 2024)",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32),
    .min_compute_capability = 90,
    .deterministic = true,
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = TensorMissing,
    .refuses = TensorRefusal,
    .scratch = ScratchOf,
};

}  // namespace tessera
