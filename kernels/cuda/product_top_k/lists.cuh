// Sorted lists in the registers of a warp: lane l holds entries l, l + 32, l + 64, ... The lists
// are sorted by comparison networks as in bitonic.cuh. Comparisons within a lane need no shuffle.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"

namespace tessera {

// Orders every pair of entries that are `kStride` apart. Each lane has kRegs registers.
template <int kStride, class E, int kRegs>
__device__ void OrderPairs(E (&entries)[kRegs], int lane) {
  if constexpr (kStride >= kWarpSize) {
    constexpr int kApart = kStride / kWarpSize;
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      if ((i & kApart) != 0) continue;
      const E low = entries[i], high = entries[i + kApart];
      entries[i] = min(low, high);
      entries[i + kApart] = max(low, high);
    }
  } else {
    const bool first = (lane & kStride) == 0;
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      const E other = __shfl_xor_sync(kFullMask, entries[i], kStride);
      entries[i] = (entries[i] < other) == first ? entries[i] : other;
    }
  }
}

// Sorts pieces of 2 kStride entries, each of which is a bitonic sequence.
template <int kStride, class E, int kRegs>
__device__ void SortBitonicPieces(E (&entries)[kRegs], int lane) {
  OrderPairs<kStride>(entries, lane);
  if constexpr (kStride > 1) SortBitonicPieces<kStride / 2>(entries, lane);
}

// Sorts pieces of kSize entries whose two halves are sorted. Entry i of the first half of a piece
// is compared with its mirror image in the second half, entry kSize - 1 - i of the piece. Both
// halves are then bitonic sequences, which are sorted next.
template <int kSize, class E, int kRegs>
__device__ void MergeHalves(E (&entries)[kRegs], int lane) {
  if constexpr (kSize > kWarpSize) {
    constexpr int kPiece = kSize / kWarpSize;
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      const int other = i / kPiece * kPiece + kPiece - 1 - i % kPiece;
      if (other <= i) continue;
      const E low = entries[i], high = entries[other];
      const E low_mate = __shfl_xor_sync(kFullMask, high, kWarpSize - 1);
      const E high_mate = __shfl_xor_sync(kFullMask, low, kWarpSize - 1);
      entries[i] = min(low, low_mate);
      entries[other] = max(high, high_mate);
    }
  } else {
    const bool first = (lane & (kSize / 2)) == 0;
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      const E other = __shfl_xor_sync(kFullMask, entries[i], kSize - 1);
      entries[i] = (entries[i] < other) == first ? entries[i] : other;
    }
  }
  if constexpr (kSize > 2) SortBitonicPieces<kSize / 4>(entries, lane);
}

// SortPieces sorts pieces of kSize entries, and SortWarp sorts all entries, both in ascending
// order.
template <int kSize, class E, int kRegs>
__device__ void SortPieces(E (&entries)[kRegs], int lane) {
  if constexpr (kSize > 2) SortPieces<kSize / 2>(entries, lane);
  MergeHalves<kSize>(entries, lane);
}
template <class E, int kRegs>
__device__ void SortWarp(E (&entries)[kRegs], int lane) {
  SortPieces<kRegs * kWarpSize>(entries, lane);
}

// Replaces `best` with the best entries of `best` and `fresh`, sorted. REQUIRES: both lists are
// sorted, and `fresh` is not longer than `best`.
template <class E, int kBest, int kFresh>
__device__ void MergeIntoBest(E (&best)[kBest], const E (&fresh)[kFresh], int lane) {
  static_assert(kFresh <= kBest);
#pragma unroll
  for (int i = 0; i < kFresh; ++i) {
    E& place = best[kBest - 1 - i];
    place = min(place, __shfl_xor_sync(kFullMask, fresh[i], kWarpSize - 1));
  }
  SortBitonicPieces<kBest * kWarpSize / 2>(best, lane);
}

// Returns entry `at` of a list to all lanes.
template <class E, int kRegs>
__device__ E EntryAt(const E (&entries)[kRegs], int at) {
  E found = entries[0];
#pragma unroll
  for (int i = 0; i < kRegs; ++i) {
    const E of_register = __shfl_sync(kFullMask, entries[i], at % kWarpSize);
    if (at / kWarpSize == i) found = of_register;
  }
  return found;
}

}  // namespace tessera
