// A block's tile in `skinny_tma`: its shape, its k-tiles in shared memory, and the parameters of a
// launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/matmul/hopper/strategy.cuh"

namespace tessera::skinny_tma {

inline constexpr int kMostVectors = 32;
inline constexpr int kMostBlocks = 8;  // per cluster
inline constexpr int kBoxRow = 128;    // bytes per row of a box that TMA swizzles
inline constexpr int kSteps = 4;       // steps along k per lane at a time, without tensor cores

// A block's tile, and how it is fetched. It has the members that TensorPipeline requires.
template <class T_, int kVectors_, bool kAlongK_, bool kThinAlongK_ = true>
struct Tile {
  using T = T_;
  static constexpr int kVectors = kVectors_;  // vectors of the small operand, rounded up
  // Whether k is contiguous in the large and in the small operand.
  static constexpr bool kAlongK = kAlongK_, kThinAlongK = kThinAlongK_;
  static constexpr bool kHalves = sizeof(T) == 2;

  // The large operand's part of a k-tile: 256 bytes along k for each row of the tile.
  static constexpr int kWide = 128;
  static constexpr int kBytesA = 32 * 1024;
  static constexpr int kDepth = kBytesA / kWide / int{sizeof(T)};
  // A box has kBoxRow bytes per row, except for f32 with k across the rows. That layout needs no
  // swizzle, so one box with longer rows is enough.
  static constexpr bool kOneBox = !kAlongK && !kHalves;
  static constexpr int kWideBoxes =
      kOneBox ? 1 : (kAlongK ? kDepth : kWide) * int{sizeof(T)} / kBoxRow;
  static constexpr int kWideBoxRows = kAlongK ? kWide : kDepth;
  static constexpr int kWideBoxRowBytes = kOneBox ? kWide * int{sizeof(T)} : kBoxRow;
  static constexpr int kWideBoxBytes = kBytesA / kWideBoxes;

  // The small operand's part of a k-tile.
  static constexpr int kThinBoxes = kThinAlongK ? kDepth * int{sizeof(T)} / kBoxRow : 1;
  static constexpr int kThinBoxRows = kThinAlongK ? kVectors : kDepth;
  static constexpr int kThinBoxRowBytes = kThinAlongK ? kBoxRow : kVectors * int{sizeof(T)};
  static constexpr int kThinBoxBytes = kThinBoxRows * kThinBoxRowBytes;
  static constexpr int kBytes = kBytesA + kThinBoxes * kThinBoxBytes;

  static constexpr int kAlignment = 1024;  // required of a swizzled box in shared memory
  static constexpr int kStageBytes = (kBytes + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr int kConsumers = 8, kCluster = 1;  // consumers are warps
  static constexpr int kMultiplying = kConsumers * kWarpSize;
  static constexpr int kThreads = kMultiplying + 128;  // registers move between whole warpgroups
  // Whether the sums fit in registers only if the fetching warpgroup releases some.
  static constexpr bool kMovesRegisters = !kHalves && kVectors == 32;

  // How the warps divide a k-tile.
  static constexpr int kWarpRows = kHalves ? kWide / kConsumers : kSteps * kWarpSize;
  static constexpr int kWarpsWide = kWide / kWarpRows, kWarpsK = kConsumers / kWarpsWide;
  static constexpr int kSums = kHalves ? kWarpRows / 16 * kVectors / 2 : kSteps * kVectors;

  // Cells in which warps that divide a k-tile along k add their sums, a few vectors at a time.
  static constexpr int kAtOnce = std::min(kVectors, 4);
  static constexpr int kCellBytes = kWarpsK == 1 ? 0 : kWarpsK * kAtOnce * kWide * 4;
  // The number of results in a tile. A block receives about as many sums from its cluster.
  static constexpr int kResults = kVectors * kWide;
  static constexpr int kExtraBytes = kAlignment + kCellBytes + (kResults + kMostBlocks) * 4;
  static constexpr int kStages = std::min(8, (226 * 1024 - kExtraBytes) / kStageBytes);
  static constexpr int kSharedBytes = kExtraBytes + kStages * kStageBytes;
};

// The launch parameters that all blocks receive.
template <class Out>
struct Work {
  int tiles, k_tiles;  // k_tiles is per tile
  int wide, vectors;   // extents of the operands
  Out* c;
  std::int64_t wide_stride, thin_stride;  // of c

  __device__ void Store(std::int64_t row, int vector, float sum) const {
    if (row < wide && vector < vectors)
      c[row * wide_stride + vector * thin_stride] = static_cast<Out>(sum);
  }
};

// A block's share of its cluster's tiles: k-tiles [first, end) of each.
struct Share {
  int rank, blocks;  // in the cluster
  int tile, step;    // the first tile, and the distance to the next
  int first, end;

  template <class Out>
  __device__ explicit Share(const Work<Out>& work)
      : rank(static_cast<int>(ClusterRank())),
        blocks(static_cast<int>(ClusterSize())),
        tile(static_cast<int>(blockIdx.x) / blocks),
        step(static_cast<int>(gridDim.x) / blocks),
        first(work.k_tiles * rank / blocks),
        end(work.k_tiles * (rank + 1) / blocks) {}
};

}  // namespace tessera::skinny_tma
