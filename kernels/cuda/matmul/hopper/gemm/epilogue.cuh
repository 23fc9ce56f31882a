// The epilogue of the tensor kernel, which moves sums from registers through shared memory to c.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/matmul/hopper/gemm/tile.cuh"

namespace tessera {

// Packs two sums into a register as 16-bit elements.
template <class T>
__device__ std::uint32_t PackPair(float low, float high) {
  std::uint32_t bits;
  if constexpr (std::is_same_v<T, BFloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    std::memcpy(&bits, &pair, sizeof bits);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    std::memcpy(&bits, &pair, sizeof bits);
  }
  return bits;
}

// Copies a consumer's sums for one box (64 rows of 128 bytes) to shared memory. `thread` is the
// calling thread's index in its warpgroup.
template <class O, class Sum>
__device__ void StageBox(const Sum* sums, int thread, std::uint32_t to) {
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  if constexpr (sizeof(O) == 2) {
    const int r = warp * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* const s = sums + j * 8;
      StoreMatrices(to + r * 128 + ((2 * j + lane / 16) ^ r % 8) * 16, PackPair<O>(s[0], s[1]),
                    PackPair<O>(s[2], s[3]), PackPair<O>(s[4], s[5]), PackPair<O>(s[6], s[7]));
    }
  } else {
    // Stores a row's pairs at vectors 2 j and 2 j + 1. Odd rows use another order, so that the four
    // rows of half a warp cover all banks.
    const int r = warp * 16 + lane / 4;
    const bool odd = r % 2 != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Sum* const s = sums + 2 * half;
        const int pack = 2 * (odd ? j ^ 2 : j) + lane % 4 / 2;
        StorePair(to + (r + 8 * half) * 128 + (pack ^ r % 8) * 16 + lane % 2 * 8,
                  odd ? s[4 * (j ^ 2)] : s[4 * j], odd ? s[4 * (j ^ 2) + 1] : s[4 * j + 1]);
      }
    }
  }
}

// Like StageBox, but copies the sums of MultiplyTurned for 64 columns to two adjacent boxes of c.
// The 16 rows of a warp's sums are columns of one of the boxes. Half of the warp's lanes process
// pairs of rows of c in reverse order, so that the accesses cover all banks.
template <int kBoxBytes>
__device__ void StageTurned(const float* sums, int thread, std::uint32_t to) {
  const int warp = thread / kWarpSize, lane = thread % kWarpSize, half = lane / 16;
  to += warp / 2 * kBoxBytes + lane / 4 % 4 * 4;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const s = sums + 4 * j + i / 2 * 2;
      const int y = 8 * j + 2 * (lane % 4) + (i % 2 ^ half);
      const int pack = 4 * half + warp % 2 * 2 + i / 2;
      StoreShared(to + y * 128 + (pack ^ y % 8) * 16, half == i % 2 ? s[0] : s[1]);
    }
  }
}

// Writes a consumer's 64 rows of results at [row, column] to c, except for the part outside c. The
// results go through shared memory, a few boxes with rows of 128 bytes at a time, and TMA writes
// whole lines from there. O: C::Sum or C::T. kTurn: whether the results come from MultiplyTurned
// and belong at [column, row] of c.
template <class C, class O, bool kTurn, int kCount>
__device__ void StoreTile(const typename C::Sum (&d)[kCount], const CUtensorMap& c_map,
                          std::uint32_t staging, int row, int column, int split) {
  constexpr int kSize = static_cast<int>(sizeof(O));
  constexpr int kWidth = 128 / kSize;  // columns of a box
  constexpr int kAll = C::kColumns / kWidth;
  constexpr int kBoxSums = kCount / kAll;
  // The boxes of a tile are side by side. The boxes of a turned tile form pairs, and each pair is
  // below the previous one.
  static_assert(!kTurn || (kSize == 4 && C::kBoxes == 2));
  const auto box_row = [&](int box) { return kTurn ? column + box / 2 * C::kGroupRows : row; };
  const auto box_column = [&](int box) {
    return kTurn ? row + box % 2 * kWidth : column + box * kWidth;
  };
  const int thread = static_cast<int>(threadIdx.x) % C::kWarpgroup;
  const int barrier =
      BarrierOf<C>(Meeting::kStaging, static_cast<int>(threadIdx.x) / C::kWarpgroup);
#pragma unroll
  for (int first = 0; first < kAll; first += C::kBoxes) {
    if (thread == 0) WaitForStoresToRead();
    NamedBarrier(barrier, C::kWarpgroup);  // the staging memory is free
    if constexpr (kTurn) {
      StageTurned<C::kBoxBytes>(d + first * kBoxSums, thread, staging);
    } else {
#pragma unroll
      for (int box = first; box < min(first + C::kBoxes, kAll); ++box)
        StageBox<O>(d + box * kBoxSums, thread, staging + (box - first) * C::kBoxBytes);
    }
    FenceForCopyEngine();
    NamedBarrier(barrier, C::kWarpgroup);  // the results are in the staging memory
    if (thread == 0) {
#pragma unroll
      for (int box = first; box < min(first + C::kBoxes, kAll); ++box)
        StoreBox(&c_map, box_column(box), box_row(box), split,
                 staging + (box - first) * C::kBoxBytes);
      CommitStores();
    }
  }
}

}  // namespace tessera
