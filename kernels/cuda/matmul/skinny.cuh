// A block's tile in `skinny`, and the copies of the thin operand's k-tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/matmul/k_tiles.cuh"

namespace tessera::skinny {

inline constexpr int kMostVectors = 32;
inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / kWarpSize;
inline constexpr int kRowBytes = 128;  // a k-tile's extent along k

// kVectors: the number of vectors of the thin operand, rounded up.
template <class T_, int kVectors_>
struct Config {
  using T = T_;
  using Acc = ValueOf<T>;
  static constexpr int kVectors = kVectors_;
  // Whether tensor cores multiply 16-bit elements (kHalves) or f64 (kSquares).
  static constexpr bool kHalves = sizeof(T) == 2;
  static constexpr bool kSquares = sizeof(T) == 8 && kVectors >= 16;
  static constexpr bool kTensor = kHalves || kSquares;
  static constexpr int kWidth = Pack<T>::kSize;
  static constexpr int kDepth = kRowBytes / int{sizeof(T)};
  static constexpr int kTile = kHalves ? 64 : 128;
  // The number of sums per thread: its share of the tile or, without tensor cores, its share of a
  // warp's sums for the whole tile.
  static constexpr int kSums = kTensor ? kVectors / 2 : kTile / kWarpSize * kVectors;
  static constexpr int kBlocks = kVectors > 16 ? 1 : 2;
  static constexpr int kWide = kTile * kDepth, kThin = kVectors * kDepth;
  static constexpr int kStageBytes = (kWide + kThin) * int{sizeof(T)};
  static constexpr int kStages = std::min(8, 96 * 1024 / kStageBytes);
  static constexpr int kSharedBytes = kStages * kStageBytes;

  // The vectors are permuted according to the order in which lanes read them.
  template <bool kAlongK>
  using WideKTile = KTile<T, kTile, kDepth, kAlongK, kSquares && kAlongK ? 1 : 0>;
  using ThinKTile = KTile<T, kVectors, kDepth, true, kSquares ? 1 : 0>;
};

// Copies the thin operand's k-tiles as [vector][k], from either layout, with zeros beyond the
// edges. If the operand cannot be copied in vectors along k, a k-tile's elements stay in registers
// from one call to the next, so that no thread waits for their loads.
template <class C>
class ThinLoader {
  using T = typename C::T;
  static constexpr int kElements = C::kVectors * C::kDepth;
  static constexpr int kEach = kElements > kThreads ? kElements / kThreads : 1;

 public:
  __device__ ThinLoader(const Operand<T>& operand, bool packs, std::int64_t k_first,
                        std::int64_t k_end)
      : next_(k_first) {
    if (!packs) Load(operand, k_end);
  }

  __device__ void Copy(const Operand<T>& operand, bool packs, std::int64_t k_end, T* k_tile) {
    if (packs) {
      constexpr int kPacks = C::kDepth / C::kWidth;
      for (int v = static_cast<int>(threadIdx.x); v < C::kVectors * kPacks; v += kThreads) {
        const int i = v / kPacks, l = v % kPacks * C::kWidth;
        const std::int64_t left = i < operand.extent ? k_end - next_ - l : 0;
        const auto valid =
            static_cast<int>(max(std::int64_t{0}, min(left, std::int64_t{C::kWidth})));
        CopyAsync<16>(k_tile + C::ThinKTile::At(i, v % kPacks),
                      operand.data + i * operand.stride + next_ + l,
                      valid * static_cast<int>(sizeof(T)));
      }
      next_ += C::kDepth;
      return;
    }
    if (static_cast<int>(threadIdx.x) * kEach < kElements) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const Cell cell(operand, e);
        k_tile[C::ThinKTile::At(cell.i, cell.l / C::kWidth) + cell.l % C::kWidth] = waiting_[e];
      }
    }
    next_ += C::kDepth;
    Load(operand, k_end);
  }

 private:
  // The position of the thread's element e. The thread's elements are adjacent along the dimension
  // in which memory is contiguous.
  struct Cell {
    int i, l;
    __device__ Cell(const Operand<T>& operand, int e) {
      const int at = static_cast<int>(threadIdx.x) * kEach + e;
      const bool along_k = operand.k_stride == 1;
      i = along_k ? at / C::kDepth : at % C::kVectors;
      l = along_k ? at % C::kDepth : at / C::kVectors;
    }
  };

  __device__ void Load(const Operand<T>& operand, std::int64_t k_end) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const Cell cell(operand, e);
      const std::int64_t l = next_ + cell.l;
      waiting_[e] = cell.i < operand.extent && l < k_end
                        ? operand.data[cell.i * operand.stride + l * operand.k_stride]
                        : T{};
    }
  }

  std::int64_t next_;  // the first step along k of the next k-tile
  T waiting_[kEach];
};

}  // namespace tessera::skinny
