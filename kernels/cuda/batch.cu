// Batches on a GPU: a thousand short vectors in a launch or two, where a launch for each would take
// microseconds apiece. The table of segments stays in pinned host memory, from which each block
// fetches its own part, and results go straight to host memory: there is no copy before or after
// the launch. (As a kernel parameter of 32 KiB the table made a launch 9 us longer.)
//
// Items. A short segment (up to 256 vectors of 16 bytes) is the work of one warp: no barrier
// between loads and result, and eight segments a block. A longer one is a block's, a very long one
// is cut into chunks, a block each, whose values a second small launch folds. Blocks come first in
// the grid, since they take longest. Many segments of up to four times the short length are a
// launch of their own, in which half a block takes one: as soon as it knows the segment it asks for
// all of it, and a thousand of them are under way at once, where blocks would have to queue.
//
//   grid   | block: chunk 0 of A | block: chunk 1 of A | block: B | 8 warps: C D E F G H I J | ...
//
// The order of a fold is a function of the segment's length and type alone, so that the bits of a
// result do not depend on what else is in the batch:
//
//   row      256 vectors, 4096 bytes; lane t owns the vectors t of all rows
//   chunk    ChunkRows(n) rows that follow each other
//   1. position v of a lane's vectors folds from row to row, in chain v (kernels/cuda/vectors.cuh)
//   2. the chains of a lane, then the 256 lanes, fold as halving trees: value i takes i + count / 2
//   3. lane t folds the values of chunks t, t + 256, ..., and the lanes fold as a halving tree
//
// A thread of a block is one lane, one of half a block two of them, t and t + 128, and one of a
// warp eight: t, t + 32, t + 64, ...
//
// Cost of 1000 segments of 4096 f32: 16 MB read by 1000 blocks of 128 threads, each of which has
// its 16 KiB in flight; one launch; 16 KB of table and 24 KB of results over PCIe.
//
// Right for any number of segments and any length, 0 included; for any alignment: a thread whose
// vectors are not aligned assembles them from aligned ones or elements.
#include <algorithm>
#include <cstring>

#include "kernels/batch.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/frame.cuh"
#include "kernels/cuda/vectors.cuh"

namespace tessera {
namespace {

constexpr int kLanes = 256;
constexpr int kLaneBits = 8;
constexpr int kBlock = kLanes;
constexpr int kWarps = kBlock / kWarpSize;
constexpr int kWarpBits = CeilLog2(kWarpSize);
// Vectors of a warp's lane.
constexpr int kPerWarpLane = kLanes / kWarpSize;
// Rows of items that half a block's threads take, when there are many such items: more than a few
// blocks per SM.
constexpr std::int64_t kMiddlingRows = 4;
constexpr std::int64_t kManyPerMultiprocessor = 6;
constexpr int kHalf = kLanes / 2;
// Blocks that an SM's registers have to suffice for. Moments and two operands do not fit three.
template <class Terms>
constexpr int kResident =
    std::is_same_v<typename Terms::Wide, Moments> || Terms::kOperands == 2 ? 2 : 3;

// --- The order of the fold ---

// Rows of a chunk for n elements of `size` bytes. Up to 16 rows a block is done before several
// could meet; then 8, which a thread loads at once, and more rather than thousands of chunks.
constexpr std::int64_t kMostChunks = 4096;

std::int64_t ChunkRows(std::int64_t n, std::int64_t size) {
  const std::int64_t total = CeilDiv(n, kLanes * (kVectorBytes / size));
  if (total <= 16) return 16;
  std::int64_t rows = 8, most = 512;
  while (CeilDiv(total, rows) > most) {
    rows *= 2;
    if (most < kMostChunks) most *= 2;
  }
  return rows;
}

struct Chunking {
  std::int64_t rows;    // of the longest chunk
  std::int64_t chunk;   // elements
  std::int64_t chunks;  // at least 1
};

Chunking MakeChunking(std::int64_t n, DType dtype) {
  const auto size = static_cast<std::int64_t>(SizeOf(dtype));
  const std::int64_t row = kLanes * (kVectorBytes / size);
  const std::int64_t rows = ChunkRows(n, size);
  return {std::min(rows, CeilDiv(n, row)), rows * row,
          std::max<std::int64_t>(1, CeilDiv(n, rows * row))};
}

// Of n elements and of fewer: the bound of a batch is that of its longest segment.
FoldSteps StepsOf(std::int64_t n, DType dtype) {
  const Chunking c = MakeChunking(n, dtype);
  const std::int64_t rows = c.chunks > 1 ? std::max<std::int64_t>(c.rows, 16) : c.rows;
  FoldSteps steps{std::min<std::int64_t>(rows, kMaxChain),
                  WalkSteps(rows, SizeOf(dtype)) + kLaneBits};
  // Never more than 4096 chunks, 16 a lane.
  if (c.chunks > 1) steps.wide += kMostChunks / kLanes + 1 + kLaneBits;
  return steps;
}

// --- The tables ---

// Where an item's value goes: the result of this number or, with kPartial, the partial value.
using Place = std::uint32_t;
constexpr Place kPartial = 0x80000000u;

// Items are multiples of 16 bytes, in which the device fetches them.
struct alignas(16) ReduceItem {
  const void* x;
  std::uint32_t n;
  Place place;
};

struct alignas(16) DotItem {
  const void* a;
  const void* b;
  std::uint32_t n;
  Place place;
};

// A segment whose chunks have left partial values.
struct alignas(16) CutItem {
  std::int64_t n;
  std::uint32_t chunk;  // elements
  std::uint32_t chunks;
  std::uint32_t first;  // partial value
  Place place;
};

// What one launch works on. The items lie in host memory. Middling ones are not FoldItems's.
template <class Item>
struct Table {
  const Item* of_blocks;
  const Item* of_warps;
  int blocks;
  int warps;
  Scalar* results;
  void* partials;  // Fold::Wide
};

// --- What the items of an operation are ---

// The value of one term alone, as the first of a column.
template <class F>
__device__ typename F::Wide Column(bool valid, typename F::Acc term) {
  return valid ? F::Widen(F::Combine(F::Identity(), term))
               : F::template Identity<typename F::Wide>();
}

// The halving tree over kCount values, a power of two.
template <class F, int kCount, class A>
__device__ A FoldHalves(A (&values)[kCount]) {
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) values[i] = F::Combine(values[i], values[i + half]);
  }
  return values[0];
}

template <ReduceOp op, class T>
struct ReduceTerms {
  using F = Fold<op, T>;
  using Partial = Fold<op, ValueOf<T>>;
  using Wide = typename F::Wide;
  using Item = ReduceItem;
  static constexpr int kOperands = 1;

  // One of the lanes.
  __device__ static Wide FoldLane(const Item& item, int lane) {
    const auto walk = WalkArray(static_cast<const T*>(item.x), item.n, lane, kLaneBits);
    Chain<F, T> chains[kVector<T>];
    FoldWalk<F>(walk, chains);
    return FoldChains<F>(walk, chains, [=](std::uint32_t row, int v) {
      return (std::int64_t{row} * kLanes + lane) * kVector<T> + v;
    });
  }

  // Lanes `first` and first + kHalf of an item of up to kMiddlingRows rows: eight vectors in
  // flight.
  __device__ static Wide FoldTwoLanes(const Item& item, int first) {
    const auto* x = static_cast<const T*>(item.x);
    const int second = first + kHalf;
    const Walk<T> walks[2] = {WalkArray(x, item.n, first, kLaneBits),
                              WalkArray(x, item.n, second, kLaneBits)};
    uint4 vectors[2][kMiddlingRows];
    LoadVectors(walks[0], 0, NeutralElement<F, T>(), vectors[0]);
    LoadVectors(walks[1], 0, NeutralElement<F, T>(), vectors[1]);
    return F::Combine(FoldLoaded(walks[0], vectors[0], first),
                      FoldLoaded(walks[1], vectors[1], second));
  }

  // Lanes `lane`, lane + 32, ... of an item of one row.
  __device__ static Wide FoldRow(const Item& item, int lane) {
    const auto walk = WalkArray(static_cast<const T*>(item.x), item.n, lane, kWarpBits);
    uint4 vectors[kPerWarpLane];
    LoadVectors(walk, 0, T{}, vectors);
    Wide lanes[kPerWarpLane];
#pragma unroll
    for (int k = 0; k < kPerWarpLane; ++k) {
      const int valid = walk.Valid(k);
      Wide columns[kVector<T>];
#pragma unroll
      for (int v = 0; v < kVector<T>; ++v) {
        const std::int64_t index = (k * kWarpSize + lane) * kVector<T> + v;
        columns[v] = Column<F>(v < valid, F::Load(ElementOf<T>(vectors[k], v), index));
      }
      lanes[k] = FoldHalves<F>(columns);
    }
    return FoldHalves<F>(lanes);
  }

 private:
  // A lane, from its vectors, of which there are at most kMiddlingRows.
  __device__ static Wide FoldLoaded(const Walk<T>& walk, const uint4 (&vectors)[kMiddlingRows],
                                    int lane) {
    Chain<F, T> chains[kVector<T>];
#pragma unroll
    for (int v = 0; v < kVector<T>; ++v) {
      chains[v].Begin(ElementOf<T>(vectors[0], v));
      const std::int64_t length = walk.ChainLength(v);
#pragma unroll
      for (int row = 0; row < kMiddlingRows; ++row) {
        if (row < length) chains[v].Add(ElementOf<T>(vectors[row], v), row);
      }
      chains[v].Flush(0, length);
    }
    return FoldChains<F>(walk, chains, [=](std::uint32_t row, int v) {
      return (std::int64_t{row} * kLanes + lane) * kVector<T> + v;
    });
  }
};

template <class T>
struct DotTerms {
  using F = DotFold<T>;
  using Partial = DotFold<ValueOf<T>>;
  using Wide = typename F::Wide;
  using Item = DotItem;
  static constexpr int kOperands = 2;
  static constexpr int kRows = kVectorsInFlight / 2;  // of each operand

  __device__ static Wide FoldLane(const Item& item, int lane) {
    const auto a = WalkArray(static_cast<const T*>(item.a), item.n, lane, kLaneBits);
    const auto b = WalkArray(static_cast<const T*>(item.b), item.n, lane, kLaneBits);
    Chain<F, T> chains[kVector<T>];
    for (std::int64_t begin = 0; begin < a.count; begin += kMaxChain) {
      const std::int64_t end = min(a.count, begin + kMaxChain);
      for (std::int64_t k = begin; k < end; k += kRows) {
        uint4 left[kRows], right[kRows];
        LoadVectors(a, k, T{}, left);
        LoadVectors(b, k, T{}, right);
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
#pragma unroll
          for (int v = 0; v < kVector<T>; ++v)
            chains[v].AddProduct(ElementOf<T>(left[j], v), ElementOf<T>(right[j], v));
        }
      }
#pragma unroll
      for (int v = 0; v < kVector<T>; ++v) chains[v].Flush(begin, end - begin);
    }
    return FoldChains<F>(a, chains, [](std::uint32_t, int) { return std::int64_t{0}; });
  }

  __device__ static Wide FoldTwoLanes(const Item& item, int first) {
    const Wide value = FoldLane(item, first);
    return F::Combine(value, FoldLane(item, first + kHalf));
  }

  __device__ static Wide FoldRow(const Item& item, int lane) {
    const auto a = WalkArray(static_cast<const T*>(item.a), item.n, lane, kWarpBits);
    const auto b = WalkArray(static_cast<const T*>(item.b), item.n, lane, kWarpBits);
    Wide lanes[kPerWarpLane];
    uint4 left[kPerWarpLane], right[kPerWarpLane];
    LoadVectors(a, 0, T{}, left);
    LoadVectors(b, 0, T{}, right);
#pragma unroll
    for (int k = 0; k < kPerWarpLane; ++k) {
      const int valid = a.Valid(k);
      Wide columns[kVector<T>];
#pragma unroll
      for (int v = 0; v < kVector<T>; ++v) {
        columns[v] =
            Column<F>(v < valid, F::Multiply(ElementOf<T>(left[k], v), ElementOf<T>(right[k], v)));
      }
      lanes[k] = FoldHalves<F>(columns);
    }
    return FoldHalves<F>(lanes);
  }
};

// --- Kernels ---

// The halving tree over the lanes of a warp; the result is lane 0's. Lanes in the upper half fold
// what they get as well, and nobody asks for it.
template <class F, class A>
__device__ A FoldLanesOfWarp(A value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    value = F::Combine(value, ShuffleDown(kFullMask, value, offset));
  return value;
}

// The same over the lanes of a block. Every thread calls it; the result is thread 0's.
template <class F, class A>
__device__ A FoldLanesOfBlock(A value) {
  __shared__ A cells[kLanes];
  cells[threadIdx.x] = value;
  __syncthreads();  // all cells are written
  if (threadIdx.x >= kWarpSize) return value;
  A lanes[kPerWarpLane];
#pragma unroll
  for (int k = 0; k < kPerWarpLane; ++k) lanes[k] = cells[threadIdx.x + k * kWarpSize];
  return FoldLanesOfWarp<F>(FoldHalves<F>(lanes));
}

template <class F>
__device__ void StoreResult(typename F::Wide value, std::int64_t n, Scalar* result) {
  Scalar scalar;
  F::Finish(value, n, &scalar);
  *result = scalar;
}

// Items from host memory to shared memory: one fetch a block. Every thread of the block calls it.
template <class Item>
__device__ void FetchItems(const Item* from, int count, Item* to) {
  constexpr int kParts = sizeof(Item) / sizeof(uint4);
  const auto part = static_cast<int>(threadIdx.x);
  if (part < count * kParts)
    reinterpret_cast<uint4*>(to)[part] = reinterpret_cast<const uint4*>(from)[part];
  __syncthreads();  // the items are written
}

template <class Terms>
__global__ void __launch_bounds__(kBlock, kResident<Terms>)
    FoldItems(const Table<typename Terms::Item> table) {
  using F = typename Terms::F;
  using Wide = typename Terms::Wide;
  __shared__ typename Terms::Item items[kWarps];
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  int mine = 0;
  Wide value;
  if (block < table.blocks) {
    FetchItems(table.of_blocks + block, 1, items);
    value = FoldLanesOfBlock<F>(Terms::FoldLane(items[0], thread));
    if (thread != 0) return;
  } else {
    const int first = (block - table.blocks) * kWarps;
    const int count = min(kWarps, table.warps - first);
    FetchItems(table.of_warps + first, count, items);
    mine = thread / kWarpSize;
    if (mine >= count) return;
    const int lane = thread % kWarpSize;
    value = FoldLanesOfWarp<F>(Terms::FoldRow(items[mine], lane));
    if (lane != 0) return;
  }
  const Place place = items[mine].place;
  if ((place & kPartial) != 0) {
    static_cast<Wide*>(table.partials)[place & ~kPartial] = value;
  } else {
    StoreResult<F>(value, items[mine].n, table.results + place);
  }
}

// A block of half the threads an item of up to kMiddlingRows rows, in table.of_blocks; all it has
// to load is under way at once. At least four blocks per SM: bounded for more, kinds with two
// operands spill, and others take fewer registers anyway.
template <class Terms>
__global__ void __launch_bounds__(kHalf, 4) FoldMiddling(const Table<typename Terms::Item> table) {
  using F = typename Terms::F;
  using Wide = typename Terms::Wide;
  __shared__ typename Terms::Item item;
  __shared__ Wide cells[kHalf];
  FetchItems(table.of_blocks + blockIdx.x, 1, &item);
  const int thread = static_cast<int>(threadIdx.x);
  cells[thread] = Terms::FoldTwoLanes(item, thread);
  __syncthreads();  // all cells are written
  if (thread >= kWarpSize) return;
  Wide lanes[kHalf / kWarpSize];
#pragma unroll
  for (int k = 0; k < kHalf / kWarpSize; ++k) lanes[k] = cells[thread + k * kWarpSize];
  const Wide value = FoldLanesOfWarp<F>(FoldHalves<F>(lanes));
  if (thread == 0) StoreResult<F>(value, item.n, table.results + item.place);
}

// A block a segment that was cut.
template <class F>
__global__ void __launch_bounds__(kBlock) FoldChunks(const Table<CutItem> table) {
  __shared__ CutItem item;
  FetchItems(table.of_blocks + blockIdx.x, 1, &item);
  const auto* partials = static_cast<const typename F::Wide*>(table.partials) + item.first;
  const auto value =
      FoldLanesOfBlock<F>(FoldThread<F>(threadIdx.x, item.chunks, kLanes, [&](std::int64_t chunk) {
        typename F::Wide partial = partials[chunk];
        // Its index counts from the chunk's first element.
        if constexpr (F::kArg) partial.index += chunk * item.chunk;
        return partial;
      }));
  if (threadIdx.x == 0) StoreResult<F>(value, item.n, table.results + item.place);
}

// --- Host ---

ReduceItem Part(const ReduceSegment& s, std::int64_t from, std::int64_t n, std::size_t size,
                Place place) {
  return {static_cast<const char*>(s.x) + from * static_cast<std::int64_t>(size),
          static_cast<std::uint32_t>(n), place};
}

DotItem Part(const DotSegment& s, std::int64_t from, std::int64_t n, std::size_t size,
             Place place) {
  const std::int64_t bytes = from * static_cast<std::int64_t>(size);
  return {static_cast<const char*>(s.a) + bytes, static_cast<const char*>(s.b) + bytes,
          static_cast<std::uint32_t>(n), place};
}

template <class Item>
struct Work {
  Table<Item> items;
  Table<Item> middling;
  Table<CutItem> cuts;
  std::size_t partials;
};

// The tables of a batch, in the lane's host memory.
template <class Item, class Problem>
Work<Item> MakeWork(const Problem& p, CudaStream& stream) {
  const std::size_t size = SizeOf(p.dtype);
  const std::int64_t row = kLanes * kVectorBytes / static_cast<std::int64_t>(size);
  std::size_t short_ones = 0, middling = 0, chunks = 0, partials = 0, cuts = 0;
  for (std::int64_t i = 0; i < p.count; ++i) {
    const std::int64_t n = p.segments[i].n;
    if (n <= row) {
      ++short_ones;
    } else if (n <= kMiddlingRows * row) {
      ++middling;
    } else {
      const auto count = static_cast<std::size_t>(MakeChunking(n, p.dtype).chunks);
      chunks += count;
      if (count > 1) {
        partials += count;
        ++cuts;
      }
    }
  }
  const bool many = static_cast<std::int64_t>(middling) >
                    kManyPerMultiprocessor * stream.device().info().multiprocessors;
  const std::size_t blocks = chunks + (many ? 0 : middling);
  const std::size_t halves = many ? middling : 0;
  auto* of_blocks =
      static_cast<Item*>(stream.HostScratch((blocks + short_ones + halves) * sizeof(Item)));
  Item* of_warps = of_blocks + blocks;
  Item* of_halves = of_warps + short_ones;
  auto* cut = static_cast<CutItem*>(stream.HostScratch(cuts * sizeof(CutItem)));
  Work<Item> work{{of_blocks, of_warps, static_cast<int>(blocks), static_cast<int>(short_ones),
                   p.results, nullptr},
                  {of_halves, nullptr, static_cast<int>(halves), 0, p.results, nullptr},
                  {cut, nullptr, static_cast<int>(cuts), 0, p.results, nullptr},
                  partials};
  Place partial = 0;
  for (std::int64_t i = 0; i < p.count; ++i) {
    const auto& segment = p.segments[i];
    const auto place = static_cast<Place>(i);
    if (segment.n <= row) {
      *of_warps++ = Part(segment, 0, segment.n, size, place);
      continue;
    }
    if (many && segment.n <= kMiddlingRows * row) {
      *of_halves++ = Part(segment, 0, segment.n, size, place);
      continue;
    }
    const Chunking c = MakeChunking(segment.n, p.dtype);
    if (c.chunks == 1) {
      *of_blocks++ = Part(segment, 0, segment.n, size, place);
      continue;
    }
    *cut++ = {segment.n, static_cast<std::uint32_t>(c.chunk), static_cast<std::uint32_t>(c.chunks),
              partial, place};
    for (std::int64_t from = 0; from < segment.n; from += c.chunk) {
      *of_blocks++ =
          Part(segment, from, std::min(c.chunk, segment.n - from), size, kPartial | partial++);
    }
  }
  return work;
}

template <class Terms, class Problem>
void Run(const Problem& p, CudaStream& stream, bool timing) {
  using Item = typename Terms::Item;
  Work<Item> work = MakeWork<Item>(p, stream);
  work.items.partials = work.cuts.partials =
      stream.Scratch(work.partials * sizeof(typename Terms::Wide));
  if (timing) stream.StartTimer();
  const auto grid = static_cast<unsigned>(work.items.blocks + CeilDiv(work.items.warps, kWarps));
  if (grid > 0) {
    FoldItems<Terms><<<grid, kBlock, 0, stream.handle()>>>(work.items);
    CUDA_CHECK_LAUNCH(FoldItems);
  }
  if (work.middling.blocks > 0) {
    FoldMiddling<Terms>
        <<<static_cast<unsigned>(work.middling.blocks), kHalf, 0, stream.handle()>>>(work.middling);
    CUDA_CHECK_LAUNCH(FoldMiddling);
  }
  if (work.cuts.blocks == 0) return;
  FoldChunks<typename Terms::Partial>
      <<<static_cast<unsigned>(work.cuts.blocks), kBlock, 0, stream.handle()>>>(work.cuts);
  CUDA_CHECK_LAUNCH(FoldChunks);
}

void LaunchDot(const DotBatchProblem& p, Stream& stream, bool timing) {
  DispatchDType(p.dtype,
                [&](auto zero) { Run<DotTerms<decltype(zero)>>(p, Cuda(stream), timing); });
}

void LaunchReduce(const ReduceBatchProblem& p, Stream& stream, bool timing) {
  DispatchDType(p.dtype, [&](auto zero) {
    DispatchOp(p.op,
               [&](auto op) { Run<ReduceTerms<op(), decltype(zero)>>(p, Cuda(stream), timing); });
  });
}

}  // namespace

const Batch<DotBatchProblem> kDotBatchCuda = {
    .launch = LaunchDot,
    .roundoff =
        [](const DotBatchProblem& p, std::int64_t n, const Device&) {
          const FoldSteps steps = StepsOf(n, p.dtype);
          return SumRoundoff(p.dtype, {1 + steps.narrow, steps.wide});
        },
};

const Batch<ReduceBatchProblem> kReduceBatchCuda = {
    .launch = LaunchReduce,
    .roundoff = [](const ReduceBatchProblem& p, std::int64_t n,
                   const Device&) { return ReduceRoundoff(p.op, p.dtype, n, StepsOf(n, p.dtype)); },
};

}  // namespace tessera
