// Batches on a GPU: a thousand short vectors in one launch, where a launch for each would take
// microseconds apiece. The table of segments travels as a parameter of the kernel, up to 32 KiB of
// constant memory that arrive with the launch: no copy to the device goes before it. Results go
// straight to host memory.
//
// Items. A short segment (up to 256 vectors of 16 bytes) is the work of one warp: no barrier, and
// eight segments a block. A longer one is a block's, a very long one is cut into chunks, a block
// each, whose values a second small launch folds. Blocks come first in the grid, since they take
// longest.
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
// A warp stands for the 256 lanes of a short segment, lane t for t, t + 32, t + 64, ...
//
// Cost of 1000 segments of 4096 f32: 16 MB read, 1000 blocks of 4 vectors a thread, one launch.
//
// Right for any number of segments, a launch for each table that they fill; for any length, 0
// included; for any alignment: a thread whose vectors are not aligned assembles them from aligned
// ones or elements.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/batch.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dot/dot.cuh"
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
// Blocks that a multiprocessor's registers have to suffice for.
constexpr int kResident = 3;
// Bytes of the larger and the smaller table. A launch takes parameters of 32764 bytes; small
// batches should not pay for copying them.
constexpr std::size_t kLargeTable = 32000;
constexpr std::size_t kSmallTable = 2000;

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

struct Steps {
  std::int64_t narrow, wide;
};

// Of n elements and of fewer: the bound of a batch is that of its longest segment.
Steps StepsOf(std::int64_t n, DType dtype) {
  const Chunking c = MakeChunking(n, dtype);
  const std::int64_t rows = c.chunks > 1 ? std::max<std::int64_t>(c.rows, 16) : c.rows;
  Steps steps{std::min<std::int64_t>(rows, kMaxChain), WalkSteps(rows, SizeOf(dtype)) + kLaneBits};
  // Never more than 4096 chunks, 16 a lane.
  if (c.chunks > 1) steps.wide += kMostChunks / kLanes + 1 + kLaneBits;
  return steps;
}

// --- The tables ---

// Where an item's value goes: the result of this number or, with kPartial, the partial value.
using Place = std::uint32_t;
constexpr Place kPartial = 0x80000000u;

struct ReduceItem {
  const void* x;
  std::uint32_t n;
  Place place;
};

struct DotItem {
  const void* a;
  const void* b;
  std::uint32_t n;
  Place place;
};

// A segment whose chunks have left partial values.
struct CutItem {
  std::int64_t n;
  std::uint32_t chunk;  // elements
  std::uint32_t chunks;
  std::uint32_t first;  // partial value
  Place place;
};

// What one launch works on: items [0, blocks) are a block's, the others, up to `items`, a warp's.
template <class Item, std::size_t kBytes>
struct Table {
  static constexpr int kItems = static_cast<int>(kBytes / sizeof(Item));
  int blocks;
  int items;
  Scalar* results;
  void* partials;  // Fold::Wide
  Item item[kItems];
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
  using Partial = PartialFold<op, T>;
  using Wide = typename F::Wide;
  using Item = ReduceItem;

  // One of the lanes that a block has.
  __device__ static Wide FoldLane(const Item& item, int lane) {
    const auto walk = WalkArray(static_cast<const T*>(item.x), item.n, lane, kLaneBits);
    Chain<F, T> chains[kVector<T>];
    FoldWalk<F>(walk, chains);
    return FoldChains<F>(walk, chains, [=](std::uint32_t row, int v) {
      return (std::int64_t{row} * kLanes + lane) * kVector<T> + v;
    });
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
};

template <class T>
struct DotTerms {
  using F = DotFold<T>;
  using Partial = DotFold<ValueOf<T>>;
  using Wide = typename F::Wide;
  using Item = DotItem;
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

template <class Terms, class Items>
__global__ void __launch_bounds__(kBlock, kResident)
    FoldItems(const __grid_constant__ Items table) {
  using F = typename Terms::F;
  using Wide = typename Terms::Wide;
  const int block = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  int number = block;
  Wide value;
  if (block < table.blocks) {
    value = FoldLanesOfBlock<F>(Terms::FoldLane(table.item[number], thread));
    if (thread != 0) return;
  } else {
    number = table.blocks + (block - table.blocks) * kWarps + thread / kWarpSize;
    if (number >= table.items) return;
    value = FoldLanesOfWarp<F>(Terms::FoldRow(table.item[number], thread % kWarpSize));
    if (thread % kWarpSize != 0) return;
  }
  const Place place = table.item[number].place;
  if ((place & kPartial) != 0) {
    static_cast<Wide*>(table.partials)[place & ~kPartial] = value;
  } else {
    StoreResult<F>(value, table.item[number].n, table.results + place);
  }
}

// A block a segment that was cut.
template <class F, class Items>
__global__ void __launch_bounds__(kBlock) FoldChunks(const __grid_constant__ Items table) {
  const CutItem& item = table.item[blockIdx.x];
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
  std::vector<Item> of_blocks, of_warps;
  std::vector<CutItem> cuts;
  Place partials = 0;
};

template <class Item, class Problem>
Work<Item> MakeWork(const Problem& p) {
  const std::size_t size = SizeOf(p.dtype);
  const std::int64_t row = kLanes * kVectorBytes / static_cast<std::int64_t>(size);
  Work<Item> work;
  for (std::int64_t i = 0; i < p.count; ++i) {
    const auto& segment = p.segments[i];
    const auto place = static_cast<Place>(i);
    if (segment.n <= row) {
      work.of_warps.push_back(Part(segment, 0, segment.n, size, place));
      continue;
    }
    const Chunking c = MakeChunking(segment.n, p.dtype);
    if (c.chunks == 1) {
      work.of_blocks.push_back(Part(segment, 0, segment.n, size, place));
      continue;
    }
    work.cuts.push_back({segment.n, static_cast<std::uint32_t>(c.chunk),
                         static_cast<std::uint32_t>(c.chunks), work.partials, place});
    for (std::int64_t from = 0; from < segment.n; from += c.chunk) {
      work.of_blocks.push_back(Part(segment, from, std::min(c.chunk, segment.n - from), size,
                                    kPartial | work.partials++));
    }
  }
  return work;
}

// One launch with as many of the items as fit a table of kBytes; `blocks` and `warps` of them are
// done already.
template <class Items, class Item>
void LaunchTable(void (*kernel)(Items), const Work<Item>& work, std::size_t& blocks,
                 std::size_t& warps, Scalar* results, void* partials, cudaStream_t stream) {
  Items table;  // not initialised: only what is used of it is written
  const std::size_t room = Items::kItems;
  const std::size_t more_blocks = std::min(room, work.of_blocks.size() - blocks);
  const std::size_t more_warps = std::min(room - more_blocks, work.of_warps.size() - warps);
  std::copy_n(work.of_blocks.begin() + static_cast<std::ptrdiff_t>(blocks), more_blocks,
              table.item);
  std::copy_n(work.of_warps.begin() + static_cast<std::ptrdiff_t>(warps), more_warps,
              table.item + more_blocks);
  table.blocks = static_cast<int>(more_blocks);
  table.items = static_cast<int>(more_blocks + more_warps);
  table.results = results;
  table.partials = partials;
  const auto grid = static_cast<unsigned>(more_blocks + (more_warps + kWarps - 1) / kWarps);
  void* parameters[] = {&table};
  CUDA_CHECK(
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, kBlock, parameters, 0, stream));
  blocks += more_blocks;
  warps += more_warps;
}

template <class Terms, class Problem>
void Run(const Problem& p, CudaLane& lane) {
  using Item = typename Terms::Item;
  using Small = Table<Item, kSmallTable>;
  using Large = Table<Item, kLargeTable>;
  using Cuts = Table<CutItem, kSmallTable>;
  using Partial = typename Terms::Partial;
  const Work<Item> work = MakeWork<Item>(p);
  void* partials = lane.Scratch(work.partials * sizeof(typename Terms::Wide));
  const std::size_t items = work.of_blocks.size() + work.of_warps.size();
  for (std::size_t blocks = 0, warps = 0; blocks + warps < items;) {
    if (items - blocks - warps <= Small::kItems) {
      LaunchTable<Small>(FoldItems<Terms, Small>, work, blocks, warps, p.results, partials,
                         lane.stream());
    } else {
      LaunchTable<Large>(FoldItems<Terms, Large>, work, blocks, warps, p.results, partials,
                         lane.stream());
    }
  }
  const Work<CutItem> rest{.of_blocks = work.cuts, .of_warps = {}, .cuts = {}};
  for (std::size_t blocks = 0, warps = 0; blocks < work.cuts.size();) {
    LaunchTable<Cuts>(FoldChunks<Partial, Cuts>, rest, blocks, warps, p.results, partials,
                      lane.stream());
  }
}

void LaunchDot(const DotBatchProblem& p, Lane& lane) {
  DispatchDType(p.dtype, [&](auto zero) { Run<DotTerms<decltype(zero)>>(p, Cuda(lane)); });
}

void LaunchReduce(const ReduceBatchProblem& p, Lane& lane) {
  DispatchDType(p.dtype, [&](auto zero) {
    DispatchOp(p.op, [&](auto op) { Run<ReduceTerms<op(), decltype(zero)>>(p, Cuda(lane)); });
  });
}

}  // namespace

const Batch<DotBatchProblem> kDotBatchCuda = {
    .launch = LaunchDot,
    .roundoff =
        [](const DotBatchProblem& p, std::int64_t n, const Device&) {
          const Steps steps = StepsOf(n, p.dtype);
          return DotRoundoff(p.dtype, 1 + steps.narrow, steps.wide);
        },
};

const Batch<ReduceBatchProblem> kReduceBatchCuda = {
    .launch = LaunchReduce,
    .roundoff =
        [](const ReduceBatchProblem& p, std::int64_t n, const Device&) {
          const Steps steps = StepsOf(n, p.dtype);
          return ReduceRoundoff(p.op, p.dtype, n, steps.narrow, steps.wide);
        },
};

}  // namespace tessera
