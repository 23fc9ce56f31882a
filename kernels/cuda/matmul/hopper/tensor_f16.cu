// Matmul on the tensor cores of Hopper, operands in f16, sums in f32.
//
// Against `tensor_bf16`: three more bits of precision, three of exponent fewer, and otherwise the
// same instructions at the same speed, from the same kernel (gemm.cuh). f32 operands are not
// taken: what is above 65504 or below 2^-14 would be lost, however exact the rest.
//
// Cost for 1024 x 1024 x 1024: 2^31 flops, 128 tiles of 64 x 128, 48 MiB of loads; for 4096 x 4096
// x 4096, 2^37 flops, 512 tiles of 128 x 256 and 1.5 GiB of loads, most from the L2.
//
// Right for any m, n and k, all transposes, pitches and alignments: see gemm.cuh. NaN and
// infinities are those of IEEE arithmetic, subnormal numbers count; a result beyond f16 is
// infinite.
#include "kernels/cuda/matmul/hopper/tensor_16bit.cuh"

namespace tessera {
namespace {

void Enqueue(const MatmulProblem& p, Stream& stream) { MatmulTensor16<Half>(p, stream); }

double Roundoff(const MatmulProblem& p) { return TensorSumRoundoff(p.k); }

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulTensorF16 = {
    .name = "tensor_f16",
    .summary = "Hopper's tensor cores on f16",
    .source =
        "the warp-specialised kernels of CUTLASS 3, and public work on reaching cuBLAS on the H100 "
        "(P. Shankhdhar, 2024)",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF16),
    .min_compute_capability = 90,
    .deterministic = true,
    .roundoff = Roundoff,
    .cost = TensorCost16,
    .launch = Enqueue,
    .launch_shared = LaunchProductShares<TensorWork16<Half>>,
    .missing = TensorMissing,
    .refuses = TensorRefusal,
    .scratch = TensorScratch16,
};

}  // namespace tessera
