// Matmul on the tensor cores of Hopper, operands in bf16, sums in f32.
//
// Against `warp_tiled`: the arithmetic is done by other units, which multiply 64 x 256 x 16
// elements per instruction, and all of the kernel is about feeding those. gemm.cuh tells how.
// bf16 has the exponents of f32 and 8 bits of precision. Its products are exact in f32; sums are
// rounded to the result's type once, at the end.
//
// f32 operands are taken as well, where a request names this strategy: a copy rounds them to bf16
// first, twice 2^-8 of error. The copies are made at the speed of memory, and take 54 of 233 us at
// 4096, 0.22 of 1.54 ms at 8192. Callers who keep their operands in bf16 save them.
//
// Tiles of 128 x 256, in pairs when there are many and k is long; of 128 x 192 when those keep more
// SMs busy; of 128 x 128 or 64 x 128, in pairs or not, when there are few, or with k cut into
// pieces. Cost for 4096 x 4096 x 4096: 2^37 flops; 512 tiles, not quite four for each of 132 SMs,
// 1.5 GiB of loads, nearly all from the L2 (1 GiB with clusters), 64 k-tiles of k. An H200 takes
// 177 us, 775 TFLOP/s: its power, not its units, sets the pace, as it does for cuBLAS (177 us, and
// so with the best of cublasLt's proposals, in the same run). For 1024 x 1024 x 1024: 128 tiles of
// 64 x 128, 48 MiB of loads.
//
// Right for any m, n and k, all transposes, pitches and alignments: see gemm.cuh. NaN and
// infinities are those of IEEE arithmetic, subnormal numbers count.
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
        "Hopper's tensor cores on bf16; f32 operands are rounded to it, from 3.396e38 on to "
        "infinity",
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
