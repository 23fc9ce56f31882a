// Reduce over one axis of x[outer, length, inner]. A tile of up to 64 adjacent outputs keeps its
// accumulators in registers and in the nearest cache while the loop walks down the axis, so memory
// is read in rows even if the axis itself is strided. OpenMP divides the tiles among the cores.
// Each output is folded as one chain in index order, so the bits are the same for any number of
// threads.
#include <algorithm>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"
#include "kernels/same_bits/reduction.h"

namespace tessera {
namespace {

constexpr std::int64_t kTile = 64;
// Number of steps along the axis between two checks of Stream::stopped().
constexpr std::int64_t kSteps = 1024;

template <ReduceOp op, class T>
void Run(const ReduceAxesProblem& p, const Stream& stream) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  const auto* x = static_cast<const T*>(p.x);
  auto* out = static_cast<typename F::Out*>(p.out);
  const std::int64_t pitch = std::max(p.inner, p.inner_of_all);
  const std::int64_t tiles = (p.inner + kTile - 1) / kTile;
#pragma omp parallel for schedule(static) if (p.outer * p.length * p.inner > (1 << 16))
  for (std::int64_t t = 0; t < p.outer * tiles; ++t) {
    if (stream.stopped()) continue;
    const std::int64_t o = t / tiles;
    const std::int64_t first = t % tiles * kTile;
    const std::int64_t width = std::min(kTile, p.inner - first);
    Wide chain[kTile];
    for (std::int64_t j = 0; j < width; ++j) chain[j] = F::template Identity<Wide>();
    for (std::int64_t l = 0; l < p.length; ++l) {
      if (l % kSteps == 0 && stream.stopped()) break;
      const T* row = x + (o * p.length + l) * pitch + first;
      for (std::int64_t j = 0; j < width; ++j)
        chain[j] = F::Combine(chain[j], F::Widen(F::Load(row[j], l)));
    }
    for (std::int64_t j = 0; j < width; ++j)
      out[o * p.inner + first + j] = F::FinishAxis(chain[j], p.length);
  }
}

}  // namespace

extern constexpr Strategy<ReduceAxesProblem> kReduceAxesCpuAxis = {
    .name = "cpu_axis",
    .summary = "tiles of outputs over all cores, one chain per output",
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
