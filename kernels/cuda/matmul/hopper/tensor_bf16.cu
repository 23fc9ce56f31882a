// Matmul on Hopper's tensor cores, with bf16 operands and f32 sums.
//
// Unlike in `warp_tiled`, the tensor cores do the arithmetic. One instruction multiplies 64 x 16 by
// 16 x 256 elements, and the rest of the kernel exists to feed the tensor cores; gemm.cuh explains
// how. bf16 has the exponent range of f32 and 8 bits of precision. Products of bf16 elements are
// exact in f32, and sums are rounded to the result's type once, at the end.
//
// f32 operands are accepted as well if a request names this strategy. A copy rounds them to bf16
// first, with a relative error of up to 2^-8 in each operand. Finite elements stay finite. The
// copies run at memory speed and take 54 of 233 us at side 4096, and 0.22 of 1.54 ms at side 8192.
// Callers that keep their operands in bf16 avoid these copies.
//
// Cost for 4096 x 4096 x 4096: 2^37 flops, 512 tiles (not quite four for each of 132 SMs), 1.5 GiB
// of loads, nearly all from the L2 (1 GiB with clusters), and 64 k-tiles along k. An H200 takes 177
// us, which is 775 TFLOP/s. The limit is the GPU's power, not its arithmetic units. The same holds
// for cuBLAS and for the best algorithm that cublasLt proposes, which also take 177 us in the same
// run. Cost for 1024 x 1024 x 1024: 128 tiles of 64 x 128 and 48 MiB of loads.
//
// NaN and infinities follow IEEE arithmetic, and subnormal numbers are not flushed to zero.
//
// Lesson: kernels/lessons/hopper_product.cu
#include "kernels/cuda/matmul/hopper/tensor_16bit.cuh"

namespace tessera {
namespace {

double Roundoff(const MatmulProblem& p) {
  const double u = p.dtype == DType::kF32 ? UnitRoundoff(DType::kBF16) : 0;
  return Then(Then(u, u), TensorRoundoff(p));
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulTensorBf16 = Tensor16<BFloat16>({
    .name = "tensor_bf16",
    .summary = "Hopper's tensor cores on bf16; f32 operands are rounded to bf16",
    .dtypes = DTypesOf(DType::kF32, DType::kBF16),
    .roundoff = Roundoff,
});

}  // namespace tessera
