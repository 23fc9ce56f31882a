// Code that `skinny` shares with the Matmul strategies that use mma.sync. In shared memory, an
// operand's k-tiles have the same layout as in device memory. They are copied in the background in
// 16-byte vectors, whether or not the operand is transposed. GroupedTile returns a block's position
// in c.
//
// Lanes can gather the fragments of an mma instruction from either layout, so nothing has to be
// transposed on the way in:
//
//     contiguous along k: a row of the k-tile is       along i: a row of the k-tile is
//     kDepth elements of one i                       kTile elements of one step along k
//
//          k ->                                           i ->
//       i  0 1 2 3 4 5 6 7   vectors of 16 bytes       k  0 1 2 3 4 5 6 7 ...
//       |  1 0 3 2 5 4 7 6                             |  1 0 3 2 5 4 7 6 ...
//       v  2 3 0 1 6 7 4 5                             v  2 3 0 1 6 7 4 5 ...
//
// Vector v of row r is stored at position v ^ (r mod 8) of the row. Otherwise, lanes that read the
// same vector of 8 rows would all use the same banks, because the length of a row is a multiple of
// 128 bytes, the width of all 32 banks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/matmul/tiles.cuh"

namespace tessera {

// The tile of a block, the tile of a warp, and the number of blocks per SM.
template <int kRows_, int kColumns_, int kWarpRows_, int kWarpColumns_, int kBlocks_>
struct WarpTiling {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kWarpsX = kColumns / kWarpColumns;
  static constexpr int kWarps = kWarpsX * (kRows / kWarpRows);
  static constexpr int kThreads = kWarpSize * kWarps;
};

// kShift: the vectors of row r are permuted by (r << kShift) mod 8. This number differs between
// rows that lanes read together.
template <class T, int kTile_, int kDepth_, bool kAlongK_, int kShift = 0>
struct KTile {
  static constexpr int kTile = kTile_, kDepth = kDepth_;
  static constexpr bool kAlongK = kAlongK_;
  static constexpr int kWidth = Pack<T>::kSize;
  static constexpr int kRows = kAlongK ? kTile : kDepth;
  static constexpr int kPitch = kAlongK ? kDepth : kTile;
  static constexpr int kVectors = kPitch / kWidth;  // in a row
  static constexpr int kElements = kRows * kPitch;
  static_assert(kVectors % 8 == 0 && (kVectors & (kVectors - 1)) == 0);

  // Returns where vector v of row r begins, in elements.
  static __device__ int At(int r, int v) { return r * kPitch + (v ^ (r << kShift & 7)) * kWidth; }
};

// Copies a thread's share of one operand's k-tiles, one after another, with zeros beyond the edges.
// All kThreads threads of the block copy together. Values that are the same for all threads are
// passed to each call, so that they stay in the kernel's parameters and take no registers.
template <class T, class S, int kThreads>
class KTileLoader {
  static constexpr int kWidth = S::kWidth;
  static constexpr int kRowStep = kThreads / S::kVectors;
  static_assert(kThreads % S::kVectors == 0);

 public:
  // The first k-tile begins at element [first, k_first] of the operand.
  __device__ KTileLoader(const Operand<T>& operand, std::int64_t first, std::int64_t k_first) {
    const std::int64_t i = first + (S::kAlongK ? Row() : Vector() * kWidth);
    const std::int64_t l = k_first + (S::kAlongK ? Vector() * kWidth : Row());
    next_ = operand.data + i * operand.stride + l * operand.k_stride;
    inside_ = static_cast<int>(min(operand.extent - first, std::int64_t{S::kTile})) -
              (S::kAlongK ? Row() : Vector() * kWidth);
  }

  // Starts copying the next k-tile. Its first `depth` steps are within k.
  __device__ void Copy(const Operand<T>& operand, bool packable, int depth, T* k_tile) {
    const std::int64_t row_step = kRowStep * (S::kAlongK ? operand.stride : operand.k_stride);
    const T* from = next_;
    next_ += S::kDepth * operand.k_stride;
    const int inside = S::kAlongK ? depth - Vector() * kWidth : inside_;
    const int rows = S::kAlongK ? inside_ : depth - Row();
    const int valid = max(0, min(inside, kWidth));
    if (packable) {
#pragma unroll
      for (int r = 0; r < S::kRows; r += kRowStep, from += row_step) {
        if (S::kRows % kRowStep != 0 && r + Row() >= S::kRows) break;
        CopyAsync<16>(k_tile + S::At(Row() + r, Vector()), from,
                      r < rows ? valid * static_cast<int>(sizeof(T)) : 0);
      }
    } else {
      CopyElements(from, row_step, rows, valid, k_tile);
    }
  }

 private:
  static __device__ int Row() { return static_cast<int>(threadIdx.x) / S::kVectors; }
  static __device__ int Vector() { return static_cast<int>(threadIdx.x) % S::kVectors; }

  // Copies elements that are not aligned to vectors. Pieces have at least 4 bytes if the alignment
  // of the elements allows it, because smaller pieces cannot be copied in the background. The
  // function is not inlined, because its registers would slow down the loop for aligned operands.
  __device__ __noinline__ void CopyElements(const T* from, std::int64_t row_step, int rows,
                                            int valid, T* k_tile) {
    constexpr int kPiece = sizeof(T) == 2 ? 2 : 1;  // elements
    static_assert(kRowStep % 2 == 0, "all rows of a thread are aligned alike");
    if (sizeof(T) >= 4 || reinterpret_cast<std::uintptr_t>(from) % 4 == 0) {
#pragma unroll 1
      for (int r = 0; r < S::kRows; r += kRowStep, from += row_step) {
        if (S::kRows % kRowStep != 0 && r + Row() >= S::kRows) break;
        T* const to = k_tile + S::At(Row() + r, Vector());
        const int left = r < rows ? valid : 0;
#pragma unroll
        for (int w = 0; w < kWidth; w += kPiece)
          CopyAsync<kPiece* int{sizeof(T)}>(
              to + w, from + w, max(0, min(kPiece, left - w)) * static_cast<int>(sizeof(T)));
      }
      return;
    }
    // The loads of two rows are in flight at the same time.
    constexpr int kAtOnce = 2;
#pragma unroll 1
    for (int r = 0; r < S::kRows; r += kAtOnce * kRowStep, from += kAtOnce * row_step) {
      Pack<T> packs[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int left = r + i * kRowStep < rows ? valid : 0;
#pragma unroll
        for (int w = 0; w < kWidth; ++w) packs[i].v[w] = w < left ? from[i * row_step + w] : T{};
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (r + i * kRowStep + Row() < S::kRows)
          StorePack(k_tile + S::At(Row() + r + i * kRowStep, Vector()), packs[i]);
    }
  }

  const T* next_;  // the source of the thread's first vector
  int inside_;     // number of values of i from next_ to the operand's end
};

// Loads a lane's square of four elements, [i, l], [i + 1, l], [i, l + 1] and [i + 1, l + 1], where
// i and l are even. In either layout, these are two vectors. Lane 4 g + t has i = 2 g and l = 2 t.
// Rows g and g + 8 of the f64 instruction are rows 2 g and 2 g + 1 here, and its steps t and t + 4
// are steps 2 t and 2 t + 1. The steps of both operands are reordered in the same way, so each sum
// has the same terms.
template <class S>
__device__ void LoadSquare(const double* k_tile, int i, int l, double (&square)[4]) {
  if constexpr (S::kAlongK) {
    const Pack<double> first = LoadPack(k_tile + S::At(i, l / 2));
    const Pack<double> second = LoadPack(k_tile + S::At(i + 1, l / 2));
    square[0] = first.v[0], square[1] = second.v[0];
    square[2] = first.v[1], square[3] = second.v[1];
  } else {
    const Pack<double> first = LoadPack(k_tile + S::At(l, i / 2));
    const Pack<double> second = LoadPack(k_tile + S::At(l + 1, i / 2));
    square[0] = first.v[0], square[1] = first.v[1];
    square[2] = second.v[0], square[3] = second.v[1];
  }
}

// A k-tile from which lanes load squares without bank conflicts.
template <int kTile, int kDepth, bool kAlongK>
using SquareKTile = KTile<double, kTile, kDepth, kAlongK, kAlongK ? 1 : 0>;

// The position of tile number `block` in c. Tiles are in the order that warp_tiled.cu shows: in
// groups of kGroup tile rows, column by column.
struct TilePlace {
  std::int64_t row, column;
};
template <int kGroup>
__device__ TilePlace GroupedTile(std::int64_t block, std::int64_t row_tiles,
                                 std::int64_t column_tiles) {
  const std::int64_t group_row = block / (kGroup * column_tiles) * kGroup;
  const std::int64_t in_group = block % (kGroup * column_tiles);
  const std::int64_t group_rows = min(row_tiles - group_row, std::int64_t{kGroup});
  return {group_row + in_group % group_rows, in_group / group_rows};
}

// Calls f(a, b), where each argument is std::true_type or std::false_type.
template <class F>
void DispatchLayouts(bool a_along_k, bool b_along_k, F&& f) {
  const auto b = [&](auto a) { b_along_k ? f(a, std::true_type{}) : f(a, std::false_type{}); };
  a_along_k ? b(std::true_type{}) : b(std::false_type{});
}

}  // namespace tessera
