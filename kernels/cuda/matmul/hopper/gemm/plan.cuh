// Chooses a product's tile and the division of its work, using a timing model whose constants were
// measured on one H200.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>

#include "kernels/cuda/matmul/hopper/gemm/gemm.cuh"
#include "kernels/cuda/matmul/hopper/gemm/tuning.cuh"

namespace tessera {

// A product as the planning model sees it. a is [m, k] and b is [k, n], in the form in which they
// are fetched.
struct TensorProduct {
  std::int64_t m, n, k;
  double a_row, b_row;  // see FetchTime
  int multiprocessors;
  // Whether one block must compute each tile from the first step along k to the last, so that the
  // bits of an element do not depend on the number of tiles.
  bool whole_tiles = false;
};

// Returns the time to fetch a row of a box of the operand, in the model's unit, or 0 if the tiles'
// rates already include this time. If the row's 128 bytes span two lines of the L2, TMA reads both
// lines.
template <class T>
double FetchTime(const TensorOperand<T>& x) {
  const std::uintptr_t bits =
      reinterpret_cast<std::uintptr_t>(x.data) | static_cast<std::uintptr_t>(x.pitch) * sizeof(T);
  return bits % 128 == 0 ? 0 : bits % 32 == 0 ? tuning::kCutLine : tuning::kCutSector;
}

template <class T>
TensorProduct ProductOf(std::int64_t m, std::int64_t n, std::int64_t k, const TensorOperand<T>& a,
                        const TensorOperand<T>& b, const CudaStream& stream) {
  return {m, n, k, FetchTime(a), FetchTime(b), stream.device().info().multiprocessors};
}

// Returns `best` or the best plan with this tile, whichever takes less time in the model. The unit
// of time is what a 16-bit multiply-add takes on one SM at full speed; a microsecond has 3.9e6
// units. A plan runs in rounds. In each round a cluster computes one piece of work, for which it
// fills the pipeline and writes the tile. `rate` is roughly the fraction of the tensor cores'
// 16-bit speed that the tile reaches in its main loop.
template <class C>
TensorPlan BetterPlan(TensorPlan best, int tile, double rate, const TensorProduct& p) {
  constexpr double kStart = C::kCluster == 1 ? tuning::kStart : tuning::kStartOfPair;
  // There is at least one tile and one k-tile, because empty products are also planned.
  const std::int64_t tiles =
      std::max<std::int64_t>(1, CeilDiv(p.m, C::kRows * C::kCluster) * CeilDiv(p.n, C::kColumns));
  const std::int64_t slots = p.multiprocessors / C::kCluster;
  const std::int64_t k_tiles = std::max<std::int64_t>(1, CeilDiv(p.k, C::kDepth));
  const double k_tile_time =
      std::max(C::kRows * C::kColumns * C::kDepth * C::kProducts / rate,
               C::kParts * (C::kRows * p.a_row + C::kColumns / C::kCluster * p.b_row));
  const auto try_splits = [&](std::int64_t splits) {
    const std::int64_t split_k_tiles = CeilDiv(k_tiles, splits);
    // The sums are written and read back in f32, at 10 bytes per clock cycle per SM.
    const double added = splits == 1
                             ? 0
                             : tuning::kAdd + static_cast<double>(p.m * p.n * (splits + 1)) * 4 /
                                                  10 * 2048 / p.multiprocessors;
    const double time = static_cast<double>(CeilDiv(tiles * splits, slots)) *
                            (static_cast<double>(split_k_tiles) * k_tile_time + kStart) +
                        added;
    if (time < best.time)
      best = {tile, static_cast<int>(CeilDiv(k_tiles, split_k_tiles)), false, time};
  };
  try_splits(1);
  if (p.whole_tiles) return best;
  if (tiles > slots && tiles % slots != 0) {
    // Each cluster computes its last tile and a fraction of another in parts. The parts cost an
    // additional start and end, and their sums pass through memory. While parts are computed,
    // clusters are at different steps along k and find less in the L2. This effect grows with the
    // number of tiles left over.
    const auto rounds = static_cast<double>(tiles / slots);
    const double left = static_cast<double>(tiles % slots) / static_cast<double>(slots);
    const double time = (rounds - 1 + (1 + left) * (1 + tuning::kApart * left)) *
                            static_cast<double>(k_tiles) * k_tile_time +
                        (rounds + 2) * kStart + tuning::kPass;
    if (time < tuning::kGain * best.time) best = {tile, 1, true, time};
  }
  if (tiles * 2 <= slots) {
    for (std::int64_t splits = 2; splits <= slots / tiles && splits * 4 <= k_tiles; ++splits)
      try_splits(splits);
  }
  return best;
}

// Calls run(C(), plan), where C is the best tile and `plan` is the best plan with it.
template <class Run, class... Tiles>
void RunBestPlan(const TensorProduct& p, const std::tuple<RatedTile<Tiles>...>& tiles,
                 const Run& run) {
  TensorPlan plan;
  int tile = 0;
  ((plan = BetterPlan<Tiles>(plan, tile++, std::get<RatedTile<Tiles>>(tiles).rate, p)), ...);
  tile = 0;
  ((tile++ == plan.tile ? run(Tiles(), plan) : void()), ...);
}

}  // namespace tessera
