// Matmul on Hopper's tensor cores: the kernel of the rows `tensor_bf16`, `tensor_f16`,
// `tensor_tf32` and `tensor_f32x3`, what prepares operands for it, and how the work is cut.
// hopper.cuh has the instructions one by one.
//
// Against `warp_tiled`, in which every thread loads, multiplies and waits in turn:
//
// - The warps of a block have different work. One warpgroup fetches: a single thread of it tells
//   the copy engine which boxes of a and b to bring. The others, one for 64 rows of the tile,
//   multiply: wgmma reads both operands from shared memory itself, so that no operand passes
//   through registers at all, and those are nearly all sums: a 64 x 256 piece takes 128 of a
//   thread. Since a fetching thread needs few registers and a multiplying one many, the former
//   give theirs away.
// - They meet at barriers, two for each of kStages slabs: "full", which the arriving bytes
//   complete, and "empty", at which consumers arrive when wgmma has read the slab. So up to
//   kStages slabs are on their way, also those of the block's next tile while this one's results
//   are being written.
//
//      producer   wait empty[s], fetch slab s --+                  +--> next round
//                                               v                  |
//      consumers               wait full[s], multiply slab s, arrive at empty[s]
//
// - A slab is 128 bytes deep, and its 16-byte packs are permuted in each row. Engine and tensor
//   cores agree on the pattern; it costs nothing and avoids all bank conflicts.
// - 16-bit operands may lie either way around in shared memory, k along the rows or across, so
//   that transposes cost nothing. f32 has to lie with k along the rows, but for one operand that
//   may come through registers instead (MultiplyTurned).
// - Blocks stay: as many as there are multiprocessors, each computing tile after tile, in the order
//   of `warp_tiled`'s picture, so that those computed at the same time share rows and columns. The
//   way to the first multiplication is short: a small product takes little longer than that.
// - Two blocks one below the other can form a cluster, and each fetches half of the columns of b
//   for both.
// - Results take the way back through shared memory, a consumer's box by box, from where the copy
//   engine writes whole lines.
// - When the tiles are too few for the multiprocessors, they are smaller, or k is cut into pieces
//   whose sums a second kernel adds, always in the same order. When they are many, but not a
//   multiple of the multiprocessors, some of them are cut in two: see pieces.h.
//
// Right for any m, n and k: the engine reads zeros outside a matrix, and does not write what would
// lie outside c. It asks for addresses and pitches that are multiples of 16 bytes; operands and
// results without them go by way of scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "kernels/convert.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/matmul/boxes.cuh"
#include "kernels/cuda/matmul/hopper.cuh"
#include "kernels/cuda/matmul/pieces.h"
#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/primitives.cuh"
#include "kernels/matmul.h"

namespace tessera {

// --- Geometry ---

// The tile of c that a block computes at a time. T_: BFloat16, Half or Tf32. kCluster_ blocks, one
// below the other, share the columns of b that they load. kParts_: matrices that an operand is
// split into, see `tensor_f32x3`.
template <class T_, int kRows_, int kColumns_, int kCluster_, int kStages_, int kBoxes_ = 2,
          int kParts_ = 1>
struct TensorTile {
  using T = T_;
  static constexpr int kRows = kRows_, kColumns = kColumns_, kCluster = kCluster_;
  static constexpr int kStages = kStages_, kParts = kParts_;
  static constexpr int kProducts = kParts * (kParts + 1) / 2;  // of parts
  static constexpr int kWarpgroup = 128, kGroupRows = 64;      // threads, and rows of one wgmma
  static constexpr int kConsumers = kRows / kGroupRows;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
  // A row of a slab in shared memory, and how far along k it reaches.
  static constexpr int kRowBytes = kParts == 1 ? 128 : 64;
  static constexpr int kDepth = kRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kStepBytes = 32;  // of one wgmma along k
  static constexpr int kPartA = kRows * kRowBytes, kPartB = kColumns * kRowBytes;
  static constexpr int kBytesA = kParts * kPartA, kBytesB = kParts * kPartB;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  // What is fetched at a time: so many indices of m or n, a row each; where k goes across the rows,
  // rows of kMnWidth of them.
  static constexpr int kMnWidth = 128 / static_cast<int>(sizeof(T)), kMnBytes = kDepth * 128;
  static constexpr int BoxWidth(bool mn_major) { return mn_major ? kMnWidth : kGroupRows; }
  static constexpr int BoxBytes(bool mn_major) {
    return mn_major ? kMnBytes : kGroupRows * kRowBytes;
  }
  // A consumer's results on their way out: so many boxes of rows of 128 bytes at a time.
  static constexpr int kBoxes = kBoxes_;
  static constexpr int kBoxBytes = kGroupRows * 128;
  static constexpr int kStagingBytes = kBoxes * kBoxBytes;
  static constexpr int kAlignment = 1024;  // of the pattern in which packs are permuted
  static constexpr int kSharedBytes =
      kAlignment + kStages * kStageBytes + kConsumers * kStagingBytes;
};

// What an operand in several parts is multiplied by; the result is divided by its square. The last
// bit of the smallest f32, 2^-149, becomes the smallest normal bf16: no part underflows.
inline constexpr float kPartsScale = 0x1p23f;

// f32 whose k goes across the rows of a: the tile is the transpose of one of c, see MultiplyTurned.
template <class C, bool kMnA>
inline constexpr bool kIsTurned = std::is_same_v<typename C::T, Tf32>&& kMnA;

// Named barriers of a block, one of each kind for every consumer; 0 is __syncthreads.
enum class Meeting { kStaging, kSumsStored, kMayLoad, kTurn, kCount };

template <class C>
__device__ int BarrierOf(Meeting meeting, int consumer) {
  static_assert(static_cast<int>(Meeting::kCount) * C::kConsumers < 16);
  return 1 + static_cast<int>(meeting) * C::kConsumers + consumer;
}

// What the blocks of a launch are told.
struct TensorWork {
  int rows, columns;  // of c, or of what its transpose is computed as
  // Tiles are those of clusters, kCluster kRows x kColumns. A group is some rows of them.
  int row_tiles;
  Divisor tiles, group_tiles;     // of c, and of a group
  Divisor group_rows, last_rows;  // of tiles in a group, and in the last one
  Sharing sharing;                // of tiles, or of pieces of k of all tiles, among clusters
  int slabs;                      // along k
  float* partials;                // [blocks, kRows * kColumns], see PassMessages
  std::uint32_t* written;         // [blocks, kConsumers], whether they are; zero before and after
  bool floats;                    // results leave as f32, otherwise as T
  unsigned* nonfinite;  // of several parts: set when an element of c is an infinity or NaN
};

// --- The kernel ---

// Two sums as a register of 16-bit elements.
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

// The place of one piece of work: a cluster's tiles in groups, and slabs of k.
struct TensorPlace {
  int row_tile, column_tile, split, first_slab, slabs;

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
    first_slab = split * work.sharing.slabs + piece.first;
    slabs = min(work.slabs - first_slab, piece.slabs);
  }
};

// A consumer's sums of one box, 64 rows of 128 bytes, into shared memory. thread: of the warpgroup.
template <class O>
__device__ void StageBox(const float* sums, int thread, std::uint32_t to) {
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
    // A row's pairs at packs 2 j and 2 j + 1. Odd rows go through them in another order, so that
    // the four rows of half a warp meet all banks.
    const int r = warp * 16 + lane / 4;
    const bool odd = r % 2 != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const s = sums + 2 * half;
        const int pack = 2 * (odd ? j ^ 2 : j) + lane % 4 / 2;
        StorePair(to + (r + 8 * half) * 128 + (pack ^ r % 8) * 16 + lane % 2 * 8,
                  odd ? s[4 * (j ^ 2)] : s[4 * j], odd ? s[4 * (j ^ 2) + 1] : s[4 * j + 1]);
      }
    }
  }
}

// The same of two boxes of c side by side, from the sums of MultiplyTurned for 64 columns: a warp's
// 16 rows are columns of one of the boxes. Half of its lanes go through pairs of rows of c the
// other way around, so that all banks are met.
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

// Writes what of a consumer's 64 rows of results, at [row, column], lies inside c. They go through
// shared memory, some boxes of rows of 128 bytes at a time, from where the copy engine writes whole
// lines. O: float, or C::T. kTurn: the results are those of MultiplyTurned, and stand in c at
// [column, row].
template <class C, class O, bool kTurn, int kCount>
__device__ void StoreTile(const float (&d)[kCount], const CUtensorMap& c_map, std::uint32_t staging,
                          int row, int column, int split) {
  constexpr int kSize = static_cast<int>(sizeof(O));
  constexpr int kWidth = 128 / kSize;  // of a box
  constexpr int kAll = C::kColumns / kWidth;
  constexpr int kBoxSums = kCount / kAll;
  // Boxes lie side by side; those of a turned tile in pairs, one below the other.
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
    NamedBarrier(barrier, C::kWarpgroup);  // the results are in it
    if (thread == 0) {
#pragma unroll
      for (int box = first; box < min(first + C::kBoxes, kAll); ++box)
        StoreBox(&c_map, box_column(box), box_row(box), split,
                 staging + (box - first) * C::kBoxBytes);
      CommitStores();
    }
  }
}

// The slabs in shared memory, as one thread goes through them.
template <class C>
class TensorPipeline {
 public:
  // slabs, barriers: addresses of kStages slabs, and of as many "full" and "empty" barriers.
  __device__ TensorPipeline(std::uint32_t slabs, std::uint32_t barriers)
      : slabs_(slabs), barriers_(barriers) {}

  __device__ int stage() const { return stage_; }
  __device__ std::uint32_t a() const { return slabs_ + stage_ * C::kStageBytes; }
  __device__ std::uint32_t b() const { return a() + C::kBytesA; }
  __device__ std::uint32_t full() const { return barriers_ + stage_ * 8; }
  __device__ std::uint32_t empty(int stage) const { return barriers_ + (C::kStages + stage) * 8; }

  __device__ void Init() const {
    for (int s = 0; s < C::kStages; ++s) {
      BarrierInit(barriers_ + s * 8, 1);
      BarrierInit(empty(s), C::kConsumers * C::kCluster);
    }
    BarrierInitFence();
  }
  // New barriers are in the phase of parity 0: the first round waits for full, not for empty.
  __device__ void WaitUntilFull() const { BarrierWait(full(), parity_); }
  __device__ void WaitUntilEmpty() const { BarrierWait(empty(stage_), parity_ ^ 1); }
  // A consumer is done with the slab: whoever fills it waits for all who read it, in every block
  // that it is copied to. thread: of the warpgroup.
  __device__ void Release(int stage, int thread) const {
    if constexpr (C::kCluster == 1) {
      if (thread == 0) BarrierArrive(empty(stage));
    } else {
      if (thread < C::kCluster) BarrierArriveAt(empty(stage), static_cast<unsigned>(thread));
    }
  }
  __device__ void Next() {
    if (++stage_ == C::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  std::uint32_t slabs_, barriers_;
  int stage_ = 0;
  unsigned parity_ = 0;
};

// The fetching thread: brings the slabs of one piece of work. rank: of the block in its cluster.
template <class C, bool kMnA, bool kMnB>
__device__ void FetchSlabs(const CUtensorMap& a_map, const CUtensorMap& b_map,
                           const TensorWork& work, const TensorPlace& place, int rank,
                           TensorPipeline<C>& pipeline) {
  constexpr int kWidthA = C::BoxWidth(kMnA), kWidthB = C::BoxWidth(kMnB);
  constexpr int kBytesA = C::BoxBytes(kMnA), kBytesB = C::BoxBytes(kMnB);
  constexpr int kBoxesA = C::kRows / kWidthA, kBoxesB = C::kColumns / kWidthB;
  constexpr int kShare = kBoxesB / C::kCluster;  // boxes of b that a block fetches, for all
  const int row = (place.row_tile * C::kCluster + rank) * C::kRows;
  const int column = place.column_tile * C::kColumns;
  // Boxes outside a matrix stay away: the engine takes longer to make zeros than to fetch elements,
  // and what is computed with old ones instead is stored nowhere. But of several parts it is looked
  // at, for infinities.
  const auto inside = [](int boxes, int width, int first, int extent) {
    return max(0, min(boxes, (extent - first + width - 1) / width));
  };
  const int boxes_a = inside(kBoxesA, kWidthA, row, work.rows);
  const int boxes_b = inside(kBoxesB, kWidthB, column, work.columns);
  // all: every box, without asking.
  const auto fetch = [&](auto all) {
    const int bytes = all ? C::kStageBytes : C::kParts * (boxes_a * kBytesA + boxes_b * kBytesB);
    for (int slab = 0; slab < place.slabs; ++slab, pipeline.Next()) {
      const int k = (place.first_slab + slab) * C::kDepth;
      pipeline.WaitUntilEmpty();
      BarrierExpect(pipeline.full(), bytes);
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
        for (int box = 0; box < kBoxesA; ++box) {
          if (!all && box >= boxes_a) break;
          const int y = row + box * kWidthA;
          LoadBox(pipeline.a() + part * C::kPartA + box * kBytesA, &a_map, kMnA ? y : k,
                  kMnA ? k : y, part, pipeline.full());
        }
      }
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const int box = rank * kShare + i;
          if (!all && box >= boxes_b) break;
          const std::uint32_t to = pipeline.b() + part * C::kPartB + box * kBytesB;
          const int x = column + box * kWidthB;
          if constexpr (C::kCluster == 1) {
            LoadBox(to, &b_map, kMnB ? x : k, kMnB ? k : x, part, pipeline.full());
          } else {
            LoadBoxMulticast(to, &b_map, kMnB ? x : k, kMnB ? k : x, part, pipeline.full(),
                             (1u << C::kCluster) - 1);
          }
        }
      }
    }
  };
  // Whether the last boxes begin inside. Not asked of the counts: nvcc 13.0 makes of
  // max(0, min(x, 4)) == 4 a minimum that also compares, and compares x <= 4.
  if (C::kParts > 1 ||
      (row + C::kRows - kWidthA < work.rows && column + C::kColumns - kWidthB < work.columns)) {
    fetch(std::true_type());
  } else {
    fetch(std::false_type());
  }
}

// A consumer's view of the operands in a slab: descriptors for wgmma, and the way from a step along
// k, or a part, to the next.
template <class C, bool kMnA, bool kMnB>
struct TensorSlab {
  static constexpr int kSteps = C::kRowBytes / C::kStepBytes;
  static constexpr int kStepA = kMnA ? C::kMnBytes / kSteps : C::kStepBytes;
  static constexpr int kStepB = kMnB ? C::kMnBytes / kSteps : C::kStepBytes;
  // A consumer's 64 rows of a.
  static constexpr int kGroupA = kMnA ? C::kMnBytes : C::kGroupRows * C::kRowBytes;
  static constexpr std::uint64_t Descriptor(bool mn_major) {
    return mn_major ? MatrixDescriptor(128, C::kMnBytes, 8 * 128)
                    : MatrixDescriptor(C::kRowBytes, 0, 8 * C::kRowBytes);
  }

  std::uint64_t a, b;

  __device__ TensorSlab(const TensorPipeline<C>& pipeline, int consumer)
      : a(MatrixAt(Descriptor(kMnA), pipeline.a() + consumer * kGroupA)),
        b(MatrixAt(Descriptor(kMnB), pipeline.b())) {}

  // d = or += part_a of a times part_b of b, over the slab. Descriptors count packs of 16 bytes.
  template <int kCount>
  __device__ void Multiply(int part_a, int part_b, bool add, float (&d)[kCount]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Product<typename C::T, kMnA, kMnB>(d, a + (part_a * C::kPartA + step * kStepA) / 16,
                                         b + (part_b * C::kPartB + step * kStepB) / 16,
                                         add || step != 0);
  }
};

// A consumer: d = the product of one piece of work. While a slab is multiplied, the one before it
// is released.
template <class C, bool kMnA, bool kMnB, int kCount>
__device__ void MultiplySlabs(int slabs, int consumer, int thread, TensorPipeline<C>& pipeline,
                              float (&d)[kCount]) {
  int last = 0;
  for (int slab = 0; slab < slabs; ++slab, pipeline.Next()) {
    pipeline.WaitUntilFull();
    ProductsFence();
    TensorSlab<C, kMnA, kMnB>(pipeline, consumer).Multiply(0, 0, slab != 0, d);
    CommitProducts();
    WaitForProducts<1>();
    if (slab != 0) pipeline.Release(last, thread);
    last = pipeline.stage();
  }
  WaitForProducts<0>();
  SumsAreComplete(d);
  pipeline.Release(last, thread);
}

// The same of f32 whose k goes across the rows of a, which wgmma does not take from shared memory:
// a's fragments come through registers, those of the next slab while this one is multiplied. Which
// row of a is which row of the product is free. This order makes a load of a warp find all banks:
// row 16 w + r of a consumer's 64, w the warp, is index
//
//      32 (w / 2) + 16 (r / 4 % 2) + 8 (w % 2) + 4 (r / 8) + r % 4
//
// Rounds a to nearest.
template <class C, int kCount>
__device__ void MultiplyTurned(int slabs, int consumer, int thread, TensorPipeline<C>& pipeline,
                               float (&d)[kCount]) {
  constexpr int kSteps = C::kDepth / 8;
  const int warp = thread / kWarpSize, row = thread % kWarpSize / 4, step_k = thread % 4;
  const int offset = (2 * consumer + warp / 2) * C::kMnBytes + row % 4 * 4;
  const auto load = [&](std::uint32_t(&fragment)[4 * kSteps]) {
    const std::uint32_t a = pipeline.a() + offset;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = step_k + i / 2 * 4;
      const std::uint32_t at = a + k * 128 + ((row / 4 * 4 + warp % 2 * 2 + i % 2) ^ k) * 16;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        asm("cvt.rna.tf32.f32 %0, %1;"
            : "=r"(fragment[4 * step + i])
            : "f"(LoadShared(at + step * 8 * 128)));
    }
  };
  std::uint32_t even[4 * kSteps], odd[4 * kSteps];
  int last = 0;
  const auto multiply = [&](int slab, std::uint32_t(&now)[4 * kSteps],
                            std::uint32_t(&next)[4 * kSteps]) {
    ProductsFence();
    const std::uint64_t b = TensorSlab<C, false, false>(pipeline, 0).b;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      ProductOfRegisters(d, now + 4 * step, b + step * C::kStepBytes / 16, slab + step != 0);
    CommitProducts();
    WaitForProducts<1>();
    if (slab != 0) {
      OperandsAreRead(next);
      pipeline.Release(last, thread);
    }
    last = pipeline.stage();
    pipeline.Next();
    if (slab + 1 == slabs) return;
    pipeline.WaitUntilFull();
    load(next);
  };
  pipeline.WaitUntilFull();
  load(even);
  for (int slab = 0; slab < slabs; slab += 2) {
    multiply(slab, even, odd);
    if (slab + 1 < slabs) multiply(slab + 1, odd, even);
  }
  WaitForProducts<0>();
  SumsAreComplete(d);
  OperandsAreRead(even);
  OperandsAreRead(odd);
  pipeline.Release(last, thread);
}

// The same of operands in several parts, the first the coarsest. The tensor cores cut sums off
// where f32 would round, so their sums are kept short: after every slab d is added to `sums` in
// f32, and begins the next slab as what that addition has rounded away (Dekker's fast two-sum,
// 1971). In a slab the products of fine parts come first, while d is small. The consumers take
// turns, so that one adds while the other's slab is multiplied: else they fall into step, and the
// tensor cores wait for both.
template <class C, bool kMnA, bool kMnB, int kCount>
__device__ void MultiplyParts(int slabs, int consumer, int thread, TensorPipeline<C>& pipeline,
                              float (&d)[kCount]) {
  static_assert(C::kConsumers == 2);
  const auto turn = [](int whose) { return BarrierOf<C>(Meeting::kTurn, whose); };
  constexpr int kBoth = C::kConsumers * C::kWarpgroup;
  if (consumer == 1) NamedBarrierArrive(turn(0), kBoth);
  float sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = d[i] = 0;
  for (int slab = 0; slab < slabs; ++slab, pipeline.Next()) {
    pipeline.WaitUntilFull();
    NamedBarrier(turn(consumer), kBoth);
    ProductsFence();
    const TensorSlab<C, kMnA, kMnB> operands(pipeline, consumer);
#pragma unroll
    for (int order = C::kParts - 1; order >= 0; --order)
#pragma unroll
      for (int part = 0; part <= order; ++part) operands.Multiply(order - part, part, true, d);
    CommitProducts();
    if (consumer == 0 || slab + 1 < slabs) NamedBarrierArrive(turn(1 - consumer), kBoth);
    WaitForProducts<0>();
    SumsAreComplete(d);
    pipeline.Release(pipeline.stage(), thread);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float sum = sums[i] + d[i];
      d[i] += sums[i] - sum;
      sums[i] = sum;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = (sums[i] + d[i]) * (1 / (kPartsScale * kPartsScale));
}

// --- Sums that pass from a cluster to the next ---

// One thread waits until another worker has set the flag, and clears it for the next launch.
__device__ inline void WaitForPartial(std::uint32_t* written) {
  std::uint32_t set = 0;
  while (set == 0)
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(set) : "l"(written) : "memory");
  *written = 0;
}
__device__ inline void AnnouncePartial(std::uint32_t* written) {
  asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(written) : "memory");
}

// Between a consumer and its messenger: a warp of the fetching warpgroup that tells other blocks
// that sums are stored, or waits for theirs, so that the consumer need not wait for memory. Where
// they meet, one side arrives and the other waits: bar.sync asks that all who wait at a barrier
// stand at the same instruction.
template <class C>
inline constexpr int kMessageThreads = C::kWarpgroup + kWarpSize;  // that meet

// A thread's sums, as packs kWarpgroup apart, of those that a block's consumer leaves behind.
template <class C>
__device__ float4* PartialOf(const TensorWork& work, int block, int consumer, int thread) {
  constexpr int kPacks = C::kGroupRows * C::kColumns / 4;
  return reinterpret_cast<float4*>(work.partials) +
         (std::int64_t{block} * C::kConsumers + consumer) * kPacks + thread;
}

// Leaves the sums of the first part of a tile to the next cluster.
template <class C, int kCount>
__device__ void StorePartial(const float (&d)[kCount], const TensorWork& work, int consumer,
                             int thread) {
  float4* to = PartialOf<C>(work, static_cast<int>(blockIdx.x), consumer, thread);
#pragma unroll
  for (int i = 0; i < kCount; i += 4, to += C::kWarpgroup)
    __stcg(to, make_float4(d[i], d[i + 1], d[i + 2], d[i + 3]));
  NamedBarrierArrive(BarrierOf<C>(Meeting::kSumsStored, consumer), kMessageThreads<C>);
}

// Adds those that the cluster before has left.
template <class C, int kCount>
__device__ void AddPartial(float (&d)[kCount], const TensorWork& work, int consumer, int thread) {
  NamedBarrier(BarrierOf<C>(Meeting::kMayLoad, consumer), kMessageThreads<C>);
  const float4* from =
      PartialOf<C>(work, static_cast<int>(blockIdx.x) - C::kCluster, consumer, thread);
#pragma unroll
  for (int i = 0; i < kCount; i += 4, from += C::kWarpgroup) {
    const float4 pack = __ldcg(from);
    d[i] += pack.x, d[i + 1] += pack.y, d[i + 2] += pack.z, d[i + 3] += pack.w;
  }
}

// What a messenger tells and waits for, in the order of its consumer's pieces.
template <class C>
__device__ void PassMessages(const TensorWork& work, int cluster, int clusters, int consumer) {
  const bool speaks = threadIdx.x % kWarpSize == 0;
  std::uint32_t* const written =
      work.written + static_cast<int>(blockIdx.x) * C::kConsumers + consumer;
  for (int i = work.sharing.rounds;; ++i) {
    const Piece piece = PieceOf(work.sharing, cluster, clusters, i);
    if (piece.slabs == 0) return;
    if (!piece.ends) {
      NamedBarrier(BarrierOf<C>(Meeting::kSumsStored, consumer), kMessageThreads<C>);
      if (speaks) AnnouncePartial(written);
    }
    if (!piece.starts) {
      if (speaks) WaitForPartial(written - C::kCluster * C::kConsumers);
      __syncwarp();
      NamedBarrierArrive(BarrierOf<C>(Meeting::kMayLoad, consumer), kMessageThreads<C>);
    }
  }
}

// --- All of it ---

template <class C, bool kMnA, bool kMnB>
__global__ void __cluster_dims__(C::kCluster, 1, 1) __launch_bounds__(C::kThreads, 1)
    MatmulTensor(const __grid_constant__ CUtensorMap a_map,
                 const __grid_constant__ CUtensorMap b_map,
                 const __grid_constant__ CUtensorMap c_map,
                 const __grid_constant__ TensorWork work) {
  using T = typename C::T;
  __shared__ alignas(8) std::uint64_t barriers[2 * C::kStages];
  const std::uint32_t slabs =
      (SharedAddress(DynamicShared<char>()) + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
  TensorPipeline<C> pipeline(slabs, SharedAddress(barriers));
  // The same in all lanes of a warp, which the compiler learns from the shuffle.
  const int warpgroup = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / C::kWarpgroup, 0);
  const int rank = C::kCluster == 1 ? 0 : static_cast<int>(ClusterRank());
  const int cluster = static_cast<int>(blockIdx.x) / C::kCluster;
  const int clusters = static_cast<int>(gridDim.x) / C::kCluster;

  // One warp makes the barriers. The others meanwhile find out where the block begins: that takes
  // nearly a thousand cycles, since no cache has the parameters yet, and would be all waited for.
  if (threadIdx.x == C::kThreads - kWarpSize) {
    PrefetchMap(&a_map);
    PrefetchMap(&b_map);
    PrefetchMap(&c_map);
    pipeline.Init();
  }
  Piece piece = PieceOf(work.sharing, cluster, clusters, 0);
  TensorPlace place(work, piece);
  if constexpr (C::kCluster == 1) {
    __syncthreads();  // the barriers are made
  } else {
    ClusterBarrier();  // in all blocks
  }
  WaitForKernelBefore();

  if (warpgroup == C::kConsumers) {
    if constexpr (C::kConsumers > 1) GiveRegistersBack<40>();
    if (threadIdx.x == C::kConsumers * C::kWarpgroup) {
      for (int i = 1; piece.slabs != 0; ++i) {
        FetchSlabs<C, kMnA, kMnB>(a_map, b_map, work, place, rank, pipeline);
        piece = PieceOf(work.sharing, cluster, clusters, i);
        place = TensorPlace(work, piece);
      }
      AllowNextKernel();
    } else if (work.sharing.shared != 0) {
      const int warp = static_cast<int>(threadIdx.x) % C::kWarpgroup / kWarpSize;
      if (warp >= 1 && warp <= C::kConsumers) PassMessages<C>(work, cluster, clusters, warp - 1);
    }
  } else {
    if constexpr (C::kConsumers > 1) TakeRegisters<232>();
    const int thread = static_cast<int>(threadIdx.x) % C::kWarpgroup;
    const std::uint32_t staging =
        slabs + C::kStages * C::kStageBytes + warpgroup * C::kStagingBytes;
    const auto next = [&](int i) {
      piece = PieceOf(work.sharing, cluster, clusters, i);
      place = TensorPlace(work, piece);
    };
    for (int i = 1; piece.slabs != 0; next(i++)) {
      float d[C::kColumns / 2];
      if constexpr (kIsTurned<C, kMnA>) {
        MultiplyTurned<C>(place.slabs, warpgroup, thread, pipeline, d);
      } else if constexpr (C::kParts == 1) {
        MultiplySlabs<C, kMnA, kMnB>(place.slabs, warpgroup, thread, pipeline, d);
      } else {
        MultiplyParts<C, kMnA, kMnB>(place.slabs, warpgroup, thread, pipeline, d);
      }
      if (!piece.ends) {
        StorePartial<C>(d, work, warpgroup, thread);
        continue;
      }
      if (!piece.starts) AddPartial<C>(d, work, warpgroup, thread);
      if constexpr (C::kParts > 1) {
        bool finite = true;
#pragma unroll
        for (float sum : d) finite = finite && fabsf(sum) <= std::numeric_limits<float>::max();
        if (!finite) *work.nonfinite = 1;
      }
      const int row = (place.row_tile * C::kCluster + rank) * C::kRows + warpgroup * C::kGroupRows;
      const int column = place.column_tile * C::kColumns;
      if (sizeof(T) == 4 || C::kParts > 1 || work.floats) {
        StoreTile<C, float, kIsTurned<C, kMnA>>(d, c_map, staging, row, column, place.split);
      } else if constexpr (sizeof(T) == 2) {
        StoreTile<C, T, false>(d, c_map, staging, row, column, place.split);
      }
    }
    if (thread == 0) WaitForStoresToRead();
  }
  // No block leaves while another may still write into its shared memory.
  if constexpr (C::kCluster > 1) ClusterBarrier();
}

// --- Operands: device ---

template <class Out, class In>
__device__ Out Rounded(In x) {
  if constexpr (std::is_same_v<Out, Tf32>) {
    Tf32 out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out.bits) : "f"(x));
    return out;
  } else {
    return ConvertElement<Out>(x);
  }
}

// A pack of elements from a row that ends at `columns`, zeros beyond. packable: rows are aligned to
// packs.
template <class In, int kWidth>
__device__ void LoadRow(const In* row, std::int64_t column, std::int64_t columns, bool packable,
                        In (&x)[kWidth]) {
  if (packable && column + kWidth <= columns) {
#pragma unroll
    for (int w = 0; w < kWidth; w += Pack<In>::kSize) {
      const Pack<In> pack = LoadPack(row + column + w);
#pragma unroll
      for (int i = 0; i < Pack<In>::kSize; ++i) x[w + i] = pack.v[i];
    }
  } else {
#pragma unroll
    for (int w = 0; w < kWidth; ++w) x[w] = column + w < columns ? row[column + w] : In{};
  }
}

// out[row][column] = in[row][column], rows of `pitch` and `out_pitch`, a multiple of the pack: a
// thread writes a pack. What lies between columns and out_pitch is never read.
template <class In, class Out>
__global__ void __launch_bounds__(256)
    CopyOperand(const In* in, std::int64_t rows, std::int64_t columns, std::int64_t pitch,
                bool packable, Out* out, std::int64_t out_pitch) {
  AllowNextKernel();
  constexpr int kWidth = Pack<Out>::kSize;
  const std::int64_t packs = out_pitch / kWidth;
  const std::int64_t thread = GridThread();
  const std::int64_t row = thread / packs, column = thread % packs * kWidth;
  if (row >= rows) return;
  In x[kWidth];
  LoadRow(in + row * pitch, column, columns, packable, x);
  Pack<Out> pack;
#pragma unroll
  for (int w = 0; w < kWidth; ++w) pack.v[w] = Rounded<Out>(x[w]);
  StorePack(out + row * out_pitch + column, pack);
}

// The same transposed: out[row][column] = in[column][row]. A block moves a square of kSquare
// through shared memory, whose odd pitch spreads columns over the banks.
inline constexpr int kSquare = 64;

template <class In, class Out>
__global__ void __launch_bounds__(256)
    TransposeOperand(const In* in, std::int64_t rows, std::int64_t columns, std::int64_t pitch,
                     Out* out, std::int64_t out_pitch) {
  AllowNextKernel();
  constexpr int kWidth = Pack<Out>::kSize;
  __shared__ In square[kSquare][kSquare + 1];
  const std::int64_t row_squares = (rows + kSquare - 1) / kSquare;
  const std::int64_t row = blockIdx.x % row_squares * kSquare;
  const std::int64_t column = blockIdx.x / row_squares * kSquare;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = thread / kSquare; i < kSquare; i += 256 / kSquare) {
    const std::int64_t from_row = column + i, from_column = row + thread % kSquare;
    square[i][thread % kSquare] =
        from_row < columns && from_column < rows ? in[from_row * pitch + from_column] : In{};
  }
  __syncthreads();  // the square is complete
  constexpr int kPacks = kSquare / kWidth;
#pragma unroll
  for (int i = thread; i < kSquare * kPacks; i += 256) {
    const int y = i / kPacks, x = i % kPacks * kWidth;
    if (row + y >= rows || column + x >= out_pitch) continue;
    Pack<Out> pack;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) pack.v[w] = Rounded<Out>(square[x + w][y]);
    StorePack(out + (row + y) * out_pitch + column + x, pack);
  }
}

// --- Results: device ---

// c[y][x] = the sum of sums[0][y][x], sums[1][y][x], ..., in this order: rows of `pitch` become
// rows of n. A block takes kFinishedRows x kFinishedColumns, a warp one row of them, whose loads
// are all on their way before it writes.
constexpr int kFinishedRows = 8, kFinishedColumns = 256;

template <class S, class O>
__global__ void __launch_bounds__(kFinishedRows* kWarpSize)
    FinishResults(const S* sums, int splits, std::int64_t m, std::int64_t n, std::int64_t pitch,
                  O* c) {
  AllowNextKernel();
  WaitForKernelBefore();
  const auto pieces = static_cast<unsigned>((n + kFinishedColumns - 1) / kFinishedColumns);
  const std::int64_t row =
      std::int64_t{blockIdx.x / pieces} * kFinishedRows + threadIdx.x / kWarpSize;
  const std::int64_t column =
      std::int64_t{blockIdx.x % pieces} * kFinishedColumns + threadIdx.x % kWarpSize;
  const auto end = static_cast<int>(min(n - column, std::int64_t{kFinishedColumns}));
  if (row >= m || end <= 0) return;
  float sum[kFinishedColumns / kWarpSize];
  sums += row * pitch + column;
  for (int s = 0; s < splits; ++s, sums += m * pitch) {
#pragma unroll
    for (int i = 0; i < kFinishedColumns; i += kWarpSize) {
      // No branch, which the load would wait behind.
      const auto x = static_cast<float>(sums[min(i, end - 1)]);
      sum[i / kWarpSize] = s == 0 ? x : sum[i / kWarpSize] + x;
    }
  }
  c += row * n + column;
#pragma unroll
  for (int i = 0; i < kFinishedColumns; i += kWarpSize)
    if (i < end) c[i] = static_cast<O>(sum[i / kWarpSize]);
}

// --- Operands: host ---

// A matrix as the copy engine can read it: rows of `pitch` elements, of which `columns` count, k
// along the rows or, if mn_major, across. Parts of one stand one behind the other.
template <class T>
struct TensorOperand {
  const T* data;
  std::int64_t rows, columns, pitch;
  bool mn_major;
};

// A copy of the matrix in the stream's scratch memory that the engine can read.
template <class Out, class In>
TensorOperand<Out> Copied(const In* data, std::int64_t rows, std::int64_t columns,
                          std::int64_t pitch, bool mn_major, CudaStream& stream) {
  const std::int64_t out_pitch = PaddedPitch<Out>(columns);
  auto* out =
      static_cast<Out*>(stream.Scratch(static_cast<std::size_t>(rows * out_pitch) * sizeof(Out)));
  const std::int64_t threads = rows * (out_pitch / Pack<Out>::kSize);
  CopyOperand<<<static_cast<unsigned>(CeilDiv(threads, 256)), 256, 0, stream.handle()>>>(
      data, rows, columns, pitch, IsPackable<In>(data, pitch), out, out_pitch);
  CUDA_CHECK_LAUNCH(CopyOperand);
  return {out, rows, columns, out_pitch, mn_major};
}

// A copy with k along the rows, of a matrix [columns, rows] in which it goes across.
template <class Out, class In>
TensorOperand<Out> Transposed(const In* data, std::int64_t rows, std::int64_t columns,
                              std::int64_t pitch, CudaStream& stream) {
  const std::int64_t out_pitch = PaddedPitch<Out>(columns);
  auto* out =
      static_cast<Out*>(stream.Scratch(static_cast<std::size_t>(rows * out_pitch) * sizeof(Out)));
  const std::int64_t squares = CeilDiv(rows, kSquare) * CeilDiv(columns, kSquare);
  TransposeOperand<<<static_cast<unsigned>(squares), 256, 0, stream.handle()>>>(
      data, rows, columns, pitch, out, out_pitch);
  CUDA_CHECK_LAUNCH(TransposeOperand);
  return {out, rows, columns, out_pitch, false};
}

// --- Launch: host ---

// Row tiles times rows of a group: blocks that run at the same time cover about a square of c.
constexpr int kGroupedRows = 2048;

struct LaunchGrid {
  unsigned blocks, threads;
  std::size_t shared_bytes;
  unsigned cluster = 0;  // blocks of one; 0: the kernel says it, or has none
};

// Launches a kernel that waits for the one before it by itself.
template <class... Parameters, class... Arguments>
void LaunchOverlapping(void (*kernel)(Parameters...), const LaunchGrid& grid, CudaStream& stream,
                       const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {grid.cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream.handle();
  config.attrs = attributes;
  config.numAttrs = grid.cluster > 0 ? 2 : 1;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// Clusters of so many blocks that run on a GPU at a time, for a kernel that has a multiprocessor to
// itself. The blocks of one lie in one of the groups of multiprocessors that make a GPU, and those
// differ in size.
template <class... Parameters>
int ClustersAtATime(void (*kernel)(Parameters...), unsigned threads, std::size_t shared_bytes,
                    int blocks, const CudaStream& stream) {
  if (blocks <= 2) return stream.device().info().multiprocessors / blocks;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveClusters(&count, kernel, &config));
  return count;
}

// How the work is cut: into which tiles, and k into how many pieces, or tiles into parts for two
// clusters.
struct TensorPlan {
  int tile = 0;  // an index into the row's tiles
  int splits = 1;
  bool shares = false;
  double time = std::numeric_limits<double>::infinity();
};

// c: [splits, m, pitch], of O.
template <class C, bool kMnA, bool kMnB, class O>
void LaunchTensor(const MatmulProblem& p, const TensorOperand<typename C::T>& a,
                  const TensorOperand<typename C::T>& b, const TensorPlan& plan, const O* c,
                  std::int64_t pitch, unsigned* nonfinite, CudaStream& stream) {
  using T = typename C::T;
  const auto map = [](const TensorOperand<T>& x, bool mn_major) {
    return MakeTensorMap<T>(x.data, C::kParts, x.rows, x.columns, x.pitch,
                            mn_major ? C::kDepth : C::kGroupRows, mn_major ? 128 : C::kRowBytes);
  };
  const CUtensorMap a_map = map(a, kMnA), b_map = map(b, kMnB);

  TensorWork work{};
  const auto [rows, columns] = kIsTurned<C, kMnA> ? std::pair(p.n, p.m) : std::pair(p.m, p.n);
  work.rows = static_cast<int>(rows);
  work.columns = static_cast<int>(columns);
  work.row_tiles = static_cast<int>(CeilDiv(rows, C::kRows * C::kCluster));
  const auto column_tiles = static_cast<int>(CeilDiv(columns, C::kColumns));
  const int group_rows = std::min(kGroupedRows / (C::kRows * C::kCluster), work.row_tiles);
  work.tiles = Divisor(work.row_tiles * column_tiles);
  work.group_tiles = Divisor(group_rows * column_tiles);
  work.group_rows = Divisor(group_rows);
  work.last_rows = Divisor((work.row_tiles - 1) % group_rows + 1);
  work.slabs = static_cast<int>(CeilDiv(p.k, C::kDepth));
  const std::int64_t split_slabs = CeilDiv(work.slabs, plan.splits);
  const std::int64_t splits = CeilDiv(work.slabs, split_slabs);
  const std::int64_t pieces = std::int64_t{work.tiles.value()} * splits;
  const std::int64_t clusters =
      std::min<std::int64_t>(stream.device().info().multiprocessors / C::kCluster, pieces);
  work.sharing = plan.shares ? ShareTiles(pieces, split_slabs, clusters)
                             : WholeTiles(pieces, split_slabs, clusters);
  if (work.sharing.shared != 0) {
    work.partials = static_cast<float*>(stream.Scratch(
        static_cast<std::size_t>(clusters * C::kCluster * C::kRows * C::kColumns) * sizeof(float)));
    work.written = stream.Tickets();
  }
  work.nonfinite = nonfinite;
  work.floats = std::is_same_v<O, float>;
  const CUtensorMap c_map = MakeTensorMap<O>(c, splits, p.m, p.n, pitch, /*box_rows=*/64,
                                             /*row_bytes=*/128);

  const auto kernel = MatmulTensor<C, kMnA, kMnB>;
  CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
  LaunchOverlapping(kernel,
                    {static_cast<unsigned>(clusters * C::kCluster), C::kThreads, C::kSharedBytes},
                    stream, a_map, b_map, c_map, work);
}

// --- Choice of tiles: host ---

// What the model of plans knows of a product: a, [m, k], and b, [k, n], as they are fetched.
struct TensorProduct {
  std::int64_t m, n, k;
  double a_row, b_row;  // see FetchTime
  int multiprocessors;
};

// What a row of a box of the operand takes, in the model's units, where it is more than the rates
// of tiles have in them: its 128 bytes are parts of two lines of the second-level cache, and the
// engine reads both. Measured on an H200: 2 ns, and 2.8 where sectors of 32 bytes are cut, too.
template <class T>
double FetchTime(const TensorOperand<T>& x) {
  const std::uintptr_t bits =
      reinterpret_cast<std::uintptr_t>(x.data) | static_cast<std::uintptr_t>(x.pitch) * sizeof(T);
  return bits % 128 == 0 ? 0 : bits % 32 == 0 ? 7.6e3 : 1.1e4;
}

template <class T>
TensorProduct ProductOf(std::int64_t m, std::int64_t n, std::int64_t k, const TensorOperand<T>& a,
                        const TensorOperand<T>& b, const CudaStream& stream) {
  return {m, n, k, FetchTime(a), FetchTime(b), stream.device().info().multiprocessors};
}

// A model of what a plan takes, in multiply-adds of 16 bits that one multiprocessor could do, 3.9e6
// a microsecond: rounds of pieces of work, each with filling the pipeline and writing the tile. The
// better one of it and `best`. rate: about the share of the tensor cores' 16-bit speed that the
// tile reaches in its main loop. This and all constants are such that the model prefers what was
// faster on an H200, for 16 bits in 75 shapes with each tile, whole, in parts and with k cut.
template <class C>
TensorPlan BetterPlan(TensorPlan best, int tile, double rate, const TensorProduct& p) {
  constexpr double kStart = C::kCluster == 1 ? 1e7 : 1.4e7;  // of a piece, and its end
  constexpr double kAdd = 1e7;                               // another kernel, about 3 us
  // At least one of each: empty products have a plan, too, for the models to look at.
  const std::int64_t tiles =
      std::max<std::int64_t>(1, CeilDiv(p.m, C::kRows * C::kCluster) * CeilDiv(p.n, C::kColumns));
  const std::int64_t slots = p.multiprocessors / C::kCluster;
  const std::int64_t slabs = std::max<std::int64_t>(1, CeilDiv(p.k, C::kDepth));
  const double slab_time =
      std::max(C::kRows * C::kColumns * C::kDepth * C::kProducts / rate,
               C::kParts * (C::kRows * p.a_row + C::kColumns / C::kCluster * p.b_row));
  const auto try_splits = [&](std::int64_t splits) {
    const std::int64_t split_slabs = CeilDiv(slabs, splits);
    // Sums written and read again in f32, at 10 bytes a clock and multiprocessor.
    const double added = splits == 1 ? 0
                                     : kAdd + static_cast<double>(p.m * p.n * (splits + 1)) * 4 /
                                                  10 * 2048 / p.multiprocessors;
    const double time = static_cast<double>(CeilDiv(tiles * splits, slots)) *
                            (static_cast<double>(split_slabs) * slab_time + kStart) +
                        added;
    if (time < best.time) best = {tile, static_cast<int>(CeilDiv(slabs, split_slabs)), false, time};
  };
  try_splits(1);
  if (tiles > slots && tiles % slots != 0) {
    // Of what a cluster has, the last tile and some come in parts. Those cost another beginning and
    // end, and the sums' way through memory. In them clusters are no longer at the same steps along
    // k, so that they find less in the second level of cache: the less, the more is left over.
    constexpr double kPass = 1e7, kApart = 0.2;
    // The model is no better than that.
    constexpr double kGain = 0.995;
    const auto rounds = static_cast<double>(tiles / slots);
    const double left = static_cast<double>(tiles % slots) / static_cast<double>(slots);
    const double time =
        (rounds - 1 + (1 + left) * (1 + kApart * left)) * static_cast<double>(slabs) * slab_time +
        (rounds + 2) * kStart + kPass;
    if (time < kGain * best.time) best = {tile, 1, true, time};
  }
  if (tiles * 2 <= slots) {
    for (std::int64_t splits = 2; splits <= slots / tiles && splits * 4 <= slabs; ++splits)
      try_splits(splits);
  }
  return best;
}

// A tile that a row has, and its rate for BetterPlan.
template <class C>
struct RatedTile {
  double rate;
};

// Calls run(C(), plan) with the best tile and plan.
template <class Run, class... Tiles>
void RunBestPlan(const TensorProduct& p, const Run& run, RatedTile<Tiles>... tiles) {
  TensorPlan plan;
  int tile = 0;
  ((plan = BetterPlan<Tiles>(plan, tile++, tiles.rate, p)), ...);
  tile = 0;
  ((tile++ == plan.tile ? run(Tiles(), plan) : void()), ...);
}

// --- Rows: host ---

inline std::string TensorMissing(const Device& device) {
  return device.info().compute_capability == 90
             ? ""
             : "compute capability 9.0: wgmma is of that one alone";
}

// The copy engine counts in 32 bits with a sign.
inline std::string TensorRefusal(const MatmulProblem& p) {
  constexpr std::int64_t most = (std::int64_t{1} << 31) - 1024;
  return std::max({p.m, p.n, p.k}) <= most ? "" : "extents of at most " + std::to_string(most);
}

// Whether there is nothing to multiply; c is written then.
inline bool TensorIsTrivial(const MatmulProblem& p, CudaStream& stream) {
  if (p.m == 0 || p.n == 0) return true;
  if (p.k > 0) return false;
  CUDA_CHECK(cudaMemsetAsync(p.c, 0, static_cast<std::size_t>(p.m * p.n) * SizeOf(p.out_dtype),
                             stream.handle()));
  return true;
}

// The tensor cores sum products of one instruction by aligning them and the sum so far to the
// largest and cutting off what sticks out (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior
// of NVIDIA tensor cores", 2021): each of up to 17 terms for 16 products, or 9 for 8, costs 2 u of
// the largest at most, and so does the result.
inline double TensorSumRoundoff(std::int64_t k) {
  return 3 * (static_cast<double>(k) + 16) * kRoundoffF32;
}

// Loads of tiles of `columns` columns, of elements of `size` bytes in `parts`, and what copies read
// and write: of the operands that need one, and of c.
inline Cost TensorCost(const MatmulProblem& p, std::int64_t columns, std::size_t size, int parts,
                       bool copies_a, bool copies_b) {
  const auto copy = [&](bool copies, std::int64_t rows) {
    const auto elements = static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(p.k);
    return copies ? elements * (SizeOf(p.dtype) + size * static_cast<std::size_t>(parts)) : 0;
  };
  const std::size_t out_size = SizeOf(p.out_dtype);
  const bool copies_c = !IsBoxWritable(p.c, p.n * static_cast<std::int64_t>(out_size));
  Cost cost = MatmulCost(p, 0);
  cost.depth = static_cast<std::uint64_t>(p.k / 16 + 1);  // an instruction adds up as many steps
  if (copies_c) cost.bytes += 2 * static_cast<std::uint64_t>(p.m * p.n) * out_size;
  cost.bytes += MatmulTileLoads(p, 128, columns) * size * static_cast<std::size_t>(parts) +
                copy(copies_a, p.m) + copy(copies_b, p.n);
  return cost;
}

// Scratch memory of a copy of a matrix, in parts.
template <class T>
std::uint64_t CopyScratch(std::int64_t rows, std::int64_t columns, int parts = 1) {
  return static_cast<std::uint64_t>(parts * rows * PaddedPitch<T>(columns)) * sizeof(T);
}

// Of sums on their way to c, at most: where the copy engine cannot write c, of all; where k is cut,
// of as many as there are pieces, and where tiles come in parts, of a tile for each multiprocessor:
// GPUs with these units have up to 160, and the largest tile is 128 x 256.
inline std::uint64_t SumsScratch(const MatmulProblem& p) {
  constexpr std::uint64_t kTiles = std::uint64_t{160} * 128 * 256 * sizeof(float);
  const std::uint64_t all = CopyScratch<float>(p.m, p.n);
  const bool copies_c = !IsBoxWritable(p.c, p.n * static_cast<std::int64_t>(SizeOf(p.out_dtype)));
  // k is cut into pieces of 128 steps and more.
  const auto pieces = static_cast<std::uint64_t>(p.k / 128 + 1);
  return std::max(copies_c ? all : 0, all > kTiles / pieces ? kTiles : all * pieces);
}

// Launches: by way of scratch memory where k is cut, or where the copy engine cannot write c.
template <class C, bool kMnA, bool kMnB>
void RunPlan(const MatmulProblem& p, const TensorOperand<typename C::T>& a,
             const TensorOperand<typename C::T>& b, const TensorPlan& plan, unsigned* nonfinite,
             CudaStream& stream) {
  // S: of the sums that the tensor cores leave; O: of c.
  const auto run = [&](auto s, auto o) {
    using S = decltype(s);
    using O = decltype(o);
    auto* const c = static_cast<O*>(p.c);
    if (plan.splits == 1 && IsBoxWritable(c, p.n * static_cast<std::int64_t>(sizeof(O)))) {
      LaunchTensor<C, kMnA, kMnB>(p, a, b, plan, c, p.n, nonfinite, stream);
      return;
    }
    const std::int64_t pitch = PaddedPitch<S>(p.n);
    auto* const sums = static_cast<S*>(
        stream.Scratch(static_cast<std::size_t>(plan.splits * p.m * pitch) * sizeof(S)));
    LaunchTensor<C, kMnA, kMnB>(p, a, b, plan, sums, pitch, nonfinite, stream);
    const std::int64_t blocks = CeilDiv(p.m, kFinishedRows) * CeilDiv(p.n, kFinishedColumns);
    LaunchOverlapping(FinishResults<S, O>,
                      {static_cast<unsigned>(blocks), kFinishedRows * kWarpSize, 0}, stream,
                      static_cast<const S*>(sums), plan.splits, p.m, p.n, pitch, c);
  };
  if constexpr (sizeof(typename C::T) == 2 && C::kParts == 1) {
    using T = typename C::T;
    if (p.out_dtype != DType::kF32) {
      if (plan.splits == 1) {
        run(T{}, T{});
      } else {
        run(float{}, T{});
      }
      return;
    }
  }
  run(float{}, float{});
}

// For operands of 16 bits, each either way around.
template <class C>
void RunPlanAnyLayout(const MatmulProblem& p, const TensorOperand<typename C::T>& a,
                      const TensorOperand<typename C::T>& b, const TensorPlan& plan,
                      unsigned* nonfinite, CudaStream& stream) {
  if (a.mn_major && b.mn_major) {
    RunPlan<C, true, true>(p, a, b, plan, nonfinite, stream);
  } else if (a.mn_major) {
    RunPlan<C, true, false>(p, a, b, plan, nonfinite, stream);
  } else if (b.mn_major) {
    RunPlan<C, false, true>(p, a, b, plan, nonfinite, stream);
  } else {
    RunPlan<C, false, false>(p, a, b, plan, nonfinite, stream);
  }
}

// --- `tensor_bf16` and `tensor_f16` ---

// A copy, if need be: of f32, and where the copy engine cannot read the array itself.
template <class T>
TensorOperand<T> HalfOperand(const void* data, [[maybe_unused]] DType dtype, std::int64_t rows,
                             std::int64_t columns, std::int64_t pitch, bool mn_major,
                             CudaStream& stream) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (dtype == DType::kF32)
      return Copied<T>(static_cast<const float*>(data), rows, columns, pitch, mn_major, stream);
  }
  const auto* elements = static_cast<const T*>(data);
  if (!IsBoxAligned(data, rows, pitch * static_cast<std::int64_t>(sizeof(T))))
    return Copied<T>(elements, rows, columns, pitch, mn_major, stream);
  return {elements, rows, columns, pitch, mn_major};
}

inline Cost TensorCost16(const MatmulProblem& p) {
  const bool rounds = SizeOf(p.dtype) != 2;
  return TensorCost(p, 256, 2, 1, rounds || !IsBoxAligned(p.a, p.m, p.lda * 2),
                    rounds || !IsBoxAligned(p.b, p.n, p.ldb * 2));
}

inline std::uint64_t TensorScratch16(const MatmulProblem& p) {
  const bool rounds = SizeOf(p.dtype) != 2;
  // Both kinds of elements have one size.
  const auto copy = [&](const void* data, std::int64_t rows, std::int64_t columns,
                        std::int64_t pitch) {
    return rounds || !IsBoxAligned(data, rows, pitch * 2) ? CopyScratch<Half>(rows, columns) : 0;
  };
  return SumsScratch(p) +
         (p.transpose_a ? copy(p.a, p.k, p.m, p.lda) : copy(p.a, p.m, p.k, p.lda)) +
         (p.transpose_b ? copy(p.b, p.n, p.k, p.ldb) : copy(p.b, p.k, p.n, p.ldb));
}

template <class T>
void MatmulTensor16(const MatmulProblem& p, Stream& any_lane) {
  // Pairs share what they fetch: that matters to many tiles, and to small ones along a long k.
  using LargePair = TensorTile<T, 128, 256, 2, 3, /*kBoxes=*/4>;
  using Large = TensorTile<T, 128, 256, 1, 4>;
  using Medium = TensorTile<T, 128, 192, 1, 4, /*kBoxes=*/3>;
  using SquarePair = TensorTile<T, 128, 128, 2, 6>;
  using Square = TensorTile<T, 128, 128, 1, 6>;
  using SmallPair = TensorTile<T, 64, 128, 2, 8>;
  using Small = TensorTile<T, 64, 128, 1, 8>;
  CudaStream& stream = Cuda(any_lane);
  if (TensorIsTrivial(p, stream)) return;
  const auto a = p.transpose_a ? HalfOperand<T>(p.a, p.dtype, p.k, p.m, p.lda, true, stream)
                               : HalfOperand<T>(p.a, p.dtype, p.m, p.k, p.lda, false, stream);
  const auto b = p.transpose_b ? HalfOperand<T>(p.b, p.dtype, p.n, p.k, p.ldb, false, stream)
                               : HalfOperand<T>(p.b, p.dtype, p.k, p.n, p.ldb, true, stream);
  const TensorProduct product = ProductOf(p.m, p.n, p.k, a, b, stream);
  const auto run = [&](auto tile, const TensorPlan& plan) {
    RunPlanAnyLayout<decltype(tile)>(p, a, b, plan, nullptr, stream);
  };
  RunBestPlan(product, run, RatedTile<LargePair>{0.8}, RatedTile<Large>{0.785},
              RatedTile<Medium>{0.775}, RatedTile<SquarePair>{0.82}, RatedTile<Square>{0.72},
              RatedTile<SmallPair>{0.7}, RatedTile<Small>{0.58});
}

}  // namespace tessera
