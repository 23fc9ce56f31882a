// Scan in one pass, in the fixed order of kernels/same_bits/fixed_scan.h.
//
// A block of 256 threads scans a chunk of 4096 elements: 16 elements in a thread, 32 threads in a
// warp, 8 warps. What it needs from the chunks before it is a fold of totals, not of results, and
// the order fixes which totals: those of the chunks before it in its group of 32, those of the
// groups before it in its region of 32, and the fold of all regions before. So a chunk does not wait
// for its neighbour's result, as in a chain, nor for whatever happens to be there, as in
// `look_back`: it waits for at most 31 totals of chunks and 31 of groups, which it reads at the same
// time, and for one value per region of 4 million elements. The last chunk of a group sends the
// group's total, and the last of a region the fold of all regions.
//
//     chunks   | 0 1 2 ... 31 | 32 33 ... 63 | 64 65 66 ...
//     groups   |      0       |       1      |     2          chunk 66 reads groups 0 and 1,
//                                                            and chunks 64 and 65
//
// Blocks take chunks by a ticket, so every chunk that a block waits for is done or running.
//
// A thread's 16 elements are adjacent, which would make loads of a warp touch 32 places. A warp
// therefore copies its 512 elements through shared memory, in vectors where the address allows it.
// Rows of up to 512 elements share a warp, and rows of up to a chunk have a block each. Where lines
// are columns, a block walks down as many columns as fill 64 bytes, 512 elements at a time; if that
// gives too few blocks, it first finds the totals of all chunks, and then each chunk has a block.
//
// Cost at n = 2^20, f32: 4 MiB read, 4 MiB written, a memset of 4 KiB, one launch.
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

// The elements of a stripe in shared memory, in the order of memory. Every 16 elements are followed
// by 16 bytes, so that the threads of a warp, which take 16 elements each, use different banks.
template <class A>
struct Stage {
  static constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(A));
  static constexpr int kSlots = kScanSegments * (kScanItems + kVector);

  __device__ A* At(int i) const { return slots + i + i / kScanItems * kVector; }
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

// A segment: `count` elements from index `first` of a stage on, in the order of the scan. kWhole:
// count is kScanItems, and first a multiple of it, so that the segment moves in vectors.
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

// Where the blocks of a row leave totals: of its chunks, then of its groups, then the folds of all
// regions before each region.
struct Totals {
  Mailbox mailbox;
  std::int64_t chunks, groups, regions;

  explicit Totals(std::int64_t length)
      : chunks(ScanChunks(length)), groups(ScanGroups(length)), regions(ScanRegions(length)) {}
  __host__ __device__ std::int64_t per_row() const { return chunks + groups + regions; }
};

template <class W>
__device__ W Receive(const Mailbox& mailbox, std::int64_t slot) {
  const ulonglong2* const pair = MailSlot(mailbox, slot, 1);
  ulonglong2 v = Peek(pair);
  while ((v.x & v.y & kMailFlag) == 0) v = Peek(pair);
  const unsigned words[2] = {static_cast<unsigned>(v.x), static_cast<unsigned>(v.y)};
  W value;
  std::memcpy(&value, words, sizeof value);
  return value;
}

// Returns the fold of all chunks before chunk c of a row, whose total has been sent, to every thread.
// Three warps receive at the same time.
template <class F>
__device__ typename F::Wide ExchangeTotals(const Totals& totals, std::int64_t row, std::int64_t c,
                                           typename F::Wide total) {
  using Wide = typename F::Wide;
  __shared__ Wide received[2][kScanFan];
  __shared__ Wide folds[3];  // of the chunks, the groups and the regions before this chunk
  const Mailbox& mailbox = totals.mailbox;
  const std::int64_t chunks = row * totals.per_row(), groups = chunks + totals.chunks,
                     regions = groups + totals.groups;
  const std::int64_t group = c / kScanFan, region = group / kScanFan;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (warp < 2) {
    const int before = static_cast<int>(warp == 0 ? c % kScanFan : group % kScanFan);
    const std::int64_t first = warp == 0 ? chunks + group * kScanFan : groups + region * kScanFan;
    received[warp][lane] =
        lane < before ? Receive<Wide>(mailbox, first + lane) : F::template Identity<Wide>();
    __syncwarp();
    auto fold = F::template Identity<Wide>();
    // Missing totals are the identity, which changes nothing.
#pragma unroll 4
    for (int i = 0; i < kScanFan; ++i) fold = F::Combine(fold, received[warp][i]);
    folds[warp] = fold;
    if (warp == 0 && lane == 0 && before == kScanFan - 1)
      Send(mailbox, groups + group, F::Combine(fold, total));
  } else if (warp == 2) {
    folds[2] = region > 0 ? Receive<Wide>(mailbox, regions + region) : F::template Identity<Wide>();
  }
  __syncthreads();  // all three folds are there
  const Wide of_chunks = folds[0], of_groups = folds[1], of_regions = folds[2];
  if (threadIdx.x == 0 && (c + 1) % (kScanFan * kScanFan) == 0 && c + 1 < totals.chunks) {
    const Wide last_group = F::Combine(of_chunks, total);
    Send(mailbox, regions + region + 1, F::Combine(of_regions, F::Combine(of_groups, last_group)));
  }
  return F::Combine(of_regions, F::Combine(of_groups, of_chunks));
}

// --- Kernels ---

// The shared memory of a warp: two stages for elements, of this chunk and the next, and one for
// results if they have another size.
template <class F>
struct Stages {
  using T = typename F::Element;
  using Out = typename F::Out;
  static constexpr bool kInPlace = sizeof(T) == sizeof(Out);
  static constexpr int kElements = Stage<T>::kSlots * static_cast<int>(sizeof(T));
  static constexpr int kResults = kInPlace ? 0 : Stage<Out>::kSlots * static_cast<int>(sizeof(Out));
  static constexpr int kBytes = kElements + kResults;

  // other: whether the elements are in the second stage, which follows those of all warps.
  __device__ explicit Stages(bool other = false) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    unsigned char* const memory = DynamicShared<unsigned char>();
    elements = memory + (other ? kScanStripes * kBytes + warp * kElements : warp * kBytes);
    results = kInPlace ? elements : memory + warp * kBytes + kElements;
  }
  __device__ Stage<T> in() const { return {reinterpret_cast<T*>(elements)}; }
  __device__ Stage<Out> out() const { return {reinterpret_cast<Out*>(results)}; }

  unsigned char *elements, *results;
};

// Computes the results of the warp's segments and stores those of out[0, count).
template <class F, bool kWhole>
__device__ void StoreResults(const Segment<kWhole>& segment, const Stages<F>& stages,
                             const typename F::Element (&own)[kScanItems], ScanValue<F> start,
                             bool exclusive, typename F::Out* out, int count) {
  typename F::Out results[kScanItems];
  Results<F>(own, start, exclusive, results);
  __syncwarp();  // all lanes have read the stage
  segment.Write(results, stages.out());
  __syncwarp();  // the stage has the results
  stages.out().Empty(out, count);
}

// A warp's stripe of chunk c of a row: positions [first, first + size), which begin at x[at].
struct Stripe {
  int size;
  std::int64_t at;

  template <class F>
  __device__ Stripe(const Rows<F>& p, std::int64_t row, std::int64_t c) {
    const std::int64_t first = c * kScanChunk + threadIdx.x / kWarpSize * kScanStripe;
    size = static_cast<int>(max(std::int64_t{0}, min(p.length - first, std::int64_t{kScanStripe})));
    at = row * p.length + (p.reverse ? p.length - first - size : first);
  }
};

// Scans a chunk whose stripes are on the way to the stages. A warp scans a stripe. exchange(total)
// returns the fold of everything before the chunk; total is the chunk's.
template <class F, bool kWhole, class Exchange>
__device__ void ScanChunk(const Rows<F>& p, const Stripe& stripe, const Stages<F>& stages,
                          Exchange exchange) {
  using T = typename F::Element;
  using Value = ScanValue<F>;
  __shared__ Value stripes[kScanStripes];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int size = kWhole ? static_cast<int>(kScanStripe) : stripe.size;
  const int begin = lane * kScanItems;
  const int count = min(kScanItems, max(0, size - begin));
  const Segment<kWhole> segment{p.reverse ? size - begin - count : begin, count, p.reverse};
  stages.in().Filled();
  T own[kScanItems];
  segment.Read(stages.in(), own);
  const Value folded = ScanLanes<F>(segment.template Total<F>(own));
  const Value segments = LaneBelow<F>(folded);
  if (lane == kWarpSize - 1) stripes[warp] = folded;
  __syncthreads();  // all stripes' totals are there
  auto before = F::template Identity<Value>(), total = before;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
#pragma unroll
  for (int i = 0; i < kScanStripes; ++i) {
    if (i == warp) before = total;
    if (i < warps) total = F::Combine(total, stripes[i]);
  }
  const auto base = static_cast<Value>(exchange(static_cast<typename F::Wide>(total)));
  StoreResults(segment, stages, own, F::Combine(base, F::Combine(before, segments)), p.exclusive,
               p.out + stripe.at, size);
}

constexpr int kThreads = kScanStripes * kWarpSize;
#ifndef KB
#define KB 4
#endif
constexpr int kBlocksOfSm = KB;

// Rows of more than one chunk. A block takes one chunk after the other by a ticket, and fetches the
// next one while it waits for the totals of other chunks.
template <class F>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm) ScanLongRows(Rows<F> p, Totals totals) {
  using Wide = typename F::Wide;
  __shared__ unsigned tickets[2];
  const unsigned chunks = static_cast<unsigned>(p.rows * totals.chunks);
  if (threadIdx.x == 0) tickets[0] = TakeTicket(totals.mailbox);
  __syncthreads();  // the first ticket is there
  unsigned ticket = tickets[0];
  std::int64_t row = ticket / totals.chunks, c = ticket % totals.chunks;
  if (ticket < chunks) {
    const Stripe stripe(p, row, c);
    Stages<F>().in().Fill(p.x + stripe.at, stripe.size);
  }
  for (bool other = false; ticket < chunks; other = !other) {
    unsigned next = 0;
    if (threadIdx.x == 0) next = TakeTicket(totals.mailbox);
    const Stripe stripe(p, row, c);
    const auto exchange = [&](Wide total) {
      if (threadIdx.x == 0) Send(totals.mailbox, row * totals.per_row() + c, total);
      if (threadIdx.x == 0) tickets[!other] = next;
      __syncthreads();  // the next ticket is there
      ticket = tickets[!other];
      if (ticket < chunks) {
        const Stripe after(p, ticket / totals.chunks, ticket % totals.chunks);
        Stages<F>(!other).in().Fill(p.x + after.at, after.size);
      }
      return ExchangeTotals<F>(totals, row, c, total);
    };
    if ((c + 1) * kScanChunk <= p.length) {
      ScanChunk<F, true>(p, stripe, Stages<F>(other), exchange);
    } else {
      ScanChunk<F, false>(p, stripe, Stages<F>(other), exchange);
    }
    row = ticket / totals.chunks;
    c = ticket % totals.chunks;
  }
}

// Rows of at most one chunk. The block has as many warps as the row needs.
template <class F>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm) ScanRows(Rows<F> p) {
  const Stripe stripe(p, blockIdx.x, 0);
  const Stages<F> stages;
  stages.in().Fill(p.x + stripe.at, stripe.size);
  const auto nothing = [](typename F::Wide) { return F::template Identity<typename F::Wide>(); };
  if (p.length == kScanChunk) {
    ScanChunk<F, true>(p, stripe, stages, nothing);
  } else {
    ScanChunk<F, false>(p, stripe, stages, nothing);
  }
}

// Rows of at most kScanStripe elements. `lanes` adjacent lanes of a warp scan one row.
template <class F, bool kWhole>
__device__ void ScanRowsOfWarp(const Rows<F>& p, int lanes) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int length = static_cast<int>(p.length), rows_of_warp = kWarpSize / lanes;
  const std::int64_t first = (std::int64_t{blockIdx.x} * kScanStripes + warp) * rows_of_warp;
  const int rows =
      static_cast<int>(max(std::int64_t{0}, min(p.rows - first, std::int64_t{rows_of_warp})));
  const Stages<F> stages;
  stages.in().Fill(p.x + first * length, rows * length);
  stages.in().Filled();
  const int row = lane / lanes, begin = lane % lanes * kScanItems;
  const int count = row < rows ? min(kScanItems, max(0, length - begin)) : 0;
  const Segment<kWhole> segment{row * length + (p.reverse ? length - begin - count : begin), count,
                                p.reverse};
  typename F::Element own[kScanItems];
  segment.Read(stages.in(), own);
  const auto nothing = F::template Identity<ScanValue<F>>();
  const auto segments = LaneBelow<F>(ScanLanes<F>(segment.template Total<F>(own), lanes), lanes);
  StoreResults(segment, stages, own, F::Combine(nothing, F::Combine(nothing, segments)),
               p.exclusive, p.out + first * length, rows * length);
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

// totals[o, c, j]: of chunk c of column j, or of all chunks before it.
template <class F>
__global__ void __launch_bounds__(kColumns<typename F::Element>* kWarpSize)
    ScanColumns(Pass pass, ScanLines<F> p, std::int64_t tiles, typename F::Wide* totals) {
  using Wide = typename F::Wide;
  using Value = ScanValue<F>;
  constexpr int kWidth = kColumns<typename F::Element>;
  // The totals of segments, and then the folds of everything before them. Two copies, so that a
  // thread may write the next stripe's total while another one still reads this stripe's fold.
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
  const bool has_column = first + warp < p.inner;  // of which the warp computes the folds
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
    __syncthreads();  // the totals of all segments are there
    const Value folded = ScanLanes<F>(folds[copy][warp][lane]);
    const Value segments = LaneBelow<F>(folded);
    folds[copy][warp][lane] = F::Combine(static_cast<Value>(base), F::Combine(stripes, segments));
    stripes = F::Combine(stripes, ShuffleFrom(folded, kWarpSize - 1));
    __syncthreads();  // the folds of everything before each segment are there
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
  // The ticket has a slot of its own.
  return static_cast<std::size_t>(p.outer * Totals(p.length).per_row() + 1) * sizeof(ulonglong2);
}

// Allows a kernel to use that much shared memory.
template <class Kernel>
void Allow(Kernel* kernel, int bytes) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

template <class F>
void RunRows(const ScanProblem& p, CudaStream& stream) {
  const Rows<F> rows = {static_cast<const typename F::Element*>(p.x),
                        static_cast<typename F::Out*>(p.out),
                        p.outer,
                        p.length,
                        p.exclusive,
                        p.reverse};
  constexpr int kBytes = kScanStripes * Stages<F>::kBytes;
  if (p.length <= kScanStripe) {
    const auto segments = static_cast<unsigned>(CeilDiv(p.length, kScanItems));
    const int lanes = static_cast<int>(std::bit_ceil(segments));
    const auto blocks = static_cast<unsigned>(CeilDiv(p.outer, std::int64_t{kThreads / lanes}));
    Allow(ScanShortRows<F>, kBytes);
    ScanShortRows<F><<<blocks, kThreads, kBytes, stream.handle()>>>(rows, lanes);
    CUDA_CHECK_LAUNCH(ScanShortRows);
  } else if (p.length <= kScanChunk) {
    const auto warps = static_cast<unsigned>(CeilDiv(p.length, kScanStripe));
    Allow(ScanRows<F>, kBytes);
    ScanRows<F><<<static_cast<unsigned>(p.outer), warps * kWarpSize, warps * Stages<F>::kBytes,
                  stream.handle()>>>(rows);
    CUDA_CHECK_LAUNCH(ScanRows);
  } else {
    Totals totals(p.length);
    const std::size_t bytes = TotalsBytes(p);
    auto* const memory = static_cast<ulonglong2*>(stream.Scratch(bytes));
    stream.Zero(memory, bytes);
    totals.mailbox = {reinterpret_cast<unsigned*>(memory), memory + 1};
    constexpr int kTwice = kBytes + kScanStripes * Stages<F>::kElements;
    const std::int64_t resident =
        std::int64_t{kBlocksOfSm} * stream.device().info().multiprocessors;
    const auto blocks = static_cast<unsigned>(std::min(resident, p.outer * totals.chunks));
    Allow(ScanLongRows<F>, kTwice);
    ScanLongRows<F><<<blocks, kThreads, kTwice, stream.handle()>>>(rows, totals);
    CUDA_CHECK_LAUNCH(ScanLongRows);
  }
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
    ScanColumns<F><<<static_cast<unsigned>(p.outer * tiles), kBlock, 0, stream.handle()>>>(
        Pass::kWhole, lines, tiles, nullptr);
    CUDA_CHECK_LAUNCH(ScanColumns);
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
