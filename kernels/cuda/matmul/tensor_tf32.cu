#include "kernels/cuda/matmul/tensor.cuh"

namespace tessera {
namespace {

using T = Tf32;
using Large = TensorTile<T, 128, 256, 2, 4>;
using Medium = TensorTile<T, 128, 128, 2, 6>;
using Small = TensorTile<T, 64, 128, 1, 8>;

// An operand with k along the rows. A copy is rounded to nearest; in place, the tensor cores cut.
TensorOperand<T> Prepared(const void* data, std::int64_t rows, std::int64_t k, std::int64_t pitch,
                          bool mn_major, CudaLane& lane) {
  const auto* elements = static_cast<const float*>(data);
  if (mn_major) return Transposed<T, 1>(elements, rows, k, pitch, lane);
  if (!IsBoxAligned(data, rows, pitch * static_cast<std::int64_t>(sizeof(T))))
    return Copied<T, 1>(elements, rows, k, pitch, false, lane);
  return {static_cast<const T*>(data), rows, k, pitch, false};
}

void Enqueue(const MatmulProblem& p, Lane& any_lane) {
  CudaLane& lane = Cuda(any_lane);
  if (TensorIsTrivial(p, lane)) return;
  const auto a = Prepared(p.a, p.m, p.k, p.lda, p.transpose_a, lane);
  const auto b = Prepared(p.b, p.n, p.k, p.ldb, !p.transpose_b, lane);
  const int multiprocessors = lane.device().info().multiprocessors;
  TensorPlan plan;
  plan = BetterPlan<Large>(plan, 0, 0.45, p, multiprocessors, true);
  plan = BetterPlan<Medium>(plan, 1, 0.4, p, multiprocessors, true);
  plan = BetterPlan<Small>(plan, 2, 0.3, p, multiprocessors, true);
  if (plan.tile == 0) {
    RunPlan<Large, false, false>(p, a, b, plan, nullptr, lane);
  } else if (plan.tile == 1) {
    RunPlan<Medium, false, false>(p, a, b, plan, nullptr, lane);
  } else {
    RunPlan<Small, false, false>(p, a, b, plan, nullptr, lane);
  }
}

// Cutting 13 bits off costs up to 2^-10 of an element, twice what rounding to nearest does.
double Roundoff(const MatmulProblem& p) {
  return Then(Then(0x1p-10, 0x1p-10), TensorSumRoundoff(p.k));
}

Cost CostOf(const MatmulProblem& p) { return TensorCost(p, 4, 1); }

std::string Refuses(const MatmulProblem& p) { return TensorRefusal(1, p); }

}  // namespace

extern const Strategy<MatmulProblem> kMatmulTensorTf32;
constexpr Strategy<MatmulProblem> kMatmulTensorTf32 = {
    .name = "tensor_tf32",
    .summary = "Hopper's tensor cores on f32 cut to 19 bits",
    .source =
        "the warp-specialised kernels of CUTLASS 3, and public work on reaching cuBLAS on the H100 "
        "(P. Shankhdhar, 2024)",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32),
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
