// The tree along which the strategies `fixed_tree` and `compensated` sum. This is its only
// definition. Its shape depends only on the number of elements and the element size. Every grid,
// every GPU, the CPU and any division of the chunks among devices therefore give the same bits. To
// reproduce a result:
//
//   vector   16 bytes: V = 16 / size elements.
//   row      256 vectors: W = 256 V elements, 4096 bytes. Element i is in row i / W and, within
//            it, in column i mod W. Lane t owns the V columns V t, V t + 1, ...
//   chunk    TreeRows(n, size) consecutive rows. The last chunk and the last row may be short;
//            n = 0 is one empty chunk.
//   segment  64 rows of a chunk, counted from the beginning of the chunk. The last may be short.
//
//   1. A column folds its elements of one segment from top to bottom, starting with the identity,
//      in the narrow accumulator of its kind (kernels/same_bits/tree_columns.h).
//   2. The V columns of a lane are widened and folded as a halving tree: of count values, value i
//      is combined with value i + count / 2, then with i + count / 4, ..., i + 1.
//   3. A lane folds its values of the chunk's segments from first to last, starting with the
//      identity.
//   4. The 256 lanes fold as a halving tree, which gives the value of the chunk.
//   5. With more than one chunk, lane t folds the values of chunks t, t + 256, t + 512, ... in this
//      order, starting with the identity, and the 256 lanes fold as a halving tree.
//
//   V = 4, one segment      lane 0       lane 1               lane 255
//   row 0                 0  1  2  3   4  5  6  7   ...   1020 .. 1023
//   row 1              1024   ...                                 2047
//   ...                   |  |  |  |   |  |  |  |                |      1: down the columns
//                         `--'--'--'   `--'--'--'                |      2: across a lane
//                             `------------- 4: across the lanes-'
//
//   6. If the narrow accumulator is f32 and the result of a sum is not finite, everything is
//   computed again with double as the narrow accumulator.
//
// No multiplication is fused with an addition, unless a kind says so. Every NaN result is the quiet
// NaN with no other bits set.
//
// Columns and lanes without elements hold identities and are folded like the others, so the tree
// has no special cases. A term passes through at most 64 additions in the narrow type. In the wide
// type it passes through one addition for each segment of a chunk, one for every 256 chunks, and 16
// + log2 V more.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera {

inline constexpr int kTreeLanes = 256;
inline constexpr int kTreeVectorBytes = 16;
inline constexpr int kTreeRowBytes = kTreeLanes * kTreeVectorBytes;
inline constexpr int kTreeSegmentRows = 64;
// The maximum number of chunks of one array. The last block to start receives one value per chunk,
// 72 per lane.
inline constexpr std::int64_t kTreeMaxChunks = 72 * kTreeLanes;

// The division of an array into chunks.
struct Tree {
  std::int64_t n;       // elements
  std::int64_t chunk;   // elements per chunk: rows * W
  std::int64_t chunks;  // at least 1
};

// Returns the number of rows that n elements of `size` bytes form; the last row may be short.
constexpr std::int64_t TreeTotalRows(std::int64_t n, std::int64_t size) {
  const std::int64_t row = kTreeRowBytes / size;
  return n / row + (n % row != 0);
}

// Divides n elements of `size` bytes into chunks of `rows` rows.
constexpr Tree MakeTree(std::int64_t n, std::int64_t size, std::int64_t rows) {
  const std::int64_t total = TreeTotalRows(n, size);
  return {n, rows * (kTreeRowBytes / size), std::max<std::int64_t>(1, (total + rows - 1) / rows)};
}

// Returns the number of rows in a chunk of the fixed tree. An array of at most 8 rows is one chunk
// of 8, because one block folds it faster than two blocks could combine their results. Otherwise it
// is the first number of rows in this table that gives at most the number of chunks below it:
//
//   rows     4    8    16   28   60    124   252    508   ...
//   chunks   256  512  512  640  4608  4608  18432  18432   at most
//
// Short arrays have enough chunks for every SM to begin immediately. In long arrays, the beginnings
// of the chunks that are processed at the same time are an odd multiple of 4 rows apart. At
// distances that are powers of two, these chunks would use the same memory channels at the same
// time. The longest arrays, which several GPUs share, have more chunks. Each GPU runs its chunks in
// rounds, with one chunk for each block that its SMs hold. The last round takes as long as the
// others, even if few chunks are left for it (docs/notebook.md, "Chunks of the longest arrays").
constexpr std::int64_t TreeRows(std::int64_t n, std::int64_t size) {
  const std::int64_t total = TreeTotalRows(n, size);
  if (total <= 8) return 8;
  if (total <= 4 * 256) return 4;
  if (total <= 8 * 512) return 8;
  if (total <= 16 * 512) return 16;
  if (total <= 28 * 640) return 28;
  constexpr std::int64_t kFewChunks = 18 * kTreeLanes;
  std::int64_t rows = 60;
  while (total > rows * (rows < 252 ? kFewChunks : kTreeMaxChunks)) rows = 2 * rows + 4;
  return rows;
}

constexpr Tree FixedTree(std::int64_t n, std::int64_t size) {
  return MakeTree(n, size, TreeRows(n, size));
}

}  // namespace tessera
