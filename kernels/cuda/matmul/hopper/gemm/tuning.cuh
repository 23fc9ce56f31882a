// What was tuned for Hopper, in one place: the tiles that each strategy chooses among, and the
// figures of the model that chooses (plan.cuh). Rates and figures are such that the model prefers
// what was faster on one H200 (CUDA 13.0, November 2026), for 16 bits in 75 shapes with each tile,
// whole, in parts and with k cut. Another GPU needs its own.
#pragma once

#include <tuple>

#include "kernels/cuda/matmul/hopper/gemm/tile.cuh"

namespace tessera {

// A tile, and about the share of the tensor cores' 16-bit speed that its main loop reaches.
template <class C>
struct RatedTile {
  double rate;
};

namespace tuning {

// Pairs of blocks share what they fetch: that matters to many tiles, and to small ones along a long
// k. Rows, columns, blocks of a cluster, stages.
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
inline constexpr std::tuple kTilesF32x3{
    RatedTile<TensorTile<BFloat16, 128, 128, 1, 4, 2, /*kParts=*/3>>{0.78}};

// Row tiles times rows of a group: blocks that run at the same time cover about a square of c.
inline constexpr int kGroupedRows = 2048;

// In multiply-adds of 16 bits that one SM could do, 3.9e6 a microsecond: the beginning and the end
// of a piece of work, of one block and of a pair; another kernel, about 3 us; and what tiles in
// parts cost besides, of which kApart grows with the share of the last round that is left over.
inline constexpr double kStart = 1e7, kStartOfPair = 1.4e7, kAdd = 1e7, kPass = 1e7, kApart = 0.2;
// What is predicted to be better has to be so by this factor: the model is no better than that.
inline constexpr double kGain = 0.995;
// A row of a box that lies across two lines of the L2: 2 ns, and 2.8 where sectors of 32 bytes are
// cut, too.
inline constexpr double kCutLine = 7.6e3, kCutSector = 1.1e4;

}  // namespace tuning
}  // namespace tessera
