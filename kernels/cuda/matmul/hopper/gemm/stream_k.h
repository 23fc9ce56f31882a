// Persistent workers, which are blocks or clusters, share the tiles of c so that no worker is idle
// at the end. The tiles that do not make up a whole round, and one more tile per worker, are
// divided evenly. One worker computes the first steps along k of such a tile and stores its sums,
// and the next worker computes the rest of the tile (after Stream-K, Osama, Merrill, Cecka, Garland
// and Owens, 2023).
//
//     8 tiles, 3 workers
//     worker 0   tile 0 | first part of 4 | tile 3
//     worker 1   tile 1 | first part of 6 | tile 5 | rest of 4
//     worker 2   tile 2 |                   tile 7 | rest of 6
//
// No worker waits for long, because the first parts are done before the rests begin. No worker
// waits for a worker that has yet to start: first parts wait for nothing, a rest waits only for the
// previous worker, and workers start in order. CUDA does not promise that order, but the blocks of
// a grid have started in order on every GPU so far. Whole tiles come first, because workers that
// are at the same step along k find each other's operands in the L2. Workers that begin with parts
// of different lengths are at different steps: in bf16, 8192 x 8192 x 8192 takes 1.53 ms if the
// first parts come first, and 1.34 ms in this order.
//
// Over many long tiles, workers still drift apart. abreast.cuh prevents this for the number of
// steps that StepsAbreast returns.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/base/element.h"

namespace tessera {

// Divides by a constant through multiplication by its reciprocal (Lemire, Kaser and Kurz, "Faster
// remainder by direct computation", 2019). GPUs have no instruction for integer division, and a
// block has to wait until the position of its tile is computed.
class Divisor {
 public:
  Divisor() = default;
  // REQUIRES: value > 0.
  explicit Divisor(int value)
      : value_(value), reciprocal_((std::uint64_t{1} << 63) / static_cast<unsigned>(value) + 1) {}

  TESSERA_HD int value() const { return value_; }
  // Returns x / value(), for x >= 0. The reciprocal is too large by at most 2^-63, and the product
  // by less than 1 / value(), so the product does not reach the next integer.
  TESSERA_HD int Quotient(int x) const {
    const std::uint64_t twice = static_cast<std::uint64_t>(x) * 2;
    const std::uint64_t low = twice * static_cast<std::uint32_t>(reciprocal_) >> 32;
    return static_cast<int>((twice * (reciprocal_ >> 32) + low) >> 32);
  }

 private:
  int value_ = 1;
  std::uint64_t reciprocal_ = 0;  // 2^63 / value_, rounded up
};

struct Sharing {
  int tiles;
  int k_tiles;      // per tile
  int rounds;       // whole tiles per worker
  int shared;       // tiles that are shared after the whole ones: 0, or more than there are workers
  int each, extra;  // shared k-tiles per worker; the first `extra` workers have one more
};

// Divides the work so that every worker computes only whole tiles.
inline Sharing WholeTiles(std::int64_t tiles, std::int64_t k_tiles, std::int64_t workers) {
  return {.tiles = static_cast<int>(tiles),
          .k_tiles = static_cast<int>(k_tiles),
          .rounds = static_cast<int>((tiles + workers - 1) / workers),
          .shared = 0,
          .each = 0,
          .extra = 0};
}

// Like WholeTiles, but workers share the last tiles. REQUIRES: tiles >= workers.
inline Sharing ShareTiles(std::int64_t tiles, std::int64_t k_tiles, std::int64_t workers) {
  Sharing sharing = WholeTiles(tiles, k_tiles, workers);
  const std::int64_t shared = workers + tiles % workers, all = shared * k_tiles;
  if (shared == workers || all > std::numeric_limits<std::int32_t>::max()) return sharing;
  sharing.rounds = static_cast<int>((tiles - shared) / workers);
  sharing.shared = static_cast<int>(shared);
  sharing.each = static_cast<int>(all / workers);
  sharing.extra = static_cast<int>(all % workers);
  return sharing;
}

// One piece of a worker's work: the k-tiles [first, first + k_tiles) of a tile. k_tiles is 0 after
// the worker's last piece. `starts` and `ends` say whether the piece contains the tile's first and
// last k-tile.
struct Piece {
  int tile, first, k_tiles;
  bool starts, ends;
};

// Returns piece i of a worker, for i = 0, 1, ... A worker needs only i to find its next piece.
TESSERA_HD inline Piece PieceOf(const Sharing& sharing, int worker, int workers, int i) {
  const int k_tiles = sharing.k_tiles;
  if (sharing.shared == 0) {
    const int tile = i * workers + worker;
    return tile < sharing.tiles ? Piece{tile, 0, k_tiles, true, true} : Piece{};
  }
  if (i < sharing.rounds) return {i * workers + worker, 0, k_tiles, true, true};
  i -= sharing.rounds;
  // [begin, end) are the worker's k-tiles among all shared k-tiles. A worker has at least as many
  // as one tile has, so no tile has three parts.
  const int begin = worker * sharing.each + (worker < sharing.extra ? worker : sharing.extra);
  const int end = begin + sharing.each + (worker < sharing.extra ? 1 : 0);
  const int first_shared = sharing.rounds * workers;
  const int begin_tile = first_shared + begin / k_tiles, end_tile = first_shared + end / k_tiles;
  const int after_begin = begin % k_tiles, before_end = end % k_tiles;
  if (before_end != 0 && i-- == 0) return {end_tile, 0, before_end, true, false};
  const int whole = begin_tile + (after_begin != 0 ? 1 : 0);
  if (whole + i < end_tile) return {whole + i, 0, k_tiles, true, true};
  if (whole + i == end_tile && after_begin != 0)
    return {begin_tile, after_begin, k_tiles - after_begin, false, true};
  return {};
}

inline constexpr int kStepKTiles = 16;
inline constexpr std::int64_t kLeastSteps = 400;
// Returns the number of steps (of kStepKTiles k-tiles each) during which workers are kept abreast
// (abreast.cuh). These steps cover the whole tiles that every worker computes before the shared
// ones. Returns 0 if there are too few steps for workers to drift apart.
inline int StepsAbreast(const Sharing& sharing, std::int64_t workers) {
  const std::int64_t whole = sharing.shared != 0 ? sharing.rounds : sharing.tiles / workers;
  const std::int64_t steps = whole * ((sharing.k_tiles + kStepKTiles - 1) / kStepKTiles);
  // A 32-bit counter has to hold the steps of all blocks, and one more per block.
  const std::int64_t most = std::numeric_limits<std::int32_t>::max() / (4 * workers);
  return steps < kLeastSteps || steps > most ? 0 : static_cast<int>(steps);
}

}  // namespace tessera
