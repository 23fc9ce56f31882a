// Matmul, the definition: three loops, one double accumulator an element. Element (i, l) of op(a)
// is a[i * row + l * column], so one loop serves all four combinations of transposes.
//
// Cost at M = N = K = 1024 (f32): 2^31 flops, and 2^30 loads of each operand, since nothing is kept
// between elements.
#include <algorithm>

#include "kernels/strategy.h"

namespace tessera {
namespace {

template <class T>
void Run(const MatmulProblem& p) {
  const auto* a = static_cast<const T*>(p.a);
  const auto* b = static_cast<const T*>(p.b);
  auto* c = static_cast<T*>(p.c);
  const std::int64_t a_row = p.transpose_a ? 1 : p.lda;
  const std::int64_t a_column = p.transpose_a ? p.lda : 1;
  const std::int64_t b_row = p.transpose_b ? 1 : p.ldb;
  const std::int64_t b_column = p.transpose_b ? p.ldb : 1;
  for (std::int64_t i = 0; i < p.m; ++i) {
    for (std::int64_t j = 0; j < p.n; ++j) {
      double sum = 0;
      for (std::int64_t l = 0; l < p.k; ++l) {
        sum += static_cast<double>(a[i * a_row + l * a_column]) *
               static_cast<double>(b[l * b_row + j * b_column]);
      }
      c[i * p.n + j] = static_cast<T>(sum);
    }
  }
}

}  // namespace

extern const Strategy<MatmulProblem> kMatmulCpuNaive;
const Strategy<MatmulProblem> kMatmulCpuNaive = {
    .name = "cpu_naive",
    .summary = "three loops, one double accumulator an element: the definition",
    .source = "vanilla multiplication of the hardware-acceleration lecture notes",
    .backend = Backend::kCpu,
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .deterministic = true,
    .limits = {},
    .roundoff =
        [](const MatmulProblem& p) { return (static_cast<double>(p.k) + 1) * kRoundoffF64; },
    .cost =
        [](const MatmulProblem& p) {
          const auto products = static_cast<std::uint64_t>(p.m) * static_cast<std::uint64_t>(p.n) *
                                static_cast<std::uint64_t>(p.k);
          return Cost{.bytes = 2 * products * SizeOf(p.dtype),
                      .flops = 2 * products,
                      .atomics = 0,
                      .depth = static_cast<std::uint64_t>(p.k)};
        },
    .launch = [](const MatmulProblem& p,
                 Lane&) { p.dtype == DType::kF32 ? Run<float>(p) : Run<double>(p); },
};

}  // namespace tessera
