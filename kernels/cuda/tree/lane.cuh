// Folds one lane of a chunk of the tree that kernels/same_bits/fixed_tree.h defines. A thread loads
// the vectors of its columns and folds them.
//
// In a row, a lane's columns are one 16-byte vector. Adjacent lanes have adjacent vectors, so a
// warp reads 512 bytes at a time. A thread starts the loads of several rows (64 bytes,
// kBatchVectors) before it uses the first. 1024 threads per SM then have 64 KiB in flight; an
// H200's memory requires about 48 KiB (latency times bandwidth). If an operand is not aligned to 16
// bytes, a thread loads the two aligned vectors that its vector straddles and shifts them. An
// adjacent thread loads one of these two as well, so one of the loads hits the L1 cache. There are
// no scalar loads, for any offset. Two operands with the same misalignment need neither the second
// load nor the shift (see FoldLane).
//
// Invariant: column k of a thread holds the fold, from top to bottom, of the elements of one column
// in the rows of the segment that the thread has passed. A load touches only 16-byte vectors that
// hold elements of the array.
//
// The .cu files that include this file are compiled with -fmad=false.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/common/loads.cuh"
#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/tree/tree.h"
#include "kernels/same_bits/tree_columns.h"

namespace tessera {

// The kernel's arguments other than the operands.
struct TreeWork {
  Tree tree;
  ReduceOp op;
  bool mirror;
  Mailbox mailbox;
  Scalar* result;
  std::int64_t first, end;  // the chunks of this launch
  unsigned last_ticket;     // receiver's ticket: one less than the number of blocks in all launches
};

template <class C>
struct TreeOperands {
  const typename C::Element* x[C::kOperands];
};

// --- Vectors ---

template <class T>
struct alignas(kTreeVectorBytes) TreeVectorOf {
  T element[kTreeVector<T>];
};

// The data loaded for one vector: the vector itself or, unless kAligned, the two aligned vectors
// that it straddles. These also contain bytes before and after the vector.
template <bool kAligned>
struct Loaded {
  uint4 part[kAligned ? 1 : 2];
};

template <bool kAligned>
__device__ Loaded<kAligned> LoadVector(const void* address) {
  constexpr Load kLoad = kAligned ? Load::kOnce : Load::kAgain;
  if constexpr (kAligned) {
    return {{LoadAligned<kLoad>(address)}};
  } else {
    const auto* lo = reinterpret_cast<const unsigned char*>(
        reinterpret_cast<std::uintptr_t>(address) & ~std::uintptr_t{kTreeVectorBytes - 1});
    return {{LoadAligned<kLoad>(lo), LoadAligned<kLoad>(lo + kTreeVectorBytes)}};
  }
}

// Returns the vector. `shift` is its address modulo 16.
template <class T, bool kAligned>
__device__ TreeVectorOf<T> VectorIn(const Loaded<kAligned>& loaded, unsigned shift) {
  uint4 words = loaded.part[0];
  if constexpr (!kAligned) words = Realigned<sizeof(T)>(loaded.part[0], loaded.part[1], shift);
  TreeVectorOf<T> v;
  std::memcpy(&v, &words, sizeof v);
  return v;
}

// --- Columns ---

template <class C, class V>
__device__ void StepElement(typename C::Column& column, const V (&v)[C::kOperands], int k, int row,
                            bool mirror) {
  if constexpr (C::kOperands == 2) {
    C::Step(column, v[0].element[k], v[1].element[k], row, mirror);
  } else {
    C::Step(column, v[0].element[k], row, mirror);
  }
}

// Folds the elements [rest, end) of a lane's last vector, which is incomplete. `row` is the
// vector's row within the segment.
template <class C>
__device__ void FoldRest(const TreeOperands<C>& in, const TreeWork& work,
                         typename C::Column (&column)[kTreeVector<typename C::Element>],
                         std::int64_t rest, std::int64_t end, int row) {
  constexpr int V = kTreeVector<typename C::Element>;
#pragma unroll
  for (int k = 0; k < V; ++k) {
    if (rest + k >= end) break;
    TreeVectorOf<typename C::Element> v[C::kOperands];
#pragma unroll
    for (int o = 0; o < C::kOperands; ++o) v[o].element[k] = in.x[o][rest + k];
    if (row == 0) column[k] = C::Start(v[0].element[k]);
    StepElement<C>(column[k], v, k, row, work.mirror);
  }
}

// Returns the value of a lane's columns in one segment. The first column begins at element `first`,
// and the segment ends before `end`.
template <class C>
__device__ typename C::Wide FoldColumns(
    const typename C::Column (&column)[kTreeVector<typename C::Element>], std::int64_t first,
    std::int64_t end) {
  constexpr int V = kTreeVector<typename C::Element>;
  typename C::Wide wide[V];
#pragma unroll
  for (int k = 0; k < V; ++k) wide[k] = C::Widen(column[k], ColumnSpan{first + k, end});
#pragma unroll
  for (int half = V / 2; half > 0; half /= 2)
#pragma unroll
    for (int k = 0; k < half; ++k) wide[k] = C::Combine(wide[k], wide[k + half]);
  return wide[0];
}

// How the addresses of the operands are aligned: all to 16 bytes, all with the same remainder
// modulo 16, or arbitrarily.
enum class Placement { kAligned, kAlike, kAny };

// The vectors of one lane of the chunk [begin, end).
//
// kAlike: every load still reads an aligned vector. That vector begins `ahead` elements before the
// lane's own vector, so the first `ahead` columns that a thread folds belong to the previous lane.
// At the end of a segment the threads exchange these columns. The elements before a row's first
// column are the end of the previous row, so lane 0 folds the last `ahead` columns one row late.
//
//   ahead 1    lane 0            lane 1           lane 255
//   row 0      .   0  1  2       3  4  5  6  ...  1019 .. 1022
//   row 1    1023 1024 ...      1027   ...
//   row 2    2047  ...
template <class C, Placement kPlacement>
struct LaneVectors {
  using T = typename C::Element;
  using Columns = typename C::Column[kTreeVector<T>];
  static constexpr int V = kTreeVector<T>;
  static constexpr int kRow = kTreeRow<T>;
  static constexpr int O = C::kOperands;
  static constexpr bool kWhole = kPlacement != Placement::kAny;
  static constexpr bool kAlike = kPlacement == Placement::kAlike;

  int ahead;
  int late;            // number of columns that are one row late
  std::int64_t first;  // the element at which the first vector begins
  int rows;            // number of rows with a whole vector
  int all;             // number of rows, including an incomplete last one
  const unsigned char* next[O];
  unsigned shift[O];

  __device__ __forceinline__ LaneVectors(const TreeOperands<C>& in, const TreeWork& work,
                                         std::int64_t begin, std::int64_t end, int lane) {
    ahead = kAlike ? static_cast<int>(reinterpret_cast<std::uintptr_t>(in.x[0]) % kTreeVectorBytes /
                                      sizeof(T))
                   : 0;
    late = lane == 0 ? ahead : 0;
    first = begin - ahead + lane * V;
    // The last element at which the lane can load a whole vector. With kAny, the array must
    // continue for another vector, because a load also reads the next aligned vector. Outside the
    // array it then reads only bytes of a 16-byte vector that also holds elements of the array.
    const std::int64_t limit = (kWhole ? end : min(end, work.tree.n - V)) - V;
    rows = first > limit ? 0 : static_cast<int>((limit - first) / kRow) + 1;
    all = kAlike ? static_cast<int>((end - begin + kRow - 1) / kRow) : rows + (Rest() < end);
#pragma unroll
    for (int o = 0; o < O; ++o) {
      next[o] = reinterpret_cast<const unsigned char*>(in.x[o] + first);
      shift[o] = reinterpret_cast<std::uintptr_t>(next[o]) % kTreeVectorBytes;
    }
  }

  // Returns the element after the whole vectors. At most one vector is left, and it may be
  // incomplete. Its elements are loaded one by one.
  __device__ std::int64_t Rest() const { return first + std::int64_t{rows} * kRow; }

  // Restarts the late columns: their element in the first row belongs to the segment above.
  __device__ __forceinline__ void ForgetRowAbove(Columns& column) const {
#pragma unroll
    for (int k = 0; k < V; ++k)
      if (k < late) column[k] = C::Start(T{});
  }

  // Folds the next kCount rows, the first of which is `row`, of the segment that begins at row
  // `top`. There must be no branch between the loads of a batch and their use. Otherwise the
  // compiler moves the loads past the branch, where each load waits for the previous one (VARIANCE
  // of f32 took 1.8 times as long).
  template <int kCount>
  __device__ __forceinline__ void FoldRows(Columns& column, int row, int top, bool mirror) {
    Loaded<kWhole> batch[kCount][O];
#pragma unroll
    for (int j = 0; j < kCount; ++j)
#pragma unroll
      for (int o = 0; o < O; ++o) batch[j][o] = LoadVector<kWhole>(next[o] + j * kTreeRowBytes);
#pragma unroll
    for (int o = 0; o < O; ++o) next[o] += kCount * kTreeRowBytes;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      TreeVectorOf<T> v[O];
#pragma unroll
      for (int o = 0; o < O; ++o) v[o] = VectorIn<T, kWhole>(batch[j][o], shift[o]);
      if (j == 0 && row == top) {
#pragma unroll
        for (int k = 0; k < V; ++k) column[k] = C::Start(v[0].element[k]);
      }
#pragma unroll
      for (int k = 0; k < V; ++k) StepElement<C>(column[k], v, k, row - top + j, mirror);
      if (kAlike && j == 0 && row == top) ForgetRowAbove(column);
    }
  }

  // kAlike: ends the segment [top, bottom) and gives each thread the columns of its own lane. All
  // threads of the block call it.
  __device__ __forceinline__ void ExchangeColumns(const TreeOperands<C>& in, const TreeWork& work,
                                                  Columns& column, int top, int bottom,
                                                  std::int64_t end, int lane) const {
    // After the last row of a segment, only the late columns have an element left.
    const bool full = bottom == top + kTreeSegmentRows;
    const std::int64_t from = first + std::int64_t{bottom} * kRow;
    const std::int64_t until = full ? min(end, from + late) : end;
    if (bottom >= top && from < until) {
      FoldRest<C>(in, work, column, from, until, bottom - top);
      if (bottom == top) ForgetRowAbove(column);
    }
    __shared__ typename C::Column columns[kRow];
    __syncthreads();  // columns of the previous segment have been read
#pragma unroll
    for (int k = 0; k < V; ++k) columns[(lane * V + k - ahead) & (kRow - 1)] = column[k];
    __syncthreads();  // columns are written
#pragma unroll
    for (int k = 0; k < V; ++k) column[k] = columns[lane * V + k];
  }
};

// Returns the value of one lane of the chunk [begin, end). With kAlike, all threads of the block
// call it, each with lane = threadIdx.x.
template <class C, Placement kPlacement>
__device__ typename C::Wide FoldLane(const TreeOperands<C>& in, const TreeWork& work,
                                     std::int64_t begin, std::int64_t end, int lane) {
  using Vectors = LaneVectors<C, kPlacement>;
  constexpr int V = Vectors::V;
  constexpr int kRow = Vectors::kRow;
  constexpr int kRows = kBatchVectors / C::kOperands;
  Vectors vectors(in, work, begin, end, lane);
  typename C::Wide total = C::Identity();
#pragma unroll 1
  for (int top = 0; top < vectors.all; top += kTreeSegmentRows) {
    typename Vectors::Columns column;
#pragma unroll
    for (int k = 0; k < V; ++k) column[k] = C::Start(typename C::Element{});
    const int bottom = min(vectors.rows, top + kTreeSegmentRows);
    int row = top;
#pragma unroll 1
    for (; row + kRows <= bottom; row += kRows)
      vectors.template FoldRows<kRows>(column, row, top, work.mirror);
#pragma unroll 1
    for (; row < bottom; ++row) vectors.template FoldRows<1>(column, row, top, work.mirror);
    if constexpr (Vectors::kAlike) {
      vectors.ExchangeColumns(in, work, column, top, bottom, end, lane);
    } else if (vectors.rows < vectors.all && vectors.rows - top < kTreeSegmentRows) {
      FoldRest<C>(in, work, column, vectors.Rest(), end, vectors.rows - top);
    }
    const std::int64_t at = begin + lane * V + std::int64_t{top} * kRow;
    const std::int64_t stop = min(end, begin + std::int64_t{top + kTreeSegmentRows} * kRow);
    total = C::Combine(total, FoldColumns<C>(column, at, stop));
  }
  return total;
}

// --- Short chunks ---

// The largest number of rows in a chunk for which FoldShort has enough registers.
inline constexpr int kShortRows = 8;
static_assert(kShortRows <= kTreeSegmentRows);

// Like FoldLane, for chunk `number` with up to kRows rows. All loads are issued before the first is
// used. Operands are aligned, and each thread has one lane.
template <class C, int kRows = kShortRows>
__device__ typename C::Wide FoldShortLane(const TreeOperands<C>& in, const TreeWork& work,
                                          int number) {
  using T = typename C::Element;
  using Wide = typename C::Wide;
  constexpr int V = kTreeVector<T>;
  constexpr int kRow = kTreeRow<T>;
  constexpr int kHalf = kRows / 2;
  constexpr int O = C::kOperands;
  const int chunk = static_cast<int>(work.tree.chunk);
  const int begin = number * chunk;
  const int end = min(static_cast<int>(work.tree.n), begin + chunk);
  const int first = begin + static_cast<int>(threadIdx.x) * V;
  const int rows = end - first < V ? 0 : (end - first - V) / kRow + 1;

  TreeVectorOf<T> batch[kRows][O];
  const auto load = [&](int j) {
#pragma unroll
    for (int o = 0; o < O; ++o) {
      if (j < rows) batch[j][o] = VectorIn<T>(LoadVector<true>(in.x[o] + first + j * kRow), 0);
    }
  };
#pragma unroll
  for (int j = 0; j < kHalf; ++j) load(j);
  const bool more = end - begin > kHalf * kRow;
  if (more) {
#pragma unroll
    for (int j = kHalf; j < kRows; ++j) load(j);
  }

  typename C::Column column[V];
#pragma unroll
  for (int k = 0; k < V; ++k) column[k] = C::Start(rows > 0 ? batch[0][0].element[k] : T{});
  const auto step = [&](int j) {
    if (j < rows) {
#pragma unroll
      for (int k = 0; k < V; ++k) StepElement<C>(column[k], batch[j], k, j, work.mirror);
    }
  };
#pragma unroll
  for (int j = 0; j < kHalf; ++j) step(j);
  if (more) {
#pragma unroll
    for (int j = kHalf; j < kRows; ++j) step(j);
  }
  const int rest = first + rows * kRow;
  if (rest < end) FoldRest<C>(in, work, column, rest, end, rows);
  return C::Combine(C::Identity(), FoldColumns<C>(column, first, end));
}

}  // namespace tessera
