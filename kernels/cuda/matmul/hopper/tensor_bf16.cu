// Matmul on Hopper's tensor cores, with operands in bf16 and sums in f32.
//
// Compared with `warp_tiled`, other units do the arithmetic. They multiply 64 x 256 x 16 elements
// per instruction, and the rest of the kernel exists to feed them; gemm.cuh explains how. bf16 has
// the exponent range of f32 and 8 bits of precision. Its products are exact in f32; sums are
// rounded to the result's type once, at the end.
//
// f32 operands are accepted as well if a request names this strategy. A copy rounds them to bf16
// first, with an error of up to 2^-8 for each operand. The copies run at memory speed and take 54
// of 233 us at 4096, and 0.22 of 1.54 ms at 8192. Callers that keep their operands in bf16 avoid
// them.
//
// Tiles are 128 x 256, in pairs when there are many and k is long, or 128 x 192 when those keep
// more SMs busy. When there are few, they are 128 x 128 or 64 x 128, in pairs or not, or k is cut
// into pieces. Cost for 4096 x 4096 x 4096: 2^37 flops, 512 tiles (not quite four for each of 132
// SMs), 1.5 GiB of loads, nearly all from the L2 (1 GiB with clusters), and 64 k-tiles along k. An
// H200 takes 177 us, which is 775 TFLOP/s; its power is the limit, not its units. The same is true
// of cuBLAS and of the best of cublasLt's proposals, which also take 177 us in the same run. For
// 1024 x 1024 x 1024: 128 tiles of 64 x 128, 48 MiB of loads.
//
// Correct for any m, n and k, and for all transposes, pitches and alignments: see gemm.cuh. NaN and
// infinities follow IEEE arithmetic, and subnormal numbers are not flushed to zero.
#include "kernels/cuda/matmul/hopper/tensor_16bit.cuh"

namespace tessera {
namespace {

void Enqueue(const MatmulProblem& p, Stream& stream) { MatmulTensor16<BFloat16>(p, stream); }

double Roundoff(const MatmulProblem& p) {
  const double u = p.dtype == DType::kF32 ? UnitRoundoff(DType::kBF16) : 0;
  return Then(Then(u, u), TensorSumRoundoff(p.k));
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulTensorBf16 = {
    .name = "tensor_bf16",
    .summary =
        "Hopper's tensor cores on bf16; f32 operands are rounded to bf16, and to infinity "
        "from 3.396e38 on",
    .source =
        "the warp-specialised kernels of CUTLASS 3, and public work on reaching cuBLAS on the H100 "
        "(P. Shankhdhar, 2024)",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kBF16),
    .min_compute_capability = 90,
    .deterministic = true,
    .roundoff = Roundoff,
    .cost = TensorCost16,
    .launch = Enqueue,
    .launch_shared = LaunchProductShares<TensorWork16<BFloat16>>,
    .missing = TensorMissing,
    .refuses = TensorRefusal,
    .scratch = TensorScratch16,
};

}  // namespace tessera
