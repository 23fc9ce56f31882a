// Matmul of f32 on the tensor cores of Hopper, no less exact than plain f32.
//
// Against `tensor_bf16`: an f32 has 24 bits of precision, a bf16 has 8 and the same exponents. So
// each operand is split into three of bf16 whose sum is the f32, exactly, in a copy made first:
//
//      x = x0 + x1 + x2,   x0 = bf16(x),   x1 = bf16(x - x0),   x2 = x - x0 - x1
//
// and of the nine products of parts the six that matter are summed up (the source below). Those
// left out are below 2^-23 of a term. Six products are six times the arithmetic of bf16, but parts
// that are once in shared memory are used up to three times, so that it is done at full speed; and
// a sixth of bf16's is still more than twice what the f32 units do.
//
//              b0    b1    b2
//        a0    d     low   low     d: begins at zero in every slab of 32 along k, and is added to
//        a1    low   low   -          the sums in f32
//        a2    low   -     -       low: 2^-8 of the rest or less; stays in the tensor cores
//
// The tensor cores do not round their f32 sums, they cut them off, and that would add up. Hence the
// two kinds of sums (MultiplyParts in tensor.cuh): a slab's, short, goes into a sum in registers,
// with compensation; the small ones may be long, since what is cut off them is small as well.
// Measured on an H200: largest error over 24 rows of 1024 columns, relative to the sum of |terms|,
// for k = 64, 1024 and 8192:
//
//                               this row                     cuBLAS sgemm
//        normal                 8.0e-8   1.4e-8   8.8e-9     2.5e-7   2.4e-7   7.8e-8
//        uniform, positive      1.6e-7   1.1e-7   9.9e-8     4.9e-7   1.7e-6   1.2e-6
//        1e-20 to 1e20          2.3e-7   2.1e-7   1.5e-7     2.9e-7   5.2e-7   4.7e-7
//        cancelling in pairs    5.5e-9   1.0e-9   6.9e-10    1.4e-8   3.8e-9   1.4e-9
//
// An infinity cannot be split (inf - inf is NaN), nor can f32 above the largest bf16, and the parts
// of a term that overflows may overflow to both sides. Whatever makes an element of c no number
// raises a flag, and a last kernel, which otherwise ends at once, computes those elements again in
// plain f32: right, but at the speed of `naive`.
//
// Elements below 2^-109 lose their last parts to underflow: an error of up to 2^-134 times the
// other factor, beyond the bound. Subnormal results are as in plain f32.
//
// Cost for 1024 x 1024 x 1024: 2^31 flops, done as 6 2^31; 96 MiB of loads of 128 x 128 tiles, and
// 20 MiB for the copies; scratch memory of 12 MiB, one and a half times the operands.
//
// Right for any m, n and k, all transposes, pitches and alignments: the copies have the layout that
// the kernel wants, whatever the operands' is.
#include "kernels/cuda/matmul/tensor.cuh"

namespace tessera {
namespace {

constexpr int kParts = 3;
using T = BFloat16;
using Tile = TensorTile<T, 128, 128, 1, 4, 2, kParts>;

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
  const TensorPlan plan = BetterPlan<Tile>({}, 0, 0.7, 1e7, p, multiprocessors, true);
  RunPlan<Tile, false, false>(p, a, b, plan, nonfinite, lane);
  LaunchOverlapping(RepairNonfinite, static_cast<unsigned>(4 * multiprocessors), 256, 0, lane,
                    OperandA<float>(p), OperandB<float>(p), p.k, static_cast<float*>(p.c),
                    static_cast<const unsigned*>(nonfinite));
}

// In units of 2^-24, relative to the sum of |terms|: 2 for the products left out (2^-8 2^-16 of a
// term, twice, and less); 3 (32 + 16) for what the tensor cores cut off in a slab of 32 terms; of
// the five small products, together at most 2^-7 of the terms, 3 (5 k + 16) 2^-7; 2 for the
// additions of slabs, which lose at most their last bit where a slab outweighs all before it, and
// the errors kept in `low`; 1 for the last addition, and as much for each of at most k / 128 pieces
// that k may be cut into.
double Roundoff(const MatmulProblem& p) {
  return (160 + 0.14 * static_cast<double>(p.k)) * kRoundoffF32;
}

Cost CostOf(const MatmulProblem& p) { return TensorCost(p, 128, sizeof(T), kParts, true, true); }

std::string Refuses(const MatmulProblem& p) { return TensorRefusal(kParts, p); }

}  // namespace

extern const Strategy<MatmulProblem> kMatmulTensorF32x3;
constexpr Strategy<MatmulProblem> kMatmulTensorF32x3 = {
    .name = "tensor_f32x3",
    .summary = "Hopper's tensor cores on f32 in three parts, as exact as f32",
    .source =
        "G. Henry, P. T. P. Tang and A. Heinecke, Leveraging the bfloat16 artificial "
        "intelligence datatype for higher-precision computations, 2019",
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
