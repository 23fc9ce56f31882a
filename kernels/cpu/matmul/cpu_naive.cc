// The definition of Matmul: three loops, with one wide accumulator per element (double, or a 64-bit
// integer that wraps). Element (i, l) of op(a) is a[i * row + l * column], so one loop serves all
// four combinations of transposes.
//
// Cost at M = N = K = 1024 (f32): 2^31 flops, and 2^30 loads of each operand, because nothing is
// reused from one element of c to the next.
#include <algorithm>
#include <type_traits>

#include "kernels/device/device.h"
#include "kernels/problem/matmul.h"
#include "kernels/same_bits/convert.h"
#include "kernels/team/matmul_shares.h"

namespace tessera {
namespace {

// Number of products between two checks of Stream::stopped().
constexpr std::int64_t kPiece = std::int64_t{1} << 16;

template <class A, class B, class O>
void Run(const MatmulProblem& p, const Stream& stream) {
  const auto* a = static_cast<const A*>(p.a);
  const auto* b = static_cast<const B*>(p.b);
  auto* c = static_cast<O*>(p.c);
  const std::int64_t a_row = p.transpose_a ? 1 : p.lda;
  const std::int64_t a_column = p.transpose_a ? p.lda : 1;
  const std::int64_t b_row = p.transpose_b ? 1 : p.ldb;
  const std::int64_t b_column = p.transpose_b ? p.ldb : 1;
  for (std::int64_t i = 0; i < p.m; ++i) {
    for (std::int64_t j = 0; j < p.n; ++j) {
      WideOf<A> sum = 0;
      for (std::int64_t piece = 0; piece < p.k; piece += kPiece) {
        if (stream.stopped()) return;
        const std::int64_t end = std::min(p.k, piece + kPiece);
        for (std::int64_t l = piece; l < end; ++l)
          sum = WrapAdd(sum, Product(static_cast<ValueOf<A>>(a[i * a_row + l * a_column]),
                                     static_cast<ValueOf<B>>(b[l * b_row + j * b_column])));
      }
      if constexpr (std::is_integral_v<O>) {
        c[i * p.n + j] = static_cast<O>(sum);
      } else {
        c[i * p.n + j] = ConvertElement<O>(sum);
      }
    }
  }
}

double Roundoff(const MatmulProblem& p) {
  return IsInteger(p.dtype) ? 0 : (static_cast<double>(p.k) + 1) * kRoundoffF64;
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulCpuNaive = {
    .name = "cpu_naive",
    .summary = "three loops, one wide accumulator per element: the definition",
    .source = "plain multiplication from the notes on hardware acceleration",
    .dtypes = kMatmulDTypes,
    .deterministic = true,
    .roundoff = Roundoff,
    .cost =
        [](const MatmulProblem& p) {
          Cost cost = MatmulCoreCost(p, MatmulTileLoads(p, 1, 1), p.m, p.n, 1);
          // If a walk crosses more rows than the L1 cache has lines, it waits for memory at every
          // row.
          constexpr std::int64_t kLines = 512;
          // For 16-bit elements the wait adds nothing, because converting an element takes as long.
          const std::uint64_t wait = SizeOf(p.dtype) == 2 ? 1 : 4;
          const auto far = [&](std::int64_t pitch) {
            return pitch * static_cast<std::int64_t>(SizeOf(p.dtype)) >= 64;
          };
          if (p.k > kLines && ((p.transpose_a && far(p.lda)) || (!p.transpose_b && far(p.ldb))))
            cost.depth *= wait;
          return cost;
        },
    .launch =
        [](const MatmulProblem& p, Stream& stream) {
          DispatchMixedMatmul(p, [&](auto a, auto b, auto o) {
            Run<decltype(a), decltype(b), decltype(o)>(p, stream);
          });
        },
    .shared = {.launch = LaunchRows<kMatmulCpuNaive>},
    .mixed = true,
};

}  // namespace tessera
