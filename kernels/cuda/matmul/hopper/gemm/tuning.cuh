// All parameters that were tuned for Hopper: the tiles that each strategy chooses among, and the
// constants of the model that makes the choice (plan.cuh). With these rates and constants, the
// model prefers what was faster on one H200 (CUDA 13.0, November 2026). For 16-bit types, 75 shapes
// were measured with each tile size: with whole tiles, with tiles in parts, and with k split.
// Another GPU needs its own values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "kernels/cuda/matmul/hopper/gemm/tile.cuh"

namespace tessera {

// A tile, and roughly the fraction of the tensor cores' 16-bit speed that its main loop reaches.
template <class C>
struct RatedTile {
  double rate;
};

namespace tuning {

// Clusters of two blocks share the boxes that they fetch. Sharing pays off for many tiles, and for
// small tiles with a long k. The arguments are rows, columns, blocks per cluster, and stages.
template <class T>
inline constexpr std::tuple kTiles16{RatedTile<TensorTile<T, 128, 256, 2, 3, /*kBoxes=*/4>>{0.8},
                                     RatedTile<TensorTile<T, 128, 256, 1, 4>>{0.785},
                                     RatedTile<TensorTile<T, 128, 192, 1, 4, /*kBoxes=*/3>>{0.775},
                                     RatedTile<TensorTile<T, 128, 128, 2, 6>>{0.82},
                                     RatedTile<TensorTile<T, 128, 128, 1, 6>>{0.72},
                                     RatedTile<TensorTile<T, 64, 128, 2, 8>>{0.7},
                                     RatedTile<TensorTile<T, 64, 128, 1, 8>>{0.58}};
inline constexpr std::tuple kTilesTf32{RatedTile<TensorTile<Tf32, 128, 256, 2, 4>>{0.4},
                                       RatedTile<TensorTile<Tf32, 128, 256, 1, 4>>{0.397},
                                       RatedTile<TensorTile<Tf32, 128, 128, 1, 6>>{0.38},
                                       RatedTile<TensorTile<Tf32, 64, 128, 1, 8>>{0.3}};
template <class T>
inline constexpr std::tuple kTiles8{
    RatedTile<TensorTile<T, 128, 256, 2, 4>>{1.5}, RatedTile<TensorTile<T, 128, 256, 1, 4>>{1.45},
    RatedTile<TensorTile<T, 128, 128, 2, 6>>{1.4}, RatedTile<TensorTile<T, 128, 128, 1, 6>>{1.2},
    RatedTile<TensorTile<T, 64, 128, 2, 8>>{1.1},  RatedTile<TensorTile<T, 64, 128, 1, 8>>{0.9}};
inline constexpr std::tuple kTilesF32x3{
    RatedTile<TensorTile<BFloat16, 128, 128, 1, 4, 2, /*kParts=*/3>>{0.78}};

// Rows of c per group of tiles. With this many rows, blocks that run at the same time cover roughly
// a square of c.
inline constexpr int kGroupedRows = 2048;

// The unit of time is what a 16-bit multiply-add takes on one SM at full speed; a microsecond has
// 3.9e6 units. kStart and kStartOfPair are the times to start and end a piece of work, for one
// block and for a cluster of two. kAdd is the time of another kernel, about 3 us. kPass is the
// fixed extra cost of tiles in parts. kApart is their relative extra cost, which is multiplied by
// the fraction of the last round that is left over.
inline constexpr double kStart = 1e7, kStartOfPair = 1.4e7, kAdd = 1e7, kPass = 1e7, kApart = 0.2;
// Tiles in parts are used only if the predicted time falls below this fraction of the best other
// time, because smaller gains are within the error of the model.
inline constexpr double kGain = 0.995;
// The time to fetch a row of a box that spans two lines of the L2: 2 ns, or 2.8 ns if the row also
// begins inside a 32-byte sector.
inline constexpr double kCutLine = 7.6e3, kCutSector = 1.1e4;

}  // namespace tuning

// Returns the part of a launch's parameters that depends only on the extents of c and the tile.
template <class C>
TensorWork WorkOfTiles(std::int64_t rows, std::int64_t columns) {
  constexpr int kRows = C::kRows * C::kCluster;
  TensorWork work{};
  work.rows = static_cast<int>(rows);
  work.columns = static_cast<int>(columns);
  work.row_tiles = static_cast<int>(CeilDiv(rows, kRows));
  const auto column_tiles = static_cast<int>(CeilDiv(columns, C::kColumns));
  const int group_rows = std::min(tuning::kGroupedRows / kRows, work.row_tiles);
  work.tiles = Divisor(work.row_tiles * column_tiles);
  work.group_tiles = Divisor(group_rows * column_tiles);
  work.group_rows = Divisor(group_rows);
  work.last_rows = Divisor((work.row_tiles - 1) % group_rows + 1);
  return work;
}

}  // namespace tessera
