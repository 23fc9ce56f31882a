// The kernel of the rows single_pass, fixed_tree and compensated: one launch folds an array along
// the tree of kernels/fixed_tree.h, whatever its chunks are, and leaves the result.
//
// Loads. A lane's columns of a row are one 16-byte vector, and neighbouring lanes hold neighbouring
// vectors: a warp reads 512 bytes at a time. A thread starts the loads of several rows (64 bytes,
// kBatchVectors) before it uses the first: 1024 threads a multiprocessor have 64 KiB in flight,
// where latency times bandwidth ask for about 48 KiB on an H200. Where an operand is not aligned to
// 16 bytes, a thread loads the two aligned vectors that its vector lies across, of which its
// neighbour loads one as well, from the L1 cache, and shifts: no scalar loads, whatever the offset.
// Two operands that are off by the same distance need neither: see FoldLane.
//
// Short arrays, of a few rows a chunk, are bound by the latency of what happens one after the
// other. They have a kernel of their own, FoldShort, in which there is one trip to memory a block.
//
// One launch. A block leaves the value of a chunk in the chunk's slot of the lane's mailbox. The
// last block to *start* (it takes a ticket first, while its loads are under way) receives all
// slots, in index order. Every block it waits for has started and waits for nobody, so that the
// wait ends on any device, however many blocks fit it. A word in a slot travels with its flag in
// one 64-bit store, so that neither side needs a fence: value and flag arrive together (the LL
// protocol of NVIDIA's NCCL). Compared with "store, fence, count, last one loads" that saves two
// trips to the L2 cache, about a microsecond. The receiver zeroes what it has received; that is the
// state in which the next launch on the lane finds the mailbox.
//
//   block 0 ---- chunk 0 ----> slot 0 --.
//   block 1 ---- chunk 1 ----> slot 1 ---+--> the last block to start: fold, finish, zero
//   block 2 ---- chunk 2 ----> slot 2 --'
//
// Operands that are not contiguous are copied to scratch memory a piece of some chunks at a time,
// and each piece is a launch. Tickets count on from launch to launch, so that the last block of the
// last one to start is the receiver, and what the others have sent waits in the mailbox.
//
// Included by .cu files that are compiled with -fmad=false.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"
#include "kernels/tree_columns.h"

namespace tessera {

// What the kernel needs besides the operands.
struct TreeWork {
  Tree tree;
  ReduceOp op;
  bool mirror;
  Mailbox mailbox;
  Scalar* result;
  std::int64_t first, end;  // the chunks of this launch
  unsigned last_ticket;     // the receiver's: all blocks of all launches, less one
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

// The 16 bytes that begin at byte `shift` of lo, hi; shift is a multiple of size.
template <int size>
__device__ uint4 Shifted(uint4 lo, uint4 hi, unsigned shift) {
  if constexpr (size == 8) {
    return shift == 0 ? lo : make_uint4(lo.z, lo.w, hi.x, hi.y);
  } else {
    const bool two = (shift & 8) != 0, one = (shift & 4) != 0;
    const unsigned a0 = two ? lo.z : lo.x, a1 = two ? lo.w : lo.y, a2 = two ? hi.x : lo.z,
                   a3 = two ? hi.y : lo.w, a4 = two ? hi.z : hi.x, a5 = two ? hi.w : hi.y;
    const unsigned b0 = one ? a1 : a0, b1 = one ? a2 : a1, b2 = one ? a3 : a2, b3 = one ? a4 : a3,
                   b4 = one ? a5 : a4;
    if constexpr (size == 4) return make_uint4(b0, b1, b2, b3);
    const unsigned bytes = (shift & 2) != 0 ? 0x5432 : 0x3210;
    return make_uint4(__byte_perm(b0, b1, bytes), __byte_perm(b1, b2, bytes),
                      __byte_perm(b2, b3, bytes), __byte_perm(b3, b4, bytes));
  }
}

// What has been loaded for one vector: itself or, unless kAligned, the two aligned vectors that it
// lies across. Those hold up to 15 bytes that do not belong to it, in front and behind.
template <bool kAligned>
struct Loaded {
  uint4 part[kAligned ? 1 : 2];
};

template <bool kAligned>
__device__ Loaded<kAligned> LoadVector(const void* address) {
  if constexpr (kAligned) {
    return {{LoadAligned<true>(address)}};
  } else {
    const auto* lo = reinterpret_cast<const unsigned char*>(
        reinterpret_cast<std::uintptr_t>(address) & ~std::uintptr_t{kTreeVectorBytes - 1});
    return {{LoadAligned<false>(lo), LoadAligned<false>(lo + kTreeVectorBytes)}};
  }
}

// The vector; shift: its address modulo 16.
template <class T, bool kAligned>
__device__ TreeVectorOf<T> VectorIn(const Loaded<kAligned>& loaded, unsigned shift) {
  uint4 words = loaded.part[0];
  if constexpr (!kAligned) words = Shifted<sizeof(T)>(loaded.part[0], loaded.part[1], shift);
  TreeVectorOf<T> v;
  std::memcpy(&v, &words, sizeof v);
  return v;
}

// --- One thread ---

// Vectors that a thread has in flight, of all operands together.
inline constexpr int kBatchVectors = 4;

template <class C, class V>
__device__ void StepElement(typename C::Column& column, const V (&v)[C::kOperands], int k, int row,
                            bool mirror) {
  if constexpr (C::kOperands == 2) {
    C::Step(column, v[0].element[k], v[1].element[k], row, mirror);
  } else {
    C::Step(column, v[0].element[k], row, mirror);
  }
}

// Takes the elements of a lane's last vector, [rest, end), of which not all exist; row: theirs in
// the segment.
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

// The value of a lane's columns of one segment, the first of which begins at element `first`; the
// segment ends before `end`.
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

// How operands lie: at multiples of 16 bytes, all at the same distance behind one, or anyhow.
enum class Placement { kAligned, kAlike, kAny };

// The value of one lane of the chunk [begin, end).
//
// kAlike: every load is of an aligned vector all the same. It begins `ahead` elements before the
// lane's own, so that a thread folds columns of which the first `ahead` are the lane's before it,
// and at the end of a segment columns change hands. What comes before a row's first column is the
// end of the row above: there lane 0 folds the last columns, one row late.
//
//   ahead 1    lane 0            lane 1           lane 255
//   row 0      .   0  1  2       3  4  5  6  ...  1019 .. 1022
//   row 1    1023 1024 ...      1027   ...
//   row 2    2047  ...
//
// All threads of the block call it, for lanes threadIdx.x.
template <class C, Placement kPlacement>
__device__ typename C::Wide FoldLane(const TreeOperands<C>& in, const TreeWork& work,
                                     std::int64_t begin, std::int64_t end, int lane) {
  using T = typename C::Element;
  using Wide = typename C::Wide;
  constexpr int V = kTreeVector<T>;
  constexpr int kRow = kTreeRow<T>;
  constexpr int kRows = kBatchVectors / C::kOperands;
  constexpr int O = C::kOperands;
  constexpr bool kWhole = kPlacement != Placement::kAny;
  constexpr bool kAlike = kPlacement == Placement::kAlike;
  const int ahead = kAlike ? static_cast<int>(reinterpret_cast<std::uintptr_t>(in.x[0]) %
                                              kTreeVectorBytes / sizeof(T))
                           : 0;
  const int late = lane == 0 ? ahead : 0;  // columns that are one row late
  const std::int64_t first = begin - ahead + lane * V;
  // Vectors that the lane can load whole. With kAny one needs another behind it, so that nothing is
  // read beyond the array but the rest of 16 bytes that hold some of it.
  const std::int64_t limit = (kWhole ? end : min(end, work.tree.n - V)) - V;
  const int rows = first > limit ? 0 : static_cast<int>((limit - first) / kRow) + 1;
  // At most one vector is left, of which not all elements need exist: it is taken one by one.
  const std::int64_t rest = first + std::int64_t{rows} * kRow;
  const int all = kAlike ? static_cast<int>((end - begin + kRow - 1) / kRow) : rows + (rest < end);

  const unsigned char* next[O];
  unsigned shift[O];
#pragma unroll
  for (int o = 0; o < O; ++o) {
    next[o] = reinterpret_cast<const unsigned char*>(in.x[o] + first);
    shift[o] = reinterpret_cast<std::uintptr_t>(next[o]) % kTreeVectorBytes;
  }

  Wide total = C::Identity();
#pragma unroll 1
  for (int top = 0; top < all; top += kTreeSegmentRows) {
    typename C::Column column[V];
#pragma unroll
    for (int k = 0; k < V; ++k) column[k] = C::Start(T{});
    const auto forget_row_above = [&] {
#pragma unroll
      for (int k = 0; k < V; ++k)
        if (k < late) column[k] = C::Start(T{});
    };
    const int bottom = min(rows, top + kTreeSegmentRows);
    // No branch between the loads of a batch and their use: the compiler would move the loads
    // behind it, where each waits for the one before (VARIANCE of f32 took 1.8 times as long).
    const auto fold_rows = [&](int row, auto count) {
      constexpr int kCount = decltype(count)::value;
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
        for (int k = 0; k < V; ++k) StepElement<C>(column[k], v, k, row - top + j, work.mirror);
        if (kAlike && j == 0 && row == top) forget_row_above();
      }
    };
    int row = top;
#pragma unroll 1
    for (; row + kRows <= bottom; row += kRows)
      fold_rows(row, std::integral_constant<int, kRows>());
#pragma unroll 1
    for (; row < bottom; ++row) fold_rows(row, std::integral_constant<int, 1>());
    if constexpr (kAlike) {
      // After the last row of a segment only those that are late.
      const bool full = bottom == top + kTreeSegmentRows;
      const std::int64_t from = first + std::int64_t{bottom} * kRow;
      const std::int64_t until = full ? min(end, from + late) : end;
      if (bottom >= top && from < until) {
        FoldRest<C>(in, work, column, from, until, bottom - top);
        if (bottom == top) forget_row_above();
      }
      __shared__ typename C::Column columns[kRow];
      __syncthreads();  // columns of the segment before have been read
#pragma unroll
      for (int k = 0; k < V; ++k) columns[(lane * V + k - ahead) & (kRow - 1)] = column[k];
      __syncthreads();  // columns are written
#pragma unroll
      for (int k = 0; k < V; ++k) column[k] = columns[lane * V + k];
    } else if (rows < all && rows - top < kTreeSegmentRows) {
      FoldRest<C>(in, work, column, rest, end, rows - top);
    }
    const std::int64_t at = begin + lane * V + std::int64_t{top} * kRow;
    const std::int64_t stop = min(end, begin + std::int64_t{top + kTreeSegmentRows} * kRow);
    total = C::Combine(total, FoldColumns<C>(column, at, stop));
  }
  return total;
}

// --- One block ---

// The halving tree over the lanes' values; all of the first warp calls it, after a barrier that
// makes the cells visible. The result is its lane 0's.
template <class C>
__device__ typename C::Wide FoldLanes(const typename C::Wide* cells) {
  constexpr int kPerThread = kTreeLanes / kWarpSize;
  typename C::Wide v[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) v[i] = cells[threadIdx.x + i * kWarpSize];
#pragma unroll
  for (int half = kPerThread / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) v[i] = C::Combine(v[i], v[i + half]);
      // Lanes in the upper half fold what they get as well, and nobody asks for it.
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    v[0] = C::Combine(v[0], ShuffleDown(kFullMask, v[0], offset));
  return v[0];
}

// --- Between blocks ---

// This block's place among the blocks of the launch that have asked before. Volatile, as the loads
// of operands are, so that it is asked for before them: besides taking its time next to them, it
// brings the mailbox's page into the multiprocessor's translation buffer. A block that first meets
// that page when it sends or receives waits for it alone, about a microsecond.
__device__ inline unsigned TakeTicket(const Mailbox& mailbox) {
  unsigned ticket;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(ticket)
               : "l"(mailbox.ticket)
               : "memory");
  return ticket;
}

// 64-bit words of a value on its way: 32 bits of value, 32 of flag. In pairs, which one 16-byte
// access moves; each half of it is atomic.
template <class W>
inline constexpr int kMailPairs = (sizeof(W) + 7) / 8;

__device__ inline ulonglong2* MailSlot(const Mailbox& mailbox, std::int64_t chunk, int pairs) {
  return mailbox.slots + chunk * pairs;
}

inline constexpr unsigned long long kMailFlag = 1ull << 32;

template <class W>
__device__ void Send(const Mailbox& mailbox, std::int64_t chunk, const W& value) {
  constexpr int kPairs = kMailPairs<W>;
  unsigned words[2 * kPairs] = {};
  std::memcpy(words, &value, sizeof value);
  ulonglong2* slot = MailSlot(mailbox, chunk, kPairs);
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(slot + i),
                 "l"(words[2 * i] | kMailFlag), "l"(words[2 * i + 1] | kMailFlag)
                 : "memory");
}

__device__ inline ulonglong2 Peek(const ulonglong2* pair) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.x), "=l"(v.y)
               : "l"(pair)
               : "memory");
  return v;
}

// Folds the values of chunks first, first + kTreeLanes, ... in order into total, waiting for each,
// and zeroes their slots. It asks for kAtOnce of them together.
template <class C, int kAtOnce>
__device__ typename C::Wide Receive(const Mailbox& mailbox, std::int64_t first,
                                    std::int64_t chunks) {
  using Wide = typename C::Wide;
  constexpr int kPairs = kMailPairs<Wide>;
  Wide total = C::Identity();
#pragma unroll 1
  for (; first < chunks; first += kAtOnce * kTreeLanes) {
    ulonglong2 words[kAtOnce][kPairs];
    bool here;
    do {
      unsigned long long flags = kMailFlag;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * kTreeLanes < chunks) {
          const ulonglong2* slot = MailSlot(mailbox, first + j * kTreeLanes, kPairs);
#pragma unroll
          for (int i = 0; i < kPairs; ++i) words[j][i] = Peek(slot + i);
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * kTreeLanes < chunks) {
#pragma unroll
          for (int i = 0; i < kPairs; ++i) flags &= words[j][i].x & words[j][i].y;
        }
      }
      here = flags != 0;
    } while (!here);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j * kTreeLanes < chunks) {
        unsigned plain[2 * kPairs];
        ulonglong2* slot = MailSlot(mailbox, first + j * kTreeLanes, kPairs);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          plain[2 * i] = static_cast<unsigned>(words[j][i].x);
          plain[2 * i + 1] = static_cast<unsigned>(words[j][i].y);
          slot[i] = make_ulonglong2(0, 0);
        }
        Wide value;
        std::memcpy(&value, plain, sizeof value);
        total = C::Combine(total, value);
      }
    }
  }
  return total;
}

// What a block does with a chunk whose lanes are in cells, called by all threads: it leaves the
// result if the chunk is the only one, or sends its value; the receiver, if there is one slot a
// lane (direct), keeps its own. receiver lies in shared memory and is read only where it matters.
template <class C>
__device__ void Deliver(const typename C::Wide* cells, const TreeWork& work, std::int64_t chunk,
                        bool alone, bool direct, const bool& receiver, typename C::Wide* received) {
  if (threadIdx.x < kWarpSize) {
    const typename C::Wide value = FoldLanes<C>(cells);
    if (threadIdx.x == 0) {
      if (alone) {
        C::Finish(value, work.op, work.tree.n, work.mirror, work.result);
      } else if (direct && receiver) {
        received[chunk] = value;
      } else {
        Send(work.mailbox, chunk, value);
      }
    }
  }
}

// What the receiver does at the end, called by all threads: the values of all chunks, by lane, are
// in received.
template <class C>
__device__ void FinishReceived(const typename C::Wide* received, const TreeWork& work) {
  if (threadIdx.x == 0) *work.mailbox.ticket = 0;
  __syncthreads();  // received is written
  if (threadIdx.x >= kWarpSize) return;
  const typename C::Wide value = FoldLanes<C>(received);
  if (threadIdx.x == 0) C::Finish(value, work.op, work.tree.n, work.mirror, work.result);
}

// --- The kernel ---

// Blocks of a multiprocessor that registers have to suffice for: 48 a thread with 5 blocks of 256,
// more where a thread's columns or loads take many, as those of vectors that lie across two. A
// block is under way for long, all rows of a chunk, so that what counts is how few blocks have to
// wait for another to end: of Dot's 1093 at n = 2^26, f32, an H200 runs 528 at once with 4 a
// multiprocessor. With 5, the compensated Dot does not run the last 37 alone, and takes 131 us
// instead of 154.
template <class C, Placement kPlacement>
constexpr int TreeBlocks() {
  using Column = typename C::Column;
  constexpr int kBytes = static_cast<int>(sizeof(Column)) * kTreeVector<typename C::Element>;
  constexpr bool kDot = C::kOperands == 2, kAny = kPlacement == Placement::kAny;
  if (kAny && !kDot) return 3;
  const bool five = kBytes <= (kAny ? 16 : 32) && (kDot || std::is_arithmetic_v<Column>);
  return five ? 5 : kBytes <= 40 ? 4 : 3;
}

// Any grid, any block of at least a warp. Blocks take chunks a grid apart, threads take lanes a
// block apart.
template <class C, Placement kPlacement>
__global__ void __launch_bounds__(kTreeLanes, TreeBlocks<C, kPlacement>())
    FoldTree(const TreeOperands<C> in, const TreeWork work) {
  using Wide = typename C::Wide;
  constexpr int kPairs = kMailPairs<Wide>;
  constexpr int kAtOnce = kPairs == 1 ? 4 : kPairs == 2 ? 2 : 1;
  __shared__ Wide cells[kTreeLanes];
  __shared__ Wide received[kTreeLanes];
  __shared__ bool receiver;
  const Tree& tree = work.tree;
  const bool alone = tree.chunks == 1;
  // The receiver's own chunk need not travel when there is one slot a lane.
  const bool direct = tree.chunks <= kTreeLanes && gridDim.x == tree.chunks;
  unsigned ticket = 0;
  if (!alone && threadIdx.x == 0) ticket = TakeTicket(work.mailbox);

#pragma unroll 1
  for (std::int64_t chunk = work.first + blockIdx.x; chunk < work.end; chunk += gridDim.x) {
    const std::int64_t begin = chunk * tree.chunk;
    const std::int64_t end = min(tree.n, begin + tree.chunk);
#pragma unroll 1
    for (int lane = static_cast<int>(threadIdx.x); lane < kTreeLanes;
         lane += static_cast<int>(blockDim.x))
      cells[lane] = FoldLane<C, kPlacement>(in, work, begin, end, lane);
    if (threadIdx.x == 0) receiver = !alone && ticket == work.last_ticket;
    __syncthreads();  // cells and receiver are written
    Deliver<C>(cells, work, chunk, alone, direct, receiver, received);
    if (chunk + gridDim.x < work.end) __syncthreads();  // cells have been read
  }
  if (alone || !receiver) return;

  for (int lane = static_cast<int>(threadIdx.x); lane < kTreeLanes;
       lane += static_cast<int>(blockDim.x)) {
    if (direct && lane == static_cast<int>(blockIdx.x)) continue;
    received[lane] = Receive<C, kAtOnce>(work.mailbox, lane, tree.chunks);
  }
  FinishReceived<C>(received, work);
}

// --- The kernel of short arrays ---

// Rows of a chunk that FoldShort has registers for.
inline constexpr int kShortRows = 8;
static_assert(kShortRows <= kTreeSegmentRows);

// FoldLane for a chunk of up to kShortRows rows, all of whose loads are under way before the first
// is used. Operands are aligned; a lane is a thread, a chunk a block.
template <class C>
__device__ typename C::Wide FoldShortLane(const TreeOperands<C>& in, const TreeWork& work) {
  using T = typename C::Element;
  using Wide = typename C::Wide;
  constexpr int V = kTreeVector<T>;
  constexpr int kRow = kTreeRow<T>;
  constexpr int kHalf = kShortRows / 2;
  constexpr int O = C::kOperands;
  const int chunk = static_cast<int>(work.tree.chunk);
  const int begin = static_cast<int>(blockIdx.x) * chunk;
  const int end = min(static_cast<int>(work.tree.n), begin + chunk);
  const int first = begin + static_cast<int>(threadIdx.x) * V;
  const int rows = end - first < V ? 0 : (end - first - V) / kRow + 1;

  TreeVectorOf<T> batch[kShortRows][O];
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
    for (int j = kHalf; j < kShortRows; ++j) load(j);
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
    for (int j = kHalf; j < kShortRows; ++j) step(j);
  }
  const int rest = first + rows * kRow;
  if (rest < end) FoldRest<C>(in, work, column, rest, end, rows);
  return C::Combine(C::Identity(), FoldColumns<C>(column, first, end));
}

// FoldTree for one chunk of up to kShortRows rows a block, one a lane at most, and aligned
// operands. Short arrays wait for latencies, and that is what goes: a chunk's rows are loaded
// together, and indices have 32 bits.
template <class C>
__global__ void __launch_bounds__(kTreeLanes, 2)
    FoldShort(const TreeOperands<C> in, const TreeWork work) {
  using Wide = typename C::Wide;
  __shared__ Wide cells[kTreeLanes];
  __shared__ Wide received[kTreeLanes];
  __shared__ bool receiver;
  const bool alone = gridDim.x == 1;
  unsigned ticket = 0;
  if (!alone && threadIdx.x == 0) ticket = TakeTicket(work.mailbox);
  cells[threadIdx.x] = FoldShortLane<C>(in, work);
  if (threadIdx.x == 0) receiver = !alone && ticket == gridDim.x - 1;
  __syncthreads();  // cells and receiver are written
  Deliver<C>(cells, work, blockIdx.x, alone, true, receiver, received);
  if (!receiver) return;
  if (threadIdx.x != blockIdx.x)
    received[threadIdx.x] = Receive<C, 1>(work.mailbox, threadIdx.x, gridDim.x);
  FinishReceived<C>(received, work);
}

// --- Host ---

// What a row asks for. grid, block: 0 for a block a chunk of 256 threads.
struct TreeLaunch {
  Tree tree;
  std::uint32_t grid = 0;
  std::uint32_t block = 0;
};

// Block sizes of the rows: lanes are shared out to whatever threads there are.
inline constexpr LaunchLimits::Range kTreeBlockSize = {kWarpSize, kTreeLanes};

static_assert(3 * kTreeMaxChunks <= Mailbox::kSlots, "three pairs of words for the largest value");

// The tree of single_pass: launch.grid_size chunks. Or as many as `multiprocessors` hold blocks at
// once, times 7 in long arrays, which evens out what is left when the first blocks end; but no
// fewer rows than a thread loads at once. On every device no fewer chunks than with multiprocessors
// = 0.
inline Tree SinglePassTree(std::int64_t n, std::int64_t size, const Launch& launch,
                           int multiprocessors) {
  constexpr std::int64_t kLeast = 32, kMost = kTreeMaxChunks / 4;
  const std::int64_t total = TreeTotalRows(n, size);
  if (launch.grid_size != 0)
    return MakeTree(n, size, std::max<std::int64_t>(1, CeilDiv(total, launch.grid_size)));
  if (total <= 8) return MakeTree(n, size, 8);
  const std::int64_t wave = 4 * std::clamp<std::int64_t>(multiprocessors, kLeast, kMost);
  const std::int64_t waves = std::clamp<std::int64_t>(
      total / (wave * kTreeSegmentRows), 1, std::clamp<std::int64_t>(kTreeMaxChunks / wave, 1, 7));
  return MakeTree(n, size, std::max<std::int64_t>(kBatchVectors, CeilDiv(total, waves * wave)));
}

// The additions of single_pass on any device: of the fewest chunks inside them, of the most
// between.
inline Tree SinglePassBound(std::int64_t n, std::int64_t size, const Launch& launch) {
  Tree tree = SinglePassTree(n, size, launch, 0);
  if (launch.grid_size == 0 && tree.chunks > 1) tree.chunks = kTreeMaxChunks;
  return tree;
}

template <class C>
void LaunchTreePart(const TreeOperands<C>& in, const TreeWork& work, unsigned grid, unsigned block,
                    CudaStream& stream) {
  const Tree& tree = work.tree;
  bool aligned = true, alike = C::kOperands > 1;
  for (const auto* x : in.x) {
    const auto place = reinterpret_cast<std::uintptr_t>(x) % kTreeVectorBytes;
    aligned &= place == 0;
    alike &= place == reinterpret_cast<std::uintptr_t>(in.x[0]) % kTreeVectorBytes;
  }
  const bool is_short = tree.chunk <= kShortRows * kTreeRow<typename C::Element> &&
                        tree.chunks <= kTreeLanes && grid == tree.chunks;
  const auto launch_kernel = [&](auto kernel) {
    kernel<<<grid, block, 0, stream.handle()>>>(in, work);
  };
  if (aligned && block == kTreeLanes && is_short) {
    launch_kernel(FoldShort<C>);
  } else if (aligned) {
    launch_kernel(FoldTree<C, Placement::kAligned>);
  } else if (alike && block == kTreeLanes) {
    if constexpr (C::kOperands > 1) launch_kernel(FoldTree<C, Placement::kAlike>);
  } else {
    launch_kernel(FoldTree<C, Placement::kAny>);
  }
  CUDA_CHECK_LAUNCH(FoldTree);
}

// Bytes of a piece of an operand that is not contiguous: enough to outlast its launches.
inline constexpr std::int64_t kTreePieceBytes = std::int64_t{32} << 20;

// views: of operands that are not contiguous, null for others.
template <class C>
void LaunchTree(TreeOperands<C> in, const View* const (&views)[C::kOperands], ReduceOp op,
                const TreeLaunch& launch, Scalar* result, CudaStream& stream) {
  using T = typename C::Element;
  const Tree& tree = launch.tree;
  const unsigned block = launch.block == 0 ? kTreeLanes : launch.block;
  const auto blocks = [&](std::int64_t chunks) {
    return launch.grid == 0 ? chunks : std::min<std::int64_t>(launch.grid, chunks);
  };
  // Chunks of a piece.
  std::int64_t piece = tree.chunks;
  int copies = 0;
  for (const View* view : views) copies += view != nullptr;
  if (copies > 0) {
    std::int64_t most = kTreePieceBytes;
    if (const Budget* budget = stream.scratch_budget(); budget != nullptr)
      most = static_cast<std::int64_t>(
          std::min<std::uint64_t>(static_cast<std::uint64_t>(most), budget->limit() / 4));
    const auto chunk_bytes = tree.chunk * static_cast<std::int64_t>(sizeof(T)) * copies;
    piece = std::clamp<std::int64_t>(most / chunk_bytes, 1, tree.chunks);
  }
  const std::int64_t whole = tree.chunks / piece, rest = tree.chunks % piece;
  TreeWork work = {
      tree,   op, IsMirrored(op), tree.chunks > 1 ? stream.mailbox() : Mailbox{},
      result, 0,  tree.chunks,    static_cast<unsigned>(whole * blocks(piece) + blocks(rest) - 1)};
  if (copies == 0)
    return LaunchTreePart<C>(in, work, static_cast<unsigned>(blocks(piece)), block, stream);

  T* copy[C::kOperands] = {};
  for (int o = 0; o < C::kOperands; ++o) {
    // What follows a vector is loaded with it where another operand is not aligned.
    if (views[o] != nullptr)
      copy[o] = static_cast<T*>(stream.Scratch(
          static_cast<std::size_t>(piece * tree.chunk) * sizeof(T) + kTreeVectorBytes));
  }
  try {
    for (; work.first < tree.chunks && !stream.stopped(); work.first = work.end) {
      work.end = std::min(tree.chunks, work.first + piece);
      const std::int64_t begin = work.first * tree.chunk;
      const std::int64_t count = std::min(tree.n, work.end * tree.chunk) - begin;
      for (int o = 0; o < C::kOperands; ++o) {
        if (views[o] == nullptr) continue;
        if (piece == tree.chunks) {
          GatherAsync(*views[o], copy[o], stream.handle());
        } else {
          GatherRangeAsync(*views[o], begin, count, copy[o], stream.handle());
        }
        // Where element 0 would stand; chunks are multiples of 16 bytes.
        in.x[o] = reinterpret_cast<const T*>(reinterpret_cast<std::uintptr_t>(copy[o]) -
                                             static_cast<std::uintptr_t>(begin) * sizeof(T));
      }
      LaunchTreePart<C>(in, work, static_cast<unsigned>(blocks(work.end - work.first)), block,
                        stream);
    }
  } catch (...) {
    stream.ClearMailbox();
    throw;
  }
  if (work.first < tree.chunks) stream.ClearMailbox();
}

// Instantiated in tree_*.cu for every T, so that rows share the kernels.
template <class T, bool kCompensated>
void LaunchTreeReduce(const ReduceProblem& p, const TreeLaunch& launch, CudaStream& stream);
template <class T, bool kCompensated>
void LaunchTreeDot(const DotProblem& p, const TreeLaunch& launch, CudaStream& stream);

}  // namespace tessera
