// Matmul on the tensor cores of Hopper, operands in f32 of which 19 bits count, sums in f32.
//
// Against `tensor_bf16`: operands stay what they are, and the tensor cores read of each the sign,
// 8 bits of exponent and 10 of the fraction. The rest is cut off: up to 2^-10 of an element, and
// always towards zero, so that sums of one sign come out too small, by 7e-4 for uniform numbers.
// Half the speed of bf16, since a slab of the same bytes is half as deep. Never the choice for f32
// operands unless it is asked for by name.
//
// wgmma wants k along the rows of both f32 operands. An a that is transposed and a b that is not,
// as in the plain product, go through a transposed copy first, and are rounded to nearest on the
// way; the kernel starts up while that runs. Against cuBLAS on an H200, in the same run: with b
// transposed, no copy, 1.03, 1.00 and 1.00 times its speed at 2048, 4096 and 8192; with b as it is,
// and the copy, 0.86, 0.93 and 0.97.
//
// Cost for 1024 x 1024 x 1024: 2^31 flops, 48 MiB of loads in tiles of 128 x 256, 96 in those of 64
// x 128 that are taken, and 8 MiB for the copy of b; for 4096 x 4096 x 4096, 2^37 flops, 3 GiB of
// loads, most from the second level of cache, and 128 MiB.
//
// Right for any m, n and k, all transposes, pitches and alignments: see tensor.cuh. NaN and
// infinities are those of IEEE arithmetic, except that a NaN whose fraction has bits set only among
// the 13 that are cut off counts as an infinity; no arithmetic produces such.
#include "kernels/cuda/matmul/tensor.cuh"

namespace tessera {
namespace {

using T = Tf32;
using Shared = TensorTile<T, 128, 256, 2, 4>;
using Large = TensorTile<T, 128, 256, 1, 4>;
using Medium = TensorTile<T, 128, 128, 1, 6>;
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
  plan = BetterPlan<Shared>(plan, 0, 0.4, 1.2e7, p, multiprocessors, false);
  plan = BetterPlan<Large>(plan, 1, 0.39, 1e7, p, multiprocessors, true);
  plan = BetterPlan<Medium>(plan, 2, 0.38, 1e7, p, multiprocessors, true);
  plan = BetterPlan<Small>(plan, 3, 0.3, 1e7, p, multiprocessors, true);
  if (plan.tile == 0) {
    RunPlan<Shared, false, false>(p, a, b, plan, nullptr, lane);
  } else if (plan.tile == 1) {
    RunPlan<Large, false, false>(p, a, b, plan, nullptr, lane);
  } else if (plan.tile == 2) {
    RunPlan<Medium, false, false>(p, a, b, plan, nullptr, lane);
  } else {
    RunPlan<Small, false, false>(p, a, b, plan, nullptr, lane);
  }
}

// Cutting 13 bits off costs up to 2^-10 of an element, twice what rounding to nearest does.
double Roundoff(const MatmulProblem& p) {
  return Then(Then(0x1p-10, 0x1p-10), TensorSumRoundoff(p.k));
}

Cost CostOf(const MatmulProblem& p) {
  return TensorCost(p, 256, 4, 1, p.transpose_a || !IsBoxAligned(p.a, p.m, p.lda * 4),
                    !p.transpose_b || !IsBoxAligned(p.b, p.n, p.ldb * 4));
}

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
