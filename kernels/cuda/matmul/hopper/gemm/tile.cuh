// A block's tile in the tensor kernel: its shape, its k-tiles in shared memory, and the parameters
// of a launch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/matmul/hopper/gemm/stream_k.h"
#include "kernels/cuda/matmul/hopper/ptx/ptx.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/problem/matmul.h"

namespace tessera {

// The tile of c that a block computes at one time. T_: BFloat16, Half, Tf32 or an 8-bit integer.
// kCluster_: the number of blocks, one below the other, that share the columns of b that they load.
// kParts_: the number of matrices that an operand is split into (see `tensor_f32x3`). kBatch_:
// whether the pieces of a launch are products of consecutive matrices in memory (see `ozaki_f64`)
// instead of pieces of k.
template <class T_, int kRows_, int kColumns_, int kCluster_, int kStages_, int kBoxes_ = 2,
          int kParts_ = 1, bool kBatch_ = false>
struct TensorTile {
  using T = T_;
  using Sum = std::conditional_t<sizeof(T) == 1, std::int32_t, float>;
  static constexpr bool kBatch = kBatch_;
  static constexpr int kRows = kRows_, kColumns = kColumns_, kCluster = kCluster_;
  static constexpr int kStages = kStages_, kParts = kParts_;
  static constexpr int kProducts = kParts * (kParts + 1) / 2;  // products of parts
  static constexpr int kWarpgroup = 128, kGroupRows = 64;      // threads, and rows of one wgmma
  static constexpr int kConsumers = kRows / kGroupRows;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  // Bytes per row of a k-tile in shared memory, and elements along k per k-tile.
  static constexpr int kRowBytes = kParts == 1 ? 128 : 64;
  static constexpr int kDepth = kRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kStepBytes = 32;  // bytes along k per wgmma
  static constexpr int kPartA = kRows * kRowBytes, kPartB = kColumns * kRowBytes;
  static constexpr int kBytesA = kParts * kPartA, kBytesB = kParts * kPartB;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  // Elements are fetched in boxes. Where k goes along the rows, a box has kGroupRows indices of m
  // or n, one per row. Where k goes across the rows, each row has kMnWidth of these indices.
  static constexpr int kMnWidth = 128 / static_cast<int>(sizeof(T)), kMnBytes = kDepth * 128;
  static constexpr int BoxWidth(bool mn_major) { return mn_major ? kMnWidth : kGroupRows; }
  static constexpr int BoxBytes(bool mn_major) {
    return mn_major ? kMnBytes : kGroupRows * kRowBytes;
  }
  // A consumer stores its results kBoxes boxes at a time. The rows of a box have 128 bytes.
  static constexpr int kBoxes = kBoxes_;
  static constexpr int kBoxBytes = kGroupRows * 128;
  static constexpr int kStagingBytes = kBoxes * kBoxBytes;
  static constexpr int kAlignment = 1024;  // required by the swizzle pattern
  static constexpr int kSharedBytes =
      kAlignment + kStages * kStageBytes + kConsumers * kStagingBytes;
};

// Operands in several parts are multiplied by this scale, and the result is divided by its square.
// With this scale, the last bit of the smallest f32, 2^-149, becomes the smallest normal bf16, so
// no part underflows.
inline constexpr float kPartsScale = 0x1p23f;

// Whether the tile is the transpose of a tile of c (see MultiplyTurned). This is the case for f32
// with k across the rows of a.
template <class C, bool kMnA>
inline constexpr bool kIsTurned = std::is_same_v<typename C::T, Tf32>&& kMnA;

// Named barriers of a block: one of each kind for every consumer. Barrier 0 is __syncthreads.
enum class Meeting { kStaging, kSumsStored, kMayLoad, kTurn, kCount };

template <class C>
__device__ int BarrierOf(Meeting meeting, int consumer) {
  static_assert(static_cast<int>(Meeting::kCount) * C::kConsumers < 16);
  return 1 + static_cast<int>(meeting) * C::kConsumers + consumer;
}

// The launch parameters that all blocks receive.
struct TensorWork {
  int rows, columns;  // extents of c, or of its transpose if that is computed
  // Tiles here are cluster tiles, of kCluster * kRows x kColumns. A group consists of several rows
  // of tiles.
  int row_tiles;
  Divisor tiles, group_tiles;     // tiles in c, and tiles in a group
  Divisor group_rows, last_rows;  // rows of tiles in a group, and in the last group
  Sharing sharing;                // how clusters divide the tiles, or the pieces of k of all tiles
  int k_tiles;                    // along k
  void* partials;                 // [blocks, kRows * kColumns] sums, see PassMessages
  std::uint32_t* written;         // [blocks, kConsumers], flags for partials; 0 between launches
  int steps;                      // steps in which blocks are kept abreast, see abreast.cuh
  std::uint32_t* steps_of_all;    // the counter of these steps
  bool floats;                    // whether results are stored as f32, not as T
  unsigned* nonfinite;            // with several parts: set if an element of c is infinite or NaN
};

// The position of one piece of work: the cluster's tile, and its k-tiles.
struct TensorPlace {
  int row_tile, column_tile, split, first_k_tile, k_tiles;

  __device__ TensorPlace(const TensorWork& work, const Piece& piece) {
    split = work.tiles.Quotient(piece.tile);
    const int tile = piece.tile - split * work.tiles.value();
    const int group = work.group_tiles.Quotient(tile);
    const int in_group = tile - group * work.group_tiles.value();
    const int first_row = group * work.group_rows.value();
    const Divisor rows =
        first_row + work.group_rows.value() <= work.row_tiles ? work.group_rows : work.last_rows;
    column_tile = rows.Quotient(in_group);
    row_tile = first_row + in_group - column_tile * rows.value();
    first_k_tile = split * work.sharing.k_tiles + piece.first;
    k_tiles = min(work.k_tiles - first_k_tile, piece.k_tiles);
  }
};

}  // namespace tessera
