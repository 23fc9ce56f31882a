// Reduce over one axis of x[outer, length, inner]. A tile of up to 64 adjacent outputs keeps its
// accumulators in registers and in the nearest cache while the loop walks down the axis, so memory
// is read in rows even if the axis itself is strided. Along the last axis a tile is eight rows. An
// addition waits for the previous one of its chain, so the chains of a tile take turns. OpenMP
// divides the tiles among the cores. Each output is folded as one chain in index order, so the bits
// are the same for any number of threads.
#include <algorithm>
#include <type_traits>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"
#include "kernels/same_bits/reduction.h"

namespace tessera {
namespace {

constexpr std::int64_t kTile = 64;
// Number of steps along the axis between two checks of Stream::stopped().
constexpr std::int64_t kSteps = 1024;

constexpr std::int64_t kRows = 8;

// The outputs that one loop along the axis folds: adjacent columns of one row, or one column of
// adjacent rows. The elements of output j are at x + j * apart, and its result at out + j.
template <class T, class Out>
struct Tile {
  const T* x;
  Out* out;
  std::int64_t apart;
};

// `width` is a compile-time constant if the chains have to be in registers.
template <ReduceOp op, class T, class Out, class Width>
void FoldTile(const Tile<T, Out>& tile, Width width, std::int64_t length, std::int64_t pitch,
              const Stream& stream) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  Wide chain[kTile];
  for (std::int64_t j = 0; j < width; ++j) chain[j] = F::template Identity<Wide>();
  for (std::int64_t l = 0; l < length; ++l) {
    if (l % kSteps == 0 && stream.stopped()) break;
    const T* const at = tile.x + l * pitch;
    for (std::int64_t j = 0; j < width; ++j)
      chain[j] = F::Combine(chain[j], F::Widen(F::Load(at[j * tile.apart], l)));
  }
  for (std::int64_t j = 0; j < width; ++j) tile.out[j] = F::FinishAxis(chain[j], length);
}

template <ReduceOp op, class T>
void Run(const ReduceAxesProblem& p, const Stream& stream) {
  using Out = typename Fold<op, T>::Out;
  const auto* x = static_cast<const T*>(p.x);
  auto* out = static_cast<Out*>(p.out);
  const std::int64_t pitch = std::max(p.inner, p.inner_of_all), row = p.length * pitch;
  const std::int64_t groups = p.inner == 1 ? p.outer / kRows : 0;
  const std::int64_t tiles = (p.inner + kTile - 1) / kTile;  // of each row outside the groups
#pragma omp parallel for schedule(static) if (p.outer * p.length * p.inner > (1 << 16))
  for (std::int64_t t = 0; t < groups + (p.outer - groups * kRows) * tiles; ++t) {
    if (stream.stopped()) continue;
    if (t < groups) {
      FoldTile<op>(Tile<T, Out>{x + t * kRows * row, out + t * kRows, row},
                   std::integral_constant<std::int64_t, kRows>(), p.length, pitch, stream);
    } else {
      const std::int64_t o = groups * kRows + (t - groups) / tiles;
      const std::int64_t first = (t - groups) % tiles * kTile;
      FoldTile<op>(Tile<T, Out>{x + o * row + first, out + o * p.inner + first, 1},
                   std::min(kTile, p.inner - first), p.length, pitch, stream);
    }
  }
}

}  // namespace

extern constexpr Strategy<ReduceAxesProblem> kReduceAxesCpuAxis = {
    .name = "cpu_axis",
    .summary = "tiles of outputs on all cores, one chain per output",
    .source = "definition, tiled for the cache",
    .deterministic = true,
    .roundoff =
        [](const ReduceAxesProblem& p) {
          return ReduceRoundoff(p.op, p.dtype, p.length, {0, p.length});
        },
    .cost =
        [](const ReduceAxesProblem& p) {
          const auto outputs = static_cast<std::uint64_t>(p.outer * p.inner);
          const auto n = outputs * static_cast<std::uint64_t>(p.length);
          return Cost{.bytes = n * SizeOf(p.dtype) + outputs * SizeOf(ResultDType(p.op, p.dtype)),
                      .flops = n,
                      // One core takes these steps to walk down a tile.
                      .depth = static_cast<std::uint64_t>(p.length * std::min(kTile, p.inner))};
        },
    .launch =
        [](const ReduceAxesProblem& p, Stream& stream) {
          DispatchOp(p.op, [&](auto op) {
            DispatchDType(p.dtype, [&](auto t) { Run<op(), decltype(t)>(p, stream); });
          });
        },
};

}  // namespace tessera
