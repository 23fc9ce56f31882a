// Scan in one pass, in the fixed order of kernels/same_bits/fixed_scan.h.
//
// A block scans a chunk of 4096 elements: 16 elements per thread, 32 threads per warp, 8 warps. It
// needs the fold of everything before its chunk. The order prescribes the totals to combine: those
// of the earlier chunks in its group of 256, those of the earlier groups in its region, and the
// fold of all earlier regions. A block therefore waits neither for the result of the chunk
// before its own, as in a chain, nor for whatever happens to arrive first, as in `look_back`. It
// waits for at most 255 totals of chunks, one per thread, and at the same time for at most 31
// totals of groups and one value for the regions. The last chunk of a group sends the group's
// total, and the last chunk of a region also sends the fold of all regions so far.
//
//     chunks   | 0 1 2 ... 255 | 256 ... 511 | 512 513 514 ...
//     groups   |       0       |      1      |  2           chunk 514 reads groups 0 and 1,
//                                                           and chunks 512 and 513
//
// Blocks take chunks by a ticket, so every chunk that a block waits for is done or running.
//
// The 16 elements of a thread are adjacent, so direct loads of a warp would touch 32 places. A warp
// therefore copies its 512 elements to shared memory and its results from there, in vectors where
// their addresses allow it. Rows of up to 512 elements share a warp, and rows of up to a chunk have
// a block each. Where lines are columns, a block walks down as many of them as fill 64 bytes, 512
// elements at a time. If that gives too few blocks, it first finds the totals of all chunks, and
// then each chunk has a block.
//
// Cost at n = 2^20, f32: 4 MiB read, 4 MiB written, a memset of 4 KiB, one launch.
//
// The kernels are correct for any length, and for any alignment, because only aligned copies use
// vectors.
#include <cuda_pipeline.h>

#include <algorithm>
#include <bit>
#include <type_traits>

#include "kernels/cuda/common/loads.cuh"
#include "kernels/cuda/scan/scan.cuh"
#include "kernels/cuda/tree/mailbox.cuh"

namespace tessera {
namespace {

static_assert(kScanSegments == kWarpSize && kScanFan == kWarpSize);

// Rows without gaps.
template <class F>
struct Rows {
  const typename F::Element* x;
  typename F::Out* out;
  std::int64_t rows, length;
  bool exclusive, reverse;
};

// --- Shared memory of a warp ---

// The elements of a stripe in shared memory, in the order of memory. Every 16 elements, or every 32
// of 8 bytes, are followed by 16 bytes, so that the threads of a warp, which take 16 elements each,
// use different banks.
template <class A>
struct Stage {
  static constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(A));
  static constexpr int kBetweenGaps = sizeof(A) == 8 ? 2 * kScanItems : kScanItems;
  static constexpr int kSlots =
      static_cast<int>(kScanStripe) / kBetweenGaps * (kBetweenGaps + kVector);

  __device__ A* At(int i) const { return slots + i + i / kBetweenGaps * kVector; }
  // Calls copy(A* slot, i, constant number of elements) for all elements [0, count), in vectors if
  // the memory at `elements` is aligned.
  template <class Copy>
  __device__ void ForAll(const A* elements, int count, Copy copy) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    if (reinterpret_cast<std::uintptr_t>(elements) % kVectorBytes != 0) {
#pragma unroll
      for (int k = 0; k < kScanItems; ++k) {
        const int i = lane + k * kWarpSize;
        if (i < count) copy(At(i), i, std::integral_constant<int, 1>());
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kScanItems / kVector; ++k) {
      const int i = (lane + k * kWarpSize) * kVector;
      if (i + kVector <= count) {
        copy(At(i), i, std::integral_constant<int, kVector>());
      } else {
        for (int j = i; j < count; ++j) copy(At(j), j, std::integral_constant<int, 1>());
      }
    }
  }
  // Begins to fill the stage with x[0, count). The warp must call Filled before it reads.
  __device__ void Fill(const A* x, int count) const {
    ForAll(x, count, [&](A* slot, int i, auto elements) {
      if constexpr (elements() * sizeof(A) >= 4) {
        __pipeline_memcpy_async(slot, x + i, elements() * sizeof(A));
      } else {
        *slot = x[i];
      }
    });
    __pipeline_commit();
  }
  __device__ static void Filled() {
    __pipeline_wait_prior(0);
    __syncwarp();
  }
  __device__ void Empty(A* out, int count) const {
    ForAll(out, count, [&](const A* slot, int i, auto elements) {
      using V = std::conditional_t<elements() == 1, A, uint4>;
      *reinterpret_cast<V*>(out + i) = *reinterpret_cast<const V*>(slot);
    });
  }

  A* slots;
};

// --- The elements of one thread ---

template <class F>
__device__ ScanValue<F> LoadValue(typename F::Element x) {
  return static_cast<ScanValue<F>>(F::Load(x, 0));
}

// A segment: `count` elements starting at index `first` of a stage, in the order of the scan.
// kWhole: `count` is kScanItems and `first` a multiple of that, so the segment moves in vectors.
template <bool kWhole>
struct Segment {
  int first, count;
  bool reverse;

  __device__ int size() const { return kWhole ? kScanItems : count; }
  __device__ int Place(int j) const { return first + (reverse ? size() - 1 - j : j); }
  template <class A>
  __device__ void Read(Stage<A> stage, A (&own)[kScanItems]) const {
    if constexpr (kWhole) {
      constexpr int kVector = Stage<A>::kVector;
#pragma unroll
      for (int k = 0; k < kScanItems / kVector; ++k) {
        const int from = reverse ? kScanItems / kVector - 1 - k : k;
        const uint4 bits = *reinterpret_cast<const uint4*>(stage.At(first) + from * kVector);
        A vector[kVector];
        std::memcpy(vector, &bits, sizeof bits);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          own[k * kVector + j] = reverse ? vector[kVector - 1 - j] : vector[j];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kScanItems; ++j)
        if (j < count) own[j] = *stage.At(Place(j));
    }
  }
  template <class A>
  __device__ void Write(const A (&own)[kScanItems], Stage<A> stage) const {
    if constexpr (kWhole) {
      constexpr int kVector = Stage<A>::kVector;
#pragma unroll
      for (int k = 0; k < kScanItems / kVector; ++k) {
        A vector[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          vector[j] = reverse ? own[k * kVector + kVector - 1 - j] : own[k * kVector + j];
        uint4 bits;
        std::memcpy(&bits, vector, sizeof bits);
        const int to = reverse ? kScanItems / kVector - 1 - k : k;
        *reinterpret_cast<uint4*>(stage.At(first) + to * kVector) = bits;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kScanItems; ++j)
        if (j < count) *stage.At(Place(j)) = own[j];
    }
  }
  // Returns the fold of all elements.
  template <class F>
  __device__ ScanValue<F> Total(const typename F::Element (&own)[kScanItems]) const {
    auto sum = F::template Identity<ScanValue<F>>();
#pragma unroll
    for (int j = 0; j < kScanItems; ++j)
      if (j < size()) sum = F::Combine(sum, LoadValue<F>(own[j]));
    return sum;
  }
};

// Computes the results of a segment. start: the fold of everything before it.
template <class F>
__device__ void Results(const typename F::Element (&own)[kScanItems], ScanValue<F> start,
                        bool exclusive, typename F::Out (&results)[kScanItems]) {
  auto sum = F::template Identity<ScanValue<F>>();
  auto before = start;
#pragma unroll
  for (int j = 0; j < kScanItems; ++j) {
    sum = F::Combine(sum, LoadValue<F>(own[j]));
    const auto with = F::Combine(start, sum);
    results[j] = FinishScan<F>(exclusive ? before : with);
    before = with;
  }
}

// --- Totals of other chunks ---

// The slots to which the blocks of a row send values: the totals of its chunks, then the totals of
// its groups, then for each region the fold of all regions before it.
struct Totals {
  Mailbox mailbox;
  std::int64_t chunks, groups, regions;

  explicit Totals(std::int64_t length)
      : chunks(ScanChunks(length)), groups(ScanGroups(length)), regions(ScanRegions(length)) {}
  __host__ __device__ std::int64_t per_row() const { return chunks + groups + regions; }
};

// Waits for the values in two slots at the same time. A negative slot has none, which gives the
// identity.
template <class F>
__device__ void ReceiveTwo(const Mailbox& mailbox, std::int64_t first, std::int64_t second,
                           typename F::Wide* values) {
  const std::int64_t slots[2] = {first, second};
  ulonglong2 found[2];
  bool wait[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    values[i] = F::template Identity<typename F::Wide>();
    wait[i] = slots[i] >= 0;
  }
  while (wait[0] || wait[1]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (wait[i]) found[i] = Peek(MailSlot(mailbox, slots[i], 1));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!wait[i] || (found[i].x & found[i].y & kMailFlag) == 0) continue;
      const unsigned words[2] = {static_cast<unsigned>(found[i].x),
                                 static_cast<unsigned>(found[i].y)};
      std::memcpy(&values[i], words, sizeof values[i]);
      wait[i] = false;
    }
  }
}

// Returns cells[0] + ... + cells[kScanFan - 1], one after the other.
template <class F>
__device__ typename F::Wide FoldCells(const typename F::Wide* cells) {
  auto fold = F::template Identity<typename F::Wide>();
#pragma unroll 8
  for (int i = 0; i < kScanFan; ++i) fold = F::Combine(fold, cells[i]);
  return fold;
}

// Sends the total of chunk c of a row, and returns the fold of all chunks before it to every
// thread. A missing total is the identity, which changes nothing. REQUIRES: kScanGroup threads call
// it.
template <class F>
__device__ typename F::Wide ExchangeTotals(const Totals& totals, std::int64_t row, std::int64_t c,
                                           typename F::Wide total) {
  using Wide = typename F::Wide;
  __shared__ Wide of_chunks[kScanGroup], of_parts[kScanFan], of_groups[kScanFan];
  __shared__ Wide parts, rest, groups, regions;
  const int me = static_cast<int>(threadIdx.x);
  const std::int64_t chunk_slots = row * totals.per_row();
  const std::int64_t group_slots = chunk_slots + totals.chunks;
  const std::int64_t region_slots = group_slots + totals.groups;
  const std::int64_t group = c / kScanGroup, region = group / kScanFan;
  const int before = static_cast<int>(c % kScanGroup);  // earlier chunks of the group
  if (me == 0) Send(totals.mailbox, chunk_slots + c, total);
  // Thread i waits for chunk i of the group. The first warp also waits for the groups of the
  // region, and a thread of the second warp for the regions.
  std::int64_t other = -1;
  if (me < group % kScanFan) other = group_slots + region * kScanFan + me;
  if (me == kScanFan && region > 0) other = region_slots + region;
  Wide received[2];
  ReceiveTwo<F>(totals.mailbox, me < before ? chunk_slots + group * kScanGroup + me : -1, other,
                received);
  of_chunks[me] = received[0];
  if (me < kScanFan) of_groups[me] = received[1];
  if (me == kScanFan) regions = received[1];
  __syncthreads();  // all totals have been stored
  if (me < kWarpSize) {
    auto part = F::template Identity<Wide>();
#pragma unroll
    for (int i = 0; i < kScanPart; ++i) part = F::Combine(part, of_chunks[me * kScanPart + i]);
    // The chunk is in this part, which is not complete.
    const bool own = me == before / kScanPart;
    if (own) rest = part;
    of_parts[me] = own ? F::template Identity<Wide>() : part;
    __syncwarp();  // all parts have been stored
    const Wide fold = FoldCells<F>(of_parts);
    if (me == 0) parts = fold;
  } else if (me < 2 * kWarpSize) {
    const Wide fold = FoldCells<F>(of_groups);
    if (me == kWarpSize) groups = fold;
  }
  __syncthreads();  // all folds have been stored
  if (me == 0 && before == kScanGroup - 1) {
    const Wide of_group = F::Combine(parts, F::Combine(rest, total));
    Send(totals.mailbox, group_slots + group, of_group);
    if (group % kScanFan == kScanFan - 1 && c + 1 < totals.chunks)
      Send(totals.mailbox, region_slots + region + 1,
           F::Combine(regions, F::Combine(groups, of_group)));
  }
  return F::Combine(regions, F::Combine(groups, F::Combine(parts, rest)));
}

// --- Kernels ---

// The shared memory of a block: a stage per warp for elements and, if results have another size,
// one for results.
template <class F>
struct Stages {
  using T = typename F::Element;
  using Result = typename F::Out;
  static constexpr bool kInPlace = sizeof(T) == sizeof(Result);
  static constexpr int kElements = Stage<T>::kSlots * static_cast<int>(sizeof(T));
  static constexpr int kResults =
      kInPlace ? 0 : Stage<Result>::kSlots * static_cast<int>(sizeof(Result));
  static constexpr int kBytesPerWarp = kElements + kResults;

  __device__ Stages()
      : memory(DynamicShared<unsigned char>() + threadIdx.x / kWarpSize * kBytesPerWarp) {}
  __device__ Stage<T> In() const { return {reinterpret_cast<T*>(memory)}; }
  __device__ Stage<Result> Out() const {
    return {reinterpret_cast<Result*>(memory + (kInPlace ? 0 : kElements))};
  }

  unsigned char* memory;
};

// A warp's stripe of chunk c of a row: `size` elements, which begin at x[at].
struct Stripe {
  int size;
  bool reverse;
  std::int64_t at;

  template <class F>
  __device__ Stripe(const Rows<F>& p, std::int64_t row, std::int64_t c) : reverse(p.reverse) {
    const std::int64_t first = c * kScanChunk + threadIdx.x / kWarpSize * kScanStripe;
    size = static_cast<int>(max(std::int64_t{0}, min(p.length - first, std::int64_t{kScanStripe})));
    at = row * p.length + (p.reverse ? p.length - first - size : first);
  }
  // Returns the thread's segment. REQUIRES for kWhole: the stripe is whole.
  template <bool kWhole>
  __device__ Segment<kWhole> Own() const {
    const int begin = static_cast<int>(threadIdx.x) % kWarpSize * kScanItems;
    const int count = min(kScanItems, max(0, size - begin));
    return {reverse ? size - begin - count : begin, count, reverse};
  }
};

// Returns the fold of the stripe's elements up to the end of the thread's segment.
template <class F, bool kWhole>
__device__ ScanValue<F> FoldStripe(const Stripe& stripe, Stage<typename F::Element> in) {
  typename F::Element own[kScanItems];
  const auto segment = stripe.Own<kWhole>();
  segment.Read(in, own);
  return ScanLanes<F>(segment.template Total<F>(own));
}
template <class F>
__device__ ScanValue<F> FoldStripe(const Stripe& stripe, Stage<typename F::Element> in) {
  return stripe.size == kScanStripe ? FoldStripe<F, true>(stripe, in)
                                    : FoldStripe<F, false>(stripe, in);
}

// Computes the results of a segment and writes them to the stage of results.
template <class F, bool kWhole>
__device__ void WriteResults(const Segment<kWhole>& segment, Stage<typename F::Element> in,
                             ScanValue<F> start, bool exclusive, Stage<typename F::Out> out) {
  typename F::Element own[kScanItems];
  typename F::Out results[kScanItems];
  segment.Read(in, own);
  Results<F>(own, start, exclusive, results);
  __syncwarp();  // all lanes have read the stage
  segment.Write(results, out);
}
// Stores the results of a stripe. start: the fold of everything before the thread's segment.
template <class F>
__device__ void StoreStripe(const Rows<F>& p, const Stripe& stripe, Stage<typename F::Element> in,
                            ScanValue<F> start, Stage<typename F::Out> out) {
  if (stripe.size == kScanStripe) {
    WriteResults<F>(stripe.Own<true>(), in, start, p.exclusive, out);
  } else {
    WriteResults<F>(stripe.Own<false>(), in, start, p.exclusive, out);
  }
  __syncwarp();  // the stage has the results
  out.Empty(p.out + stripe.at, stripe.size);
}

constexpr int kThreads = kScanStripes * kWarpSize;
static_assert(kThreads == kScanGroup, "ExchangeTotals has a thread for each chunk of a group");
// The number of blocks that must fit into an SM's registers. With five blocks, a thread has too few
// registers for its elements: rows of 4096 f32 took 686 us instead of 566 for 2^28 elements (NVIDIA
// H200, 2026-11-29).
constexpr int kBlocksOfSm = 4;

// One block per chunk. Rows of a single chunk have as many warps as stripes.
template <class F>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm)
    ScanChunksOfRows(Rows<F> p, Totals totals) {
  using Value = ScanValue<F>;
  __shared__ Value stripes[kScanStripes];
  __shared__ unsigned ticket;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  std::int64_t row = blockIdx.x, c = 0;
  if (totals.chunks > 1) {
    if (threadIdx.x == 0) ticket = TakeTicket(totals.mailbox);
    __syncthreads();  // the ticket has been stored
    row = ticket / totals.chunks;
    c = ticket % totals.chunks;
  }
  const Stripe stripe(p, row, c);
  const Stages<F> stages;
  stages.In().Fill(p.x + stripe.at, stripe.size);
  Stage<typename F::Element>::Filled();
  const Value folded = FoldStripe<F>(stripe, stages.In());
  const Value segments = LaneBelow<F>(folded);
  if (threadIdx.x % kWarpSize == kWarpSize - 1) stripes[warp] = folded;
  __syncthreads();  // all stripes' totals have been stored
  auto before = F::template Identity<Value>(), total = before;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
#pragma unroll
  for (int i = 0; i < kScanStripes; ++i) {
    if (i == warp) before = total;
    if (i < warps) total = F::Combine(total, stripes[i]);
  }
  auto base = F::template Identity<typename F::Wide>();
  if (totals.chunks > 1)
    base = ExchangeTotals<F>(totals, row, c, static_cast<typename F::Wide>(total));
  StoreStripe(p, stripe, stages.In(),
              F::Combine(static_cast<Value>(base), F::Combine(before, segments)), stages.Out());
}

// Rows of at most kScanStripe elements. `lanes` adjacent lanes of a warp scan one row.
template <class F, bool kWhole>
__device__ void ScanRowsOfWarp(const Rows<F>& p, int lanes) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int length = static_cast<int>(p.length), rows_of_warp = kWarpSize / lanes;
  const std::int64_t first =
      (std::int64_t{blockIdx.x} * kScanStripes + threadIdx.x / kWarpSize) * rows_of_warp;
  const int rows =
      static_cast<int>(max(std::int64_t{0}, min(p.rows - first, std::int64_t{rows_of_warp})));
  const Stages<F> stages;
  stages.In().Fill(p.x + first * length, rows * length);
  Stage<typename F::Element>::Filled();
  const int row = lane / lanes, begin = lane % lanes * kScanItems;
  const int count = row < rows ? min(kScanItems, max(0, length - begin)) : 0;
  const Segment<kWhole> segment{row * length + (p.reverse ? length - begin - count : begin), count,
                                p.reverse};
  typename F::Element own[kScanItems];
  segment.Read(stages.In(), own);
  const auto nothing = F::template Identity<ScanValue<F>>();
  const auto segments = LaneBelow<F>(ScanLanes<F>(segment.template Total<F>(own), lanes), lanes);
  WriteResults<F>(segment, stages.In(), F::Combine(nothing, F::Combine(nothing, segments)),
                  p.exclusive, stages.Out());
  __syncwarp();  // the stage has the results
  stages.Out().Empty(p.out + first * length, rows * length);
}

template <class F>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm) ScanShortRows(Rows<F> p, int lanes) {
  // Every lane has a whole segment.
  const bool whole = p.length == lanes * kScanItems &&
                     (std::int64_t{blockIdx.x} + 1) * (kThreads / lanes) <= p.rows;
  if (whole) {
    ScanRowsOfWarp<F, true>(p, lanes);
  } else {
    ScanRowsOfWarp<F, false>(p, lanes);
  }
}

// Columns of x[outer, length, inner]. A block has a warp for each of its kColumns columns, but in
// the loads and stores, adjacent threads have adjacent columns.
template <class T>
inline constexpr int kColumns = sizeof(T) == 8 ? 8 : 16;

enum class Pass {
  kWhole,    // a block walks down its columns
  kTotals,   // a block finds the totals of a chunk
  kResults,  // a block scans a chunk, with the totals before it
};

// totals[o, c, j]: the total of chunk c of column j, or of all chunks before it.
template <class F>
__global__ void __launch_bounds__(kColumns<typename F::Element>* kWarpSize)
    ScanColumns(Pass pass, ScanLines<F> p, std::int64_t tiles, typename F::Wide* totals) {
  using Wide = typename F::Wide;
  using Value = ScanValue<F>;
  constexpr int kWidth = kColumns<typename F::Element>;
  // The totals of segments, and then the folds of everything before them. There are two copies, so
  // that a thread may write the next stripe's total while another reads this stripe's fold.
  __shared__ Value folds[2][kWidth][kScanSegments + 1];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int mine = static_cast<int>(threadIdx.x) % kWidth;  // the thread's column
  const int part = static_cast<int>(threadIdx.x) / kWidth;  // the thread's segment
  const std::int64_t chunks = ScanChunks(p.length);
  std::int64_t block = blockIdx.x, chunk = 0, end = chunks;
  if (pass != Pass::kWhole) {
    chunk = block % chunks;
    end = chunk + 1;
    block /= chunks;
  }
  const std::int64_t o = block / tiles, first = block % tiles * kWidth;
  const std::int64_t column = first + mine;
  Wide* const total = totals + (o * chunks + chunk) * p.inner + first + warp;
  const bool has_column = first + warp < p.inner;  // whose folds the warp computes
  ScanCarry<F> carry;
  Wide base = carry.Base();
  auto stripes = F::template Identity<Value>();
  if (pass == Pass::kResults && has_column) base = *total;
  // The thread's segment in the stripe that begins at position `at`.
  const std::int64_t last = min(p.length, end * kScanChunk);
  const std::int64_t step = p.reverse ? -p.inner : p.inner;
  const auto place = [&](std::int64_t at) {
    const std::int64_t position = at + part * kScanItems;
    return (o * p.length + (p.reverse ? p.length - 1 - position : position)) * p.inner + column;
  };
  const auto size = [&](std::int64_t at) {
    const std::int64_t left = column < p.inner ? last - (at + part * kScanItems) : 0;
    return static_cast<int>(max(std::int64_t{0}, min(left, std::int64_t{kScanItems})));
  };
  const auto load = [&](std::int64_t at, typename F::Element(&elements)[kScanItems]) {
    const auto* const x = p.x + place(at);
    const int count = size(at);
#pragma unroll
    for (int j = 0; j < kScanItems; ++j)
      if (j < count) elements[j] = x[j * step];
  };
  // The next stripe is loaded while this one is computed.
  typename F::Element own[kScanItems], next[kScanItems];
  load(chunk * kScanChunk, next);
  int copy = 0;
  for (std::int64_t at = chunk * kScanChunk; at < last; at += kScanStripe, copy ^= 1) {
#pragma unroll
    for (int j = 0; j < kScanItems; ++j) own[j] = next[j];
    load(at + kScanStripe, next);
    const Segment<false> segment{0, size(at), false};
    folds[copy][mine][part] = segment.template Total<F>(own);
    __syncthreads();  // the totals of all segments have been stored
    const Value folded = ScanLanes<F>(folds[copy][warp][lane]);
    const Value segments = LaneBelow<F>(folded);
    folds[copy][warp][lane] = F::Combine(static_cast<Value>(base), F::Combine(stripes, segments));
    stripes = F::Combine(stripes, ShuffleFrom(folded, kWarpSize - 1));
    __syncthreads();  // the folds of everything before each segment have been stored
    if (pass != Pass::kTotals) {
      typename F::Out results[kScanItems];
      Results<F>(own, folds[copy][mine][part], p.exclusive, results);
      auto* const out = p.out + place(at);
#pragma unroll
      for (int j = 0; j < kScanItems; ++j)
        if (j < segment.count) out[j * step] = results[j];
    }
    if ((at + kScanStripe) % kScanChunk != 0 && at + kScanStripe < last) continue;
    if (pass == Pass::kTotals && lane == 0 && has_column) *total = static_cast<Wide>(stripes);
    carry.Add(static_cast<Wide>(stripes));
    base = carry.Base();
    stripes = F::template Identity<Value>();
  }
}

// Replaces the total of each chunk with the fold of the chunks before it. One thread per column.
template <class F>
__global__ void CarryColumns(typename F::Wide* totals, std::int64_t columns, std::int64_t inner,
                             std::int64_t chunks) {
  constexpr int kAhead = 8;  // loads in flight
  const std::int64_t i = GridThread();
  if (i >= columns) return;
  typename F::Wide* const first = totals + i / inner * chunks * inner + i % inner;
  ScanCarry<F> carry;
  for (std::int64_t c = 0; c < chunks; c += kAhead) {
    typename F::Wide batch[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (c + k < chunks) batch[k] = first[(c + k) * inner];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (c + k >= chunks) break;
      first[(c + k) * inner] = carry.Base();
      carry.Add(batch[k]);
    }
  }
}

// --- Launches ---

std::size_t TotalsBytes(const ScanProblem& p) {
  // The ticket has a separate slot.
  return static_cast<std::size_t>(p.outer * Totals(p.length).per_row() + 1) * sizeof(ulonglong2);
}

template <class F>
void RunRows(const ScanProblem& p, CudaStream& stream) {
  const Rows<F> rows = {static_cast<const typename F::Element*>(p.x),
                        static_cast<typename F::Out*>(p.out),
                        p.outer,
                        p.length,
                        p.exclusive,
                        p.reverse};
  constexpr int kBytes = kScanStripes * Stages<F>::kBytesPerWarp;
  if (p.length <= kScanStripe) {
    const auto segments = static_cast<unsigned>(CeilDiv(p.length, kScanItems));
    const int lanes = static_cast<int>(std::bit_ceil(segments));
    const auto blocks = static_cast<unsigned>(CeilDiv(p.outer, std::int64_t{kThreads / lanes}));
    AllowSharedBytes(ScanShortRows<F>, kBytes);
    ScanShortRows<F><<<blocks, kThreads, kBytes, stream.handle()>>>(rows, lanes);
    CUDA_CHECK_LAUNCH(ScanShortRows);
    return;
  }
  Totals totals(p.length);
  const auto warps =
      static_cast<int>(std::min<std::int64_t>(kScanStripes, CeilDiv(p.length, kScanStripe)));
  if (totals.chunks > 1) {
    const std::size_t bytes = TotalsBytes(p);
    auto* const memory = static_cast<ulonglong2*>(stream.Scratch(bytes));
    stream.Zero(memory, bytes);
    totals.mailbox = {reinterpret_cast<unsigned*>(memory), memory + 1};
  }
  AllowSharedBytes(ScanChunksOfRows<F>, kBytes);
  ScanChunksOfRows<F><<<static_cast<unsigned>(p.outer * totals.chunks), warps * kWarpSize,
                        warps * Stages<F>::kBytesPerWarp, stream.handle()>>>(rows, totals);
  CUDA_CHECK_LAUNCH(ScanChunksOfRows);
}

template <class T>
std::int64_t ColumnTiles(const ScanProblem& p) {
  return CeilDiv(p.inner, kColumns<T>);
}

// The number of blocks that keep an H200 busy.
constexpr std::int64_t kEnoughBlocks = 264;

bool SplitsColumns(const ScanProblem& p, std::int64_t tiles) {
  return p.outer * tiles < kEnoughBlocks && ScanChunks(p.length) > 1;
}

template <class F>
void RunColumns(const ScanProblem& p, CudaStream& stream) {
  using T = typename F::Element;
  using Wide = typename F::Wide;
  const ScanLines<F> lines(p);
  const std::int64_t tiles = ColumnTiles<T>(p), chunks = ScanChunks(p.length);
  constexpr int kBlock = kColumns<T> * kWarpSize;
  if (!SplitsColumns(p, tiles)) {
    // A grid has fewer than 2^31 blocks.
    const std::int64_t most = std::max<std::int64_t>(1, (std::int64_t{1} << 30) / tiles);
    for (std::int64_t first = 0; first < p.outer; first += most) {
      ScanLines<F> part = lines;
      part.x += first * p.length * p.inner;
      part.out += first * p.length * p.inner;
      const auto blocks = static_cast<unsigned>(std::min(most, p.outer - first) * tiles);
      ScanColumns<F><<<blocks, kBlock, 0, stream.handle()>>>(Pass::kWhole, part, tiles, nullptr);
      CUDA_CHECK_LAUNCH(ScanColumns);
    }
    return;
  }
  const std::int64_t columns = p.outer * p.inner;
  auto* const totals =
      static_cast<Wide*>(stream.Scratch(static_cast<std::size_t>(columns * chunks) * sizeof(Wide)));
  const auto blocks = static_cast<unsigned>(p.outer * tiles * chunks);
  ScanColumns<F><<<blocks, kBlock, 0, stream.handle()>>>(Pass::kTotals, lines, tiles, totals);
  CUDA_CHECK_LAUNCH(ScanColumns);
  CarryColumns<F>
      <<<static_cast<unsigned>(CeilDiv(columns, kWarpSize)), kWarpSize, 0, stream.handle()>>>(
          totals, columns, p.inner, chunks);
  CUDA_CHECK_LAUNCH(CarryColumns);
  ScanColumns<F><<<blocks, kBlock, 0, stream.handle()>>>(Pass::kResults, lines, tiles, totals);
  CUDA_CHECK_LAUNCH(ScanColumns);
}

void Enqueue(const ScanProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  DispatchScan(p.op, p.dtype, [&]<class F>(std::type_identity<F>) {
    if (p.inner == 1) {
      RunRows<F>(p, cuda);
    } else {
      RunColumns<F>(p, cuda);
    }
  });
}

std::uint64_t ScratchOf(const ScanProblem& p) {
  if (p.inner == 1) return ScanChunks(p.length) > 1 ? TotalsBytes(p) : 0;
  const std::int64_t tiles = SizeOf(p.dtype) == 8 ? ColumnTiles<double>(p) : ColumnTiles<float>(p);
  if (!SplitsColumns(p, tiles)) return 0;
  return static_cast<std::uint64_t>(p.outer * p.inner * ScanChunks(p.length)) * sizeof(double);
}

Cost CostOf(const ScanProblem& p) {
  const auto n = static_cast<std::uint64_t>(p.elements());
  const std::uint64_t again = p.inner > 1 && ScratchOf(p) > 0 ? n * SizeOf(p.dtype) : 0;
  return {.bytes = ScanBytes(p) + again,
          .flops = 2 * n,
          .atomics = 0,
          .depth = kScanItems + kScanStripes + 2 * kScanFan +
                   static_cast<std::uint64_t>(ScanRegions(p.length))};
}

}  // namespace

extern constexpr Strategy<ScanProblem> kScanFixedOrder = {
    .name = "fixed_order",
    .summary = "one pass, in an order that depends only on the length",
    .source = "decoupled look-back (Merrill and Garland 2016), with totals of fixed groups",
    .backend = Backend::kCuda,
    .deterministic = true,
    .roundoff = [](const ScanProblem& p) { return ScanRoundoff(p, ScanSteps(p.dtype, p.length)); },
    .cost = CostOf,
    .launch = Enqueue,
    .scratch = ScratchOf,
};

}  // namespace tessera
