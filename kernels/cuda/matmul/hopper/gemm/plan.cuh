// Which tile a product runs with, and how its work is cut: a model of the time, with figures of one
// H200.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>

#include "kernels/cuda/matmul/hopper/gemm/gemm.cuh"
#include "kernels/cuda/matmul/hopper/gemm/tuning.cuh"

namespace tessera {

// What the model of plans knows of a product: a, [m, k], and b, [k, n], as they are fetched.
struct TensorProduct {
  std::int64_t m, n, k;
  double a_row, b_row;  // see FetchTime
  int multiprocessors;
  // Whether every tile is computed by one block from the first step along k to the last, so that an
  // element's bits do not depend on how many tiles there are.
  bool whole_tiles = false;
};

// What a row of a box of the operand takes, in the model's units, where it is more than the rates
// of tiles have in them: its 128 bytes are parts of two lines of the L2, and TMA reads both.
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

// A model of what a plan takes, in multiply-adds of 16 bits that one SM could do, 3.9e6 a
// microsecond: rounds of pieces of work, each with filling the pipeline and writing the tile. The
// better one of it and `best`. rate: about the share of the tensor cores' 16-bit speed that the
// tile reaches in its main loop.
template <class C>
TensorPlan BetterPlan(TensorPlan best, int tile, double rate, const TensorProduct& p) {
  constexpr double kStart = C::kCluster == 1 ? tuning::kStart : tuning::kStartOfPair;
  // At least one of each: empty products have a plan, too, for the models to look at.
  const std::int64_t tiles =
      std::max<std::int64_t>(1, CeilDiv(p.m, C::kRows * C::kCluster) * CeilDiv(p.n, C::kColumns));
  const std::int64_t slots = p.multiprocessors / C::kCluster;
  const std::int64_t k_tiles = std::max<std::int64_t>(1, CeilDiv(p.k, C::kDepth));
  const double k_tile_time =
      std::max(C::kRows * C::kColumns * C::kDepth * C::kProducts / rate,
               C::kParts * (C::kRows * p.a_row + C::kColumns / C::kCluster * p.b_row));
  const auto try_splits = [&](std::int64_t splits) {
    const std::int64_t split_k_tiles = CeilDiv(k_tiles, splits);
    // Sums written and read again in f32, at 10 bytes a clock and SM.
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
    // Of what a cluster has, the last tile and some come in parts. Those cost another beginning and
    // end, and the sums' way through memory. In them clusters are no longer at the same steps along
    // k, so that they find less in the L2: the less, the more is left over.
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

// Calls run(C(), plan) with the best of the tiles and its plan.
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
