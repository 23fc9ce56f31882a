#include "kernels/cuda/matmul/tensor.cuh"

namespace tessera {
namespace {

void Enqueue(const MatmulProblem& p, Lane& lane) { MatmulTensor16<Half>(p, lane); }

double Roundoff(const MatmulProblem& p) { return TensorSumRoundoff(p.k); }

Cost CostOf(const MatmulProblem& p) { return TensorCost(p, 2, 1); }

std::string Refuses(const MatmulProblem& p) { return TensorRefusal(1, p); }

}  // namespace

extern const Strategy<MatmulProblem> kMatmulTensorF16;
constexpr Strategy<MatmulProblem> kMatmulTensorF16 = {
    .name = "tensor_f16",
    .summary = "Hopper's tensor cores on f16",
    .source =
        "the warp-specialised kernels of CUTLASS 3, and public work on reaching cuBLAS on the H100 "
        "(P. Shankhdhar, 2024)",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF16),
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
