// Matmul on Hopper's tensor cores, with f16 operands and f32 sums.
//
// Compared with `tensor_bf16`, elements have three more bits of precision and three fewer exponent
// bits. The kernel (gemm.cuh), the instructions and their speed are the same. f32 operands are
// refused, because values above 65504 would overflow and values below 2^-14 would lose precision.
//
// Cost for 1024 x 1024 x 1024: 2^31 flops, 128 tiles of 64 x 128 and 48 MiB of loads. Cost for 4096
// x 4096 x 4096: 2^37 flops, 512 tiles of 128 x 256 and 1.5 GiB of loads, most of them from the L2.
//
// NaN and infinities follow IEEE arithmetic, and subnormal numbers are not flushed to zero. A
// result beyond the range of f16 is infinite.
//
// Lesson: kernels/lessons/hopper_product.cu
#include "kernels/cuda/matmul/hopper/tensor_16bit.cuh"

namespace tessera {

extern constexpr Strategy<MatmulProblem> kMatmulTensorF16 = Tensor16<Half>({
    .name = "tensor_f16",
    .summary = "Hopper's tensor cores on f16",
    .dtypes = DTypesOf(DType::kF16),
    .roundoff = TensorRoundoff,
});

}  // namespace tessera
