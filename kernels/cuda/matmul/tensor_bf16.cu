#include "kernels/cuda/matmul/tensor.cuh"

namespace tessera {
namespace {

void Enqueue(const MatmulProblem& p, Lane& lane) { MatmulTensor16<BFloat16>(p, lane); }

double Roundoff(const MatmulProblem& p) {
  return Then(
      p.dtype == DType::kF32 ? Then(UnitRoundoff(DType::kBF16), UnitRoundoff(DType::kBF16)) : 0,
      TensorSumRoundoff(p.k));
}

Cost CostOf(const MatmulProblem& p) { return TensorCost(p, 2, 1); }

std::string Refuses(const MatmulProblem& p) { return TensorRefusal(1, p); }

}  // namespace

extern const Strategy<MatmulProblem> kMatmulTensorBf16;
constexpr Strategy<MatmulProblem> kMatmulTensorBf16 = {
    .name = "tensor_bf16",
    .summary = "Hopper's tensor cores on bf16; f32 operands are rounded to it",
    .source =
        "the warp-specialised kernels of CUTLASS 3, and public work on reaching cuBLAS on the H100 "
        "(P. Shankhdhar, 2024)",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kBF16),
    .min_compute_capability = 90,
    .deterministic = true,
    .limits = {.block_size = {}, .grid_size = {}, .items_per_thread = {}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = TensorMissing,
    .refuses = Refuses,
};

}  // namespace tessera
