// Matmul with v1 x v2 x 1 tiles in registers.
//
// Unlike in `cpu_naive`, the elements of a v1 x v2 tile of c are computed together. Each step along
// k loads v1 elements of a and v2 elements of b and computes their v1 * v2 products. Each loaded
// element of a is therefore used v2 times, and each loaded element of b is used v1 times:
//
//                    v2
//                 +------+
//              k  | b    |  <- one row per step
//                 +------+
//        k           v2
//     +------+    +------+
//  v1 | a    |    | c    |  v1 * v2 sums in registers, stored once
//     +------+    +------+
//       ^ one column per step
//
// The third extent of the tile, v3 = 1, is the number of steps that are loaded together. More steps
// would cost registers without saving loads. v1 = 4 and v2 = 8 keep 32 sums in eight registers of
// four floats, and leave the other eight registers of the baseline processor for the operands.
//
// Cost at M = N = K = 1024 (f32): 2^31 flops; 2^30 / 8 loads of a and 2^30 / 4 of b, from whichever
// cache still holds them. This strategy has no tiles for the caches, and uses one core.
//
// All extents give correct results: rows and columns of a tile beyond the edge of c repeat the last
// row or column of c, and are not stored.
#include <algorithm>

#include "kernels/device/device.h"
#include "kernels/problem/matmul.h"
#include "kernels/team/matmul_shares.h"

namespace tessera {
namespace {

constexpr int kRows = 4;     // v1
constexpr int kColumns = 8;  // v2
// Number of steps along k between two checks of Stream::stopped().
constexpr std::int64_t kPiece = std::int64_t{1} << 14;

template <class T, class O>
void Run(const MatmulProblem& p, const Stream& stream) {
  using Acc = MatmulAcc<T, O>;
  const std::int64_t a_row = p.transpose_a ? 1 : p.lda, a_column = p.transpose_a ? p.lda : 1;
  const std::int64_t b_row = p.transpose_b ? 1 : p.ldb, b_column = p.transpose_b ? p.ldb : 1;
  const auto* a = static_cast<const T*>(p.a);
  const auto* b = static_cast<const T*>(p.b);
  auto* c = static_cast<O*>(p.c);
  for (std::int64_t i = 0; i < p.m; i += kRows) {
    std::int64_t a_at[kRows], b_at[kColumns];
    for (int y = 0; y < kRows; ++y) a_at[y] = std::min(i + y, p.m - 1) * a_row;
    for (std::int64_t j = 0; j < p.n; j += kColumns) {
      for (int x = 0; x < kColumns; ++x) b_at[x] = std::min(j + x, p.n - 1) * b_column;
      Acc sums[kRows][kColumns] = {};
      for (std::int64_t l = 0; l < p.k; ++l) {
        if (l % kPiece == 0 && stream.stopped()) return;
        ValueOf<T> a_values[kRows], b_values[kColumns];
        // NOLINTBEGIN(bugprone-signed-char-misuse): these bytes are numbers, not characters
        for (int y = 0; y < kRows; ++y)
          a_values[y] = static_cast<ValueOf<T>>(a[a_at[y] + l * a_column]);
        for (int x = 0; x < kColumns; ++x)
          b_values[x] = static_cast<ValueOf<T>>(b[b_at[x] + l * b_row]);
        // NOLINTEND(bugprone-signed-char-misuse)
        for (int y = 0; y < kRows; ++y) {
#pragma omp simd
          for (int x = 0; x < kColumns; ++x)
            sums[y][x] = MultiplyAdd(a_values[y], b_values[x], sums[y][x]);
        }
      }
      const std::int64_t rows = std::min<std::int64_t>(kRows, p.m - i);
      const std::int64_t columns = std::min<std::int64_t>(kColumns, p.n - j);
      for (std::int64_t y = 0; y < rows; ++y)
        for (std::int64_t x = 0; x < columns; ++x)
          c[(i + y) * p.n + j + x] = static_cast<O>(sums[y][x]);
    }
  }
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulCpuRegisterTiled = {
    .name = "cpu_register_tiled",
    .summary = "4 x 8 x 1 tiles in registers: every load is used four or eight times",
    .source = "register tiling from the notes on hardware acceleration",
    .dtypes = kMatmulDTypes,
    .deterministic = true,
    // One product and one addition per step, fused or not.
    .roundoff =
        [](const MatmulProblem& p) {
          return static_cast<double>(p.k + 1) * MatmulRoundoffUnit(p.dtype);
        },
    .cost =
        [](const MatmulProblem& p) {
          return MatmulCoreCost(p, MatmulTileLoads(p, kRows, kColumns), p.m, p.n, kColumns);
        },
    .launch =
        [](const MatmulProblem& p, Stream& stream) {
          DispatchMatmul(p, [&](auto t, auto o) { Run<decltype(t), decltype(o)>(p, stream); });
        },
    .shared = {.launch = LaunchRows<kMatmulCpuRegisterTiled>},
};

}  // namespace tessera
