// Matmul by the definition: one thread an element of c, a loop over k.
//
// Neighbouring threads have neighbouring columns: the loads of b and the stores of c coalesce
// (unless b is transposed), and the load of a is the same for a whole row. Still every multiply-add
// takes two loads, and each element of a is loaded n times, each of b m times, from whatever cache
// still has it: loads, not arithmetic, set the pace.
//
// Cost for 1024 x 1024 x 1024, f32: 2^31 flops and 2^31 loads, 8 GiB, for operands of 8 MiB; no
// barriers; a chain of 1024.
//
// Right for any m, n and k: threads beyond the last element end at once, and k = 0 stores zeros.
// For any pitch, transpose and alignment: an operand is a base and two strides, and loads are
// scalar. Each element is one chain of k fused multiply-adds in the operands' type.
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

constexpr std::uint32_t kBlock = 256;

template <class T>
__global__ void __launch_bounds__(kAnyBlockSize.max)
    MatmulNaive(const T* a, std::int64_t a_row, std::int64_t a_column, const T* b,
                std::int64_t b_row, std::int64_t b_column, std::int64_t m, std::int64_t n,
                std::int64_t k, T* c) {
  const std::int64_t element = GridThread();
  if (element >= m * n) return;
  a += element / n * a_row;
  b += element % n * b_column;
  T sum = 0;
  for (std::int64_t i = 0; i < k; ++i) sum = fma(a[i * a_column], b[i * b_row], sum);
  c[element] = sum;
}

template <class T>
void Run(const MatmulProblem& p, CudaLane& lane) {
  if (p.m == 0 || p.n == 0) return;
  const std::uint32_t block = p.launch.block_size != 0 ? p.launch.block_size : kBlock;
  const auto blocks = static_cast<unsigned>(CeilDiv(p.m * p.n, block));
  const std::int64_t a_row = p.transpose_a ? 1 : p.lda, a_column = p.transpose_a ? p.lda : 1;
  const std::int64_t b_row = p.transpose_b ? 1 : p.ldb, b_column = p.transpose_b ? p.ldb : 1;
  MatmulNaive<T><<<blocks, block, 0, lane.stream()>>>(static_cast<const T*>(p.a), a_row, a_column,
                                                      static_cast<const T*>(p.b), b_row, b_column,
                                                      p.m, p.n, p.k, static_cast<T*>(p.c));
  CUDA_CHECK_LAUNCH(MatmulNaive);
}

double Roundoff(const MatmulProblem& p) { return static_cast<double>(p.k) * UnitRoundoff(p.dtype); }

Cost CostOf(const MatmulProblem& p) {
  const auto m = static_cast<std::uint64_t>(p.m), n = static_cast<std::uint64_t>(p.n);
  const auto k = static_cast<std::uint64_t>(p.k);
  return {.bytes = (2 * m * n * k + m * n) * SizeOf(p.dtype),
          .flops = 2 * m * n * k,
          .atomics = 0,
          .depth = k};
}

void Enqueue(const MatmulProblem& p, Lane& lane) {
  DispatchReal(p.dtype, [&](auto zero) { Run<decltype(zero)>(p, Cuda(lane)); });
}

}  // namespace

extern const Strategy<MatmulProblem> kMatmulNaive;
constexpr Strategy<MatmulProblem> kMatmulNaive = {
    .name = "naive",
    .summary = "one thread an element, operands from device memory: the definition",
    .source = "definition, on the thread hierarchy of the notes on hardware acceleration",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .min_compute_capability = kBaseComputeCapability,
    .deterministic = true,
    .limits = {.block_size = kAnyBlockSize, .grid_size = {}, .items_per_thread = {}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = nullptr,
};

}  // namespace tessera
