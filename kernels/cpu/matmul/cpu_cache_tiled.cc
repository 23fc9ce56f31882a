// Matmul with vectorised register tiles inside cache blocks, on all cores.
//
// In `cpu_register_tiled`, tiles reload their rows of a and columns of b from whichever cache or
// memory holds them. Here a core works on a b1 x b2 block of c, and walks along k in k-tiles.
//
//                       b2
//                  +-----------+                 1. copy ("pack") the k-tile of a and of b into
//             k-tile | | | | | | |  panels            panels, as wide as a register tile and
//                  +-----------+                    contiguous in the order in which step 2
//          k-tile         b2                          reads them;
//        +------+  +-----------+
//        |------|  |  +-+      |                 2. for every register tile: walk along the two
//     b1 |------|  |  +-+      |                    panels with v1 x v2 sums in registers, then
//        |------|  |           |                    add these to the block's sums in the cache.
//        +------+  +-----------+
//         panels        c
//
// Memory therefore delivers 2 m n k / b elements instead of 2 m n k / v. The panels are read more
// often, but from the first two levels of cache. Packing also handles transposes, pitches and
// 16-bit types, and pads edges with zeros, so step 2 has only one case. Packing costs about one
// load and one store for every 70 multiply-adds.
//
// The register tile is chosen at run time, as large as the processor's registers allow: 12 x 32
// floats with AVX-512 (24 of 32 registers for the sums), 6 x 16 with AVX2 (12 of 16), and 4 x 8
// otherwise. The blocks of c, and of all results of a stack, are divided among the cores, which
// share nothing else, so no core waits for another.
//
// Cost at M = N = K = 1024 (f32): 2^31 flops; a is loaded 4 times and b 11 times, 60 MiB; 44 blocks
// to divide among the cores.
//
// All extents give correct results, because results from the padding of a panel are not stored.
#include <algorithm>
#include <atomic>

#include "kernels/device/device.h"
#include "kernels/problem/matmul.h"
#include "kernels/team/matmul_shares.h"

namespace tessera {
namespace {

// b1, b2 and the depth of a k-tile. In f32, the panels take 96 KiB and 256 KiB and the sums take 96
// KiB, for an L2 cache of 512 KiB or more. b1 and b2 are multiples of the extents of every register
// tile.
constexpr std::int64_t kBlockRows = 96;
constexpr std::int64_t kBlockColumns = 256;
constexpr std::int64_t kDepth = 256;
// One more core is used for every 2^19 multiply-adds, because waking a core takes longer than 2^18
// multiply-adds.
constexpr double kWorkerWork = 0x1p19;

// The type in which accumulators are computed. For integers it is unsigned, because unsigned
// integers and vectors of them may wrap, as in two's complement.
template <class A>
struct ArithmeticOf {
  using type = A;
};
template <>
struct ArithmeticOf<std::int32_t> {
  using type = std::uint32_t;
};
template <>
struct ArithmeticOf<std::int64_t> {
  using type = std::uint64_t;
};

// sums[rows, columns] += a_panel * b_panel over `depth` steps. The elements of a panel for one step
// are adjacent. `pitch` is the distance between two rows of sums.
template <class A>
using Multiply = void (*)(const A* a_panel, const A* b_panel, std::int64_t depth, A* sums,
                          std::int64_t pitch);

// A register tile: kRows x 2 vectors of kBytes.
template <class A, int kRows, int kBytes>
[[gnu::always_inline]] inline void MultiplyTile(const A* a_panel, const A* b_panel,
                                                std::int64_t depth, A* sums, std::int64_t pitch) {
  typedef A Vector __attribute__((vector_size(kBytes), aligned(alignof(A)), may_alias));
  constexpr int kStreams = kBytes / static_cast<int>(sizeof(A));
  Vector left[kRows] = {}, right[kRows] = {};
  for (std::int64_t l = 0; l < depth; ++l) {
    const auto b_left = *reinterpret_cast<const Vector*>(b_panel);
    const auto b_right = *reinterpret_cast<const Vector*>(b_panel + kStreams);
#pragma GCC unroll 16
    for (int y = 0; y < kRows; ++y) {
      left[y] += a_panel[y] * b_left;
      right[y] += a_panel[y] * b_right;
    }
    a_panel += kRows;
    b_panel += 2 * kStreams;
  }
#pragma GCC unroll 16
  for (int y = 0; y < kRows; ++y) {
    *reinterpret_cast<Vector*>(sums + y * pitch) += left[y];
    *reinterpret_cast<Vector*>(sums + y * pitch + kStreams) += right[y];
  }
}

// A register tile's extents and the code that multiplies it.
template <class A>
struct Tile {
  int rows, columns;
  Multiply<A> multiply;
};

#if defined(__x86_64__)
template <class A>
[[gnu::target("avx512f")]] void MultiplyAvx512(const A* a_panel, const A* b_panel,
                                               std::int64_t depth, A* sums, std::int64_t pitch) {
  MultiplyTile<A, 12, 64>(a_panel, b_panel, depth, sums, pitch);
}
template <class A>
[[gnu::target("avx2,fma")]] void MultiplyAvx2(const A* a_panel, const A* b_panel,
                                              std::int64_t depth, A* sums, std::int64_t pitch) {
  MultiplyTile<A, 6, 32>(a_panel, b_panel, depth, sums, pitch);
}
#endif
template <class A>
void MultiplyBaseline(const A* a_panel, const A* b_panel, std::int64_t depth, A* sums,
                      std::int64_t pitch) {
  MultiplyTile<A, 4, 16>(a_panel, b_panel, depth, sums, pitch);
}

template <class A>
Tile<A> BestTile() {
  constexpr int kSize = sizeof(A);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {12, 128 / kSize, MultiplyAvx512<A>};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {6, 64 / kSize, MultiplyAvx2<A>};
#endif
  return {4, 32 / kSize, MultiplyBaseline<A>};
}

// An operand; element [i, l], with i along m or n, is at i * stride + l * k_stride.
template <class T>
struct Operand {
  const T* data;
  std::int64_t stride, k_stride;
};

// Copies the elements with i in [first, first + count), for `depth` steps starting at k_first, into
// panels that are `width` wide: panel by panel, and step by step within a panel. The last panel is
// padded with zeros.
template <class A, class T>
void Pack(const Operand<T>& operand, std::int64_t first, std::int64_t count, std::int64_t k_first,
          std::int64_t depth, int width, A* panels) {
  for (std::int64_t i = 0; i < count; i += width, panels += width * depth) {
    const T* from = operand.data + (first + i) * operand.stride + k_first * operand.k_stride;
    const int valid = static_cast<int>(std::min<std::int64_t>(width, count - i));
    const auto copy = [&](std::int64_t l, int w) {
      panels[l * width + w] =
          static_cast<A>(static_cast<ValueOf<T>>(from[w * operand.stride + l * operand.k_stride]));
    };
    // The contiguous dimension is the inner loop.
    if (operand.k_stride == 1) {
      for (int w = 0; w < valid; ++w)
        for (std::int64_t l = 0; l < depth; ++l) copy(l, w);
    } else {
      for (std::int64_t l = 0; l < depth; ++l)
        for (int w = 0; w < valid; ++w) copy(l, w);
    }
    for (std::int64_t l = 0; l < depth; ++l)
      std::fill(panels + l * width + valid, panels + (l + 1) * width, A(0));
  }
}

constexpr std::int64_t RoundUp(std::int64_t value, std::int64_t to) {
  return (value + to - 1) / to * to;
}

// The workspace of one core for one block of c, in elements: its two panels and its sums, in this
// order.
constexpr std::int64_t kPanelsA = kBlockRows * kDepth;
constexpr std::int64_t kPanelsB = kBlockColumns * kDepth;
constexpr std::int64_t kSums = kBlockRows * kBlockColumns;
constexpr std::int64_t kWorkspace = kPanelsA + kPanelsB + kSums;

template <class TA, class TB, class O>
void Run(const MatmulProblem& p, Stream& stream) {
  using Acc = MatmulAcc<TA, O>;
  using A = typename ArithmeticOf<Acc>::type;
  static const Tile<A> tile = BestTile<A>();

  const auto compute_block = [&](std::int64_t product, std::int64_t row, std::int64_t column,
                                 A* workspace) {
    const StackOffsets at = ProductOffsets(p, product);
    const Operand<TA> a = {static_cast<const TA*>(p.a) + at.a, p.transpose_a ? 1 : p.lda,
                           p.transpose_a ? p.lda : 1};
    const Operand<TB> b = {static_cast<const TB*>(p.b) + at.b, p.transpose_b ? p.ldb : 1,
                           p.transpose_b ? 1 : p.ldb};
    auto* c = static_cast<O*>(p.c) + product * p.m * p.n;
    A* a_panels = workspace;
    A* b_panels = a_panels + kPanelsA;
    A* sums = b_panels + kPanelsB;
    const std::int64_t rows = std::min(kBlockRows, p.m - row);
    const std::int64_t columns = std::min(kBlockColumns, p.n - column);
    const std::int64_t pitch = RoundUp(columns, tile.columns);
    std::fill_n(sums, RoundUp(rows, tile.rows) * pitch, A(0));
    for (std::int64_t k = 0; k < p.k && !stream.stopped(); k += kDepth) {
      const std::int64_t depth = std::min(kDepth, p.k - k);
      Pack(a, row, rows, k, depth, tile.rows, a_panels);
      Pack(b, column, columns, k, depth, tile.columns, b_panels);
      // One panel of b stays in the L1 cache while the panels of a are read.
      for (std::int64_t x = 0; x < columns; x += tile.columns)
        for (std::int64_t y = 0; y < rows; y += tile.rows)
          tile.multiply(a_panels + y * depth, b_panels + x * depth, depth, sums + y * pitch + x,
                        pitch);
    }
    for (std::int64_t y = 0; y < rows; ++y)
      for (std::int64_t x = 0; x < columns; ++x)
        c[(row + y) * p.n + column + x] = static_cast<O>(static_cast<Acc>(sums[y * pitch + x]));
  };

  const std::int64_t column_blocks = (p.n + kBlockColumns - 1) / kBlockColumns;
  const std::int64_t blocks_each = (p.m + kBlockRows - 1) / kBlockRows * column_blocks;
  const std::int64_t blocks = p.stack * blocks_each;
  const double work = static_cast<double>(p.stack) * static_cast<double>(p.m) *
                      static_cast<double>(p.n) * static_cast<double>(p.k);
  const int cores = stream.device().info().multiprocessors;
  const int workers = static_cast<int>(
      std::min({static_cast<double>(blocks), static_cast<double>(cores), 1 + work / kWorkerWork}));
  if (workers == 0) return;
  auto* workspaces =
      static_cast<A*>(stream.Scratch(static_cast<std::size_t>(workers * kWorkspace) * sizeof(A)));
  std::atomic<std::int64_t> next{0};
#pragma omp parallel for schedule(static, 1) if (workers > 1)
  for (int worker = 0; worker < workers; ++worker) {
    for (std::int64_t at = next++; at < blocks && !stream.stopped(); at = next++) {
      const std::int64_t block = at % blocks_each;
      compute_block(at / blocks_each, block / column_blocks * kBlockRows,
                    block % column_blocks * kBlockColumns, workspaces + worker * kWorkspace);
    }
  }
}

// A term is rounded in its product, in the chain of its k-tile, and in the sum over k-tiles.
double Roundoff(const MatmulProblem& p) {
  const std::int64_t k_tiles = (p.k + kDepth - 1) / kDepth;
  return static_cast<double>(1 + std::min(p.k, kDepth) + k_tiles) * MatmulRoundoffUnit(p.dtype);
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulCpuCacheTiled = {
    .name = "cpu_cache_tiled",
    .summary = "cache blocking around vectorised register tiles, on all cores",
    .source = "cache tiling from the notes on hardware acceleration",
    .dtypes = kMatmulDTypes,
    .deterministic = true,
    .roundoff = Roundoff,
    .cost =
        [](const MatmulProblem& p) {
          // 32 is the width of the largest register tile, that of AVX-512.
          return MatmulCoreCost(p, MatmulTileLoads(p, kBlockRows, kBlockColumns), kBlockRows,
                                kBlockColumns, 32);
        },
    .launch =
        [](const MatmulProblem& p, Stream& stream) {
          DispatchMixedMatmul(p, [&](auto a, auto b, auto o) {
            Run<decltype(a), decltype(b), decltype(o)>(p, stream);
          });
        },
    .shared = {.launch = LaunchRows<kMatmulCpuCacheTiled>},
    .stacks = true,
    .mixed = true,
};

}  // namespace tessera
