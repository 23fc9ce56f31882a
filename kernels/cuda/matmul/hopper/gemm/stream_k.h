// How workers that stay, blocks or clusters of some, share out the tiles of c so that none idles at
// the end. What whole tiles of every worker leave over, and one more tile of each, is cut evenly:
// a worker computes the first steps along k of a tile and leaves its sums behind, and the worker
// after it ends with the rest of that tile (after Stream-K, Osama, Merrill, Cecka, Garland and
// Owens, 2023).
//
//     8 tiles, 3 workers
//     worker 0   tile 0 | first part of 4 | tile 3
//     worker 1   tile 1 | first part of 6 | tile 5 | rest of 4
//     worker 2   tile 2 |                   tile 7 | rest of 6
//
// No worker waits for long, because first parts are done before the rests begin; and no worker
// waits for a worker that has yet to start, because first parts wait for nothing and workers start
// in order, as the blocks of a grid do on every GPU so far, though CUDA does not promise it. Whole
// tiles come first, since workers that are at the same steps along k find each other's operands in
// the L2, and those that begin with parts of different lengths no longer are: 8192 x 8192 x 8192 in
// bf16 took 1.53 ms with first parts first, 1.34 like this.
//
// Over many long tiles they drift apart all the same, and are kept abreast: StepsAbreast.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/base/element.h"

namespace tessera {

// A number to divide by, which is a multiplication with its reciprocal: a block waits for where its
// tile is, and GPUs have no instruction that divides integers (Lemire, Kaser and Kurz, "Faster
// remainder by direct computation", 2019).
class Divisor {
 public:
  Divisor() = default;
  // REQUIRES: value > 0.
  explicit Divisor(int value)
      : value_(value), reciprocal_((std::uint64_t{1} << 63) / static_cast<unsigned>(value) + 1) {}

  TESSERA_HD int value() const { return value_; }
  // x / value(), for x >= 0. The reciprocal is too large by at most 2^-63, the product by less than
  // 1 / value(): it does not reach the next integer.
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
  int k_tiles;      // of a tile
  int rounds;       // whole tiles of every worker
  int shared;       // tiles of all workers, after those; none, or more than there are workers
  int each, extra;  // k-tiles of those for a worker, and for how many workers one more
};

// Every worker takes one whole tile after the other.
inline Sharing WholeTiles(std::int64_t tiles, std::int64_t k_tiles, std::int64_t workers) {
  return {.tiles = static_cast<int>(tiles),
          .k_tiles = static_cast<int>(k_tiles),
          .rounds = static_cast<int>((tiles + workers - 1) / workers),
          .shared = 0,
          .each = 0,
          .extra = 0};
}

// The same, but for the last ones. REQUIRES: tiles >= workers.
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

// k-tiles [first, first + k_tiles) of a tile; k_tiles is 0 where there is none. starts, ends: the
// tile.
struct Piece {
  int tile, first, k_tiles;
  bool starts, ends;
};

// What a worker computes as number i = 0, 1, .. of its pieces. Of i alone, so that nothing else
// need be kept from one to the next.
TESSERA_HD inline Piece PieceOf(const Sharing& sharing, int worker, int workers, int i) {
  const int k_tiles = sharing.k_tiles;
  if (sharing.shared == 0) {
    const int tile = i * workers + worker;
    return tile < sharing.tiles ? Piece{tile, 0, k_tiles, true, true} : Piece{};
  }
  if (i < sharing.rounds) return {i * workers + worker, 0, k_tiles, true, true};
  i -= sharing.rounds;
  // The worker's k-tiles of the shared tiles: at least a tile of them, so that none has three
  // parts.
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

// Steps that workers take abreast (abreast.cuh), of kStepKTiles k-tiles each: all whole tiles that
// every worker has before some are shared, or none where those are too few for workers to drift
// apart.
inline constexpr int kStepKTiles = 16;
inline constexpr std::int64_t kLeastSteps = 400;
inline int StepsAbreast(const Sharing& sharing, std::int64_t workers) {
  const std::int64_t whole = sharing.shared != 0 ? sharing.rounds : sharing.tiles / workers;
  const std::int64_t steps = whole * ((sharing.k_tiles + kStepKTiles - 1) / kStepKTiles);
  // The steps of all blocks, and one more of each, are counted in 32 bits.
  const std::int64_t most = std::numeric_limits<std::int32_t>::max() / (4 * workers);
  return steps < kLeastSteps || steps > most ? 0 : static_cast<int>(steps);
}

}  // namespace tessera
