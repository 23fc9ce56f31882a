#include "kernels/cuda/matmul/tensor.cuh"

namespace tessera {
namespace {

constexpr int kParts = 3;
using T = BFloat16;
using Tile = TensorTile<T, 128, 128, 1, 4, 2, kParts, 0>;

// Elements of c that are no numbers, computed again in plain f32: a split infinity gives NaN, and
// so does an overflow whose small parts overflow to the other side.
__global__ void __launch_bounds__(256)
    RepairNonfinite(Operand<float> a, Operand<float> b, std::int64_t k, float* c,
                    const unsigned* nonfinite) {
  AllowNextKernel();
  WaitForKernelBefore();
  if (*nonfinite == 0) return;
  const std::int64_t count = a.extent * b.extent;
  for (std::int64_t i = GridThread(); i < count; i += GridThreads()) {
    if (fabsf(c[i]) <= std::numeric_limits<float>::max()) continue;
    const float* x = a.data + i / b.extent * a.stride;
    const float* y = b.data + i % b.extent * b.stride;
    float sum = 0;
    for (std::int64_t l = 0; l < k; ++l) sum = fmaf(x[l * a.k_stride], y[l * b.k_stride], sum);
    c[i] = sum;
  }
}

TensorOperand<T> Split(const void* data, std::int64_t rows, std::int64_t k, std::int64_t pitch,
                       bool mn_major, unsigned* cleared, CudaLane& lane) {
  const auto* elements = static_cast<const float*>(data);
  return mn_major ? Transposed<T, kParts>(elements, rows, k, pitch, lane, cleared)
                  : Copied<T, kParts>(elements, rows, k, pitch, false, lane, cleared);
}

void Enqueue(const MatmulProblem& p, Lane& any_lane) {
  CudaLane& lane = Cuda(any_lane);
  if (TensorIsTrivial(p, lane)) return;
  auto* nonfinite = static_cast<unsigned*>(lane.Scratch(sizeof(unsigned)));
  const auto a = Split(p.a, p.m, p.k, p.lda, p.transpose_a, nonfinite, lane);
  const auto b = Split(p.b, p.n, p.k, p.ldb, !p.transpose_b, nullptr, lane);
  const int multiprocessors = lane.device().info().multiprocessors;
  const TensorPlan plan = BetterPlan<Tile>({}, 0, 0.8, p, multiprocessors, true);
  RunPlan<Tile, false, false>(p, a, b, plan, nonfinite, lane);
  LaunchOverlapping(RepairNonfinite, static_cast<unsigned>(4 * multiprocessors), 256, 0, lane,
                    OperandA<float>(p), OperandB<float>(p), p.k, static_cast<float*>(p.c),
                    static_cast<const unsigned*>(nonfinite));
}

// TODO
double Roundoff(const MatmulProblem& p) { return 0x1p-24 * (static_cast<double>(p.k) + 16); }

Cost CostOf(const MatmulProblem& p) { return TensorCost(p, 4, kParts); }

std::string Refuses(const MatmulProblem& p) { return TensorRefusal(kParts, p); }

}  // namespace

extern const Strategy<MatmulProblem> kMatmulTensorF32x3;
constexpr Strategy<MatmulProblem> kMatmulTensorF32x3 = {
    .name = "tensor_f32x3",
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
