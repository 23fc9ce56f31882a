// Reduce along the middle axis of x[outer, length, inner]: rows of a matrix (inner = 1), columns
// (outer = 1), or any consecutive axes of an array. Three questions decide the speed. Do adjacent
// threads read adjacent memory? Does every thread have enough loads in flight? Does every SM have
// enough threads?
//
// A thread loads 16-byte vectors, eight of them before it uses the first
// (kernels/cuda/common/vectors.cuh). A block of 256 threads is a box: `width` threads across
// adjacent vectors of outputs, `height` threads along the axis and, if that is less than a block,
// `depth` threads over consecutive values of outer. All three are powers of two.
//
//   columns (inner > 1)                     rows (inner = 1): width 1, vectors run along the axis
//
//          across: vectors of outputs              along the axis
//   axis   [t0   ] [t1   ] [t2   ]                 [t0   ] [t1   ] [t0   ] [t1   ]   row 0
//     |    [t3   ] [t4   ] [t5   ]                 [t2   ] [t3   ] [t2   ] [t3   ]   row 1
//     v    [t0   ] [t1   ] [t2   ]
//
// The height is chosen so that a thread has at most 8 or 16 vectors. Once the height is a whole
// block, each thread takes more vectors. A small number of outputs would leave most of the GPU
// idle, so the axis is then cut into segments with one block each. A block stores the values of its
// segment in device memory and increments the ticket of its outputs. The block that increments the
// ticket last folds all segments in index order and resets the ticket. One launch is therefore
// enough, without atomics on values. The cut depends only on the shape and the element size, so the
// same input gives the same bits on every GPU.
//
// If length and inner are so small that the elements for one value of outer have at most
// kShortBytes bytes (for example pairs of numbers), one thread per value of outer would have only
// one small load in flight. Instead, a block copies a contiguous run of memory to shared memory in
// vectors, and each of its threads folds whole outputs from there. The loads and stores of adjacent
// threads are then adjacent in memory.
//
// If the axis is the outermost one of an array of more than 1 GiB, one launch folds slabs of rows
// into partial results, and another launch folds the partial results (kernels/team/axis_slabs.h).
// If the array is distributed over several GPUs, each GPU folds the slabs that it has.
//
// Cost for 1024 x 1024, f32: 4 MiB read, 4 KiB written, one launch. Along rows there is a block for
// every 2 rows, with 2 vectors per thread. Along columns there are 32 tiles of 8 vectors in 4
// segments, whose values (32 KiB) are written and read again.
//
// The kernels are correct for any extents, including 0 (length 0 gives identities), and for any
// alignment: a thread whose vectors are not aligned assembles them from aligned vectors or, at the
// ends of the array, from single elements. Long f32 axes are folded in single-precision chains of
// at most 64 elements, and the values of the chains are folded in double. If a chain exceeds the
// range of f32, a second launch adds in double.
#include <algorithm>
#include <bit>
#include <limits>
#include <type_traits>

#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/team/axis_slabs.h"

namespace tessera {
namespace {

constexpr int kBlockBits = 8;
constexpr int kBlock = 1 << kBlockBits;
// A block along columns is at least 8 vectors wide if there are that many. These are whole cache
// lines of 128 bytes. In a wider block, of up to 32 vectors (a whole warp), the threads have less
// to fold among themselves. A block is widened only while there are 2^kTilesBits blocks side by
// side, because fewer blocks would require more segments.
constexpr int kLeastWidthBits = 3;
constexpr int kMostWidthBits = 5;
constexpr int kTilesBits = 5;
// The work is spread over this many threads before a thread gets more than one vector. An H200 runs
// twice as many threads at the same time.
constexpr std::int64_t kThreads = std::int64_t{1} << 17;
// The number of blocks that a cut of the axis aims for. It is the number that 132 SMs run at the
// same time under the launch bounds of the kernels below, for sums of elements of `size` bytes. The
// numbers are constants, so the bits do not depend on the device.
constexpr std::int64_t BlocksWanted(std::int64_t size) { return 132 * (size < 4 ? 3 : 4); }
// The minimum number of vectors per thread in a segment, so that a thread has a full batch of loads
// in flight.
constexpr std::int64_t kLeastSteps = 8;
// Groups (the elements for one value of outer) of at most this many bytes are folded by FoldShort.
// It is 16 times as fast as FoldAxis for groups of a single f16, and 0.9 times as fast for
// unaligned rows of 16 f32 (NVIDIA H200, 2026-11-28).
constexpr std::int64_t kShortBytes = 64;
// The number of blocks that must fit into an SM's registers. Four blocks have 128 KiB of loads in
// flight. With two blocks, the work of a block before its first load and after its last one adds to
// the time. Four blocks fit only with whole vectors and at most four chains per thread. With
// Moments and WideSquares, not even three fit.
template <class F, class T, bool kWhole>
constexpr int kResident = (sizeof(typename F::Wide) > 16) ? 2
                          : kWhole && sizeof(T) >= 4      ? 4
                                                          : 3;

// How blocks are laid out over the array, and how the axis is cut.
struct Plan {
  bool rows;             // inner = 1: vectors run along the axis
  int width_bits;        // log2 of the number of threads across vectors of outputs
  int height_bits;       // log2 of the number of threads along the axis
  std::int64_t across;   // tiles along inner
  std::int64_t tiles;    // in total
  std::int64_t steps;    // vectors per thread in one segment
  std::int64_t segment;  // elements of the axis in one segment
  std::int64_t segments;
};

// Returns the plan for `outer` values of outer; a launch may have another number of them.
// most_in_column: the maximum number of vectors of a column per thread before several threads share
// the column.
Plan MakePlan(const ReduceAxesProblem& p, std::int64_t outer,
              std::int64_t most_in_column = 2 * kVectorsInFlight) {
  const std::int64_t vector = kVectorBytes / static_cast<std::int64_t>(SizeOf(p.dtype));
  Plan plan{};
  const std::int64_t inner = std::max(p.inner, p.inner_of_all);
  plan.rows = inner == 1;
  const std::int64_t steps = plan.rows ? CeilDiv(p.length, vector) : p.length;
  const std::int64_t columns = CeilDiv(inner, vector);  // vectors of outputs
  // The maximum number of vectors per thread. A short row is read by few lanes, each of which takes
  // several of its vectors. A column of up to two batches of loads is read by one thread.
  const std::int64_t most = !plan.rows ? most_in_column : steps <= 128 ? 4 : kVectorsInFlight;
  const std::int64_t all = outer * columns * steps;
  const std::int64_t each = std::clamp<std::int64_t>(all / kThreads, 1, most);
  const int column_bits = std::min(CeilLog2(columns), kBlockBits);
  const int least_width =
      std::clamp(CeilLog2(columns) - kTilesBits, kLeastWidthBits, kMostWidthBits);
  plan.height_bits =
      std::min(CeilLog2(CeilDiv(steps, each)), kBlockBits - std::min(column_bits, least_width));
  plan.width_bits = std::min(column_bits, kBlockBits - plan.height_bits);
  const std::int64_t depth = kBlock >> (plan.width_bits + plan.height_bits);
  const std::int64_t width = std::int64_t{1} << plan.width_bits;
  plan.across = CeilDiv(CeilDiv(p.inner, vector), width);
  plan.tiles = plan.across * CeilDiv(p.outer, depth);
  plan.steps = CeilDiv(steps, std::int64_t{1} << plan.height_bits);
  // The block that folds the segments needs a thread for each output of one tile.
  const bool whole =
      plan.tiles == 0 || depth > 1 || (!plan.rows && vector << plan.width_bits > kBlock);
  const std::int64_t cut =
      whole ? 1
            : std::clamp<std::int64_t>(BlocksWanted(kVectorBytes / vector) /
                                           (CeilDiv(columns, width) * CeilDiv(outer, depth)),
                                       1, std::max<std::int64_t>(1, plan.steps / kLeastSteps));
  plan.steps = CeilDiv(plan.steps, cut);
  plan.segment = (plan.steps << plan.height_bits) * (plan.rows ? vector : 1);
  plan.segments =
      std::max<std::int64_t>(1, CeilDiv(p.length, std::max<std::int64_t>(1, plan.segment)));
  return plan;
}

Plan MakePlan(const ReduceAxesProblem& p) { return MakePlan(p, std::max(p.outer, p.outer_of_all)); }
// Returns the plan for slabs. It has enough segments even if each GPU has only one slab. It has up
// to 64 vectors per thread, so that blocks have less to fold for each of the many results
// (docs/notebook.md, "Columns").
Plan MakeSlabPlan(const ReduceAxesProblem& slabs) {
  return MakePlan(slabs, /*outer=*/1, /*most_in_column=*/64);
}

// Folds values[0, kCount) of the threads that differ only in their position along the axis into the
// values of the thread at position 0. cells: kBlock / 2 * kCount cells in shared memory. Every
// thread of the block calls it.
template <class F, int kCount, class A>
__device__ void FoldHeight(A (&values)[kCount], int width_bits, int height_bits, A* cells) {
  const int thread = static_cast<int>(threadIdx.x);
  const int y = thread >> width_bits & ((1 << height_bits) - 1);
  for (int bit = height_bits - 1; bit >= 0; --bit) {
    const int distance = 1 << (width_bits + bit);
    if (distance < kWarpSize) {
#pragma unroll
      for (int v = 0; v < kCount; ++v)
        values[v] = F::Combine(values[v], ShuffleDown(kFullMask, values[v], distance));
      continue;
    }
    // A thread of the upper half passes its values to the thread `distance` below it. Both compute
    // the index of the cell from the lower thread's number without bit `distance`.
    const bool upper = (y >> bit & 1) != 0;
    const int lower = upper ? thread - distance : thread;
    const int place = (lower & (distance - 1)) | (lower >> 1 & ~(distance - 1));
    if (upper) {
#pragma unroll
      for (int v = 0; v < kCount; ++v) cells[v * (kBlock / 2) + place] = values[v];
    }
    __syncthreads();  // the upper half's values are in their cells
    if (!upper) {
#pragma unroll
      for (int v = 0; v < kCount; ++v)
        values[v] = F::Combine(values[v], cells[v * (kBlock / 2) + place]);
    }
    __syncthreads();  // the cells have been read
  }
}

// Loads, from the L2 cache, a value that another block has written during this launch.
template <class A>
__device__ A LoadShared(const A* from) {
  constexpr int kWords = sizeof(A) / sizeof(unsigned);
  unsigned words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __ldcg(reinterpret_cast<const unsigned*>(from) + i);
  A value;
  std::memcpy(&value, words, sizeof value);
  return value;
}

// Adjacent results, which are stored together if the address is aligned.
template <class Out, int kCount>
struct alignas(sizeof(Out) * kCount < 16 ? sizeof(Out) * kCount : 16) Results {
  Out values[kCount];
};

// F with accumulators whose range holds all sums of finite elements.
template <class F, class T>
struct WideFold : F {
  using Acc = typename F::Wide;
  __device__ static Acc Load(T x, std::int64_t index) { return F::Widen(F::Load(x, index)); }
  __device__ static Acc Widen(Acc a) { return a; }
};
template <class F>
inline constexpr bool kIsWide = false;
template <class F, class T>
inline constexpr bool kIsWide<WideFold<F, T>> = true;

// F with results that are still to be folded with other results.
template <class F>
struct PartialFold : F {
  using Out = typename F::Wide;
  __device__ static Out FinishAxis(typename F::Wide value, std::int64_t) { return value; }
};
template <class F>
inline constexpr bool kIsPartial = false;
template <class F>
inline constexpr bool kIsPartial<PartialFold<F>> = true;

// Whether F adds in f32 and may exceed the range of f32. A chain of f16 cannot exceed it. Partial
// results are not checked, because their overflow shows in the final results.
template <class F, class T>
inline constexpr bool kMayLeaveRange = std::is_same_v<typename F::Acc, float> && !F::kOrdering &&
                                       !std::is_same_v<T, Half> && !kIsPartial<F>;

// Stores the value of one output. A sum that is not finite becomes a NaN and sets the mark, and the
// host then launches the kernel again with WideFold. That launch stores a value only where it finds
// a NaN, so no output depends on the others.
template <class F, class T>
__device__ void Store(typename F::Wide value, std::int64_t length, typename F::Out& out,
                      [[maybe_unused]] Scalar* mark) {
  if constexpr (kIsWide<F>) {
    const auto before = static_cast<float>(out);
    if (before == before) return;
  } else if constexpr (kMayLeaveRange<F, T>) {
    if (!isfinite(value)) {
      mark->integer = 1;
      value = std::numeric_limits<double>::quiet_NaN();
    }
  }
  out = F::FinishAxis(value, length);
}

// The directions in which a kernel can fold. A kernel for a single direction needs fewer registers.
// For arrays of 8192 x 8192, whole and aligned rows of 16-bit elements take 33 us instead of 42,
// and unaligned rows of f32 take 86 us instead of 93. Unaligned rows of 16-bit elements, however,
// take 57 us with kEither and 66 us with kRows (NVIDIA H200, 2026-11-27).
enum class Lines { kEither, kRows, kColumns };

// Folds x[outer, length, inner], whose rows are `pitch` elements apart, over length into out[outer,
// inner]. If there are several segments, it uses partials[tile][segment][output of the tile] and a
// ticket per tile. kWhole: all vectors are whole and aligned.
template <class F, class T, bool kWhole, Lines kLines>
__global__ void __launch_bounds__(kBlock, kResident<F, T, kWhole>)
    FoldAxis(const T* x, std::int64_t outer, std::int64_t length, std::int64_t inner,
             std::int64_t pitch, Plan plan, typename F::Wide* partials, std::uint32_t* tickets,
             typename F::Out* out, Scalar* mark) {
  using Wide = typename F::Wide;
  using Out = typename F::Out;
  constexpr int kWide = kVector<T>;
  __shared__ __align__(16) unsigned char shared[sizeof(Wide) * kBlock / 2 * kWide];
  auto* cells = reinterpret_cast<Wide*>(shared);

  const bool rows = kLines == Lines::kEither ? plan.rows : kLines == Lines::kRows;
  const int thread = static_cast<int>(threadIdx.x);
  const int across = thread & ((1 << plan.width_bits) - 1);
  const int along = thread >> plan.width_bits & ((1 << plan.height_bits) - 1);
  const int box_bits = plan.width_bits + plan.height_bits;
  // The tile varies fastest, so that blocks that run at the same time read adjacent memory. All
  // numbers of tiles are at most the number of blocks, so 32 bits suffice; a 64-bit division takes
  // a hundred instructions.
  const auto tiles = static_cast<unsigned>(plan.tiles),
             tiles_across = static_cast<unsigned>(plan.across);
  const std::int64_t segment = blockIdx.x / tiles;
  const std::int64_t tile = blockIdx.x % tiles;
  const std::int64_t row =
      (std::int64_t{blockIdx.x % tiles / tiles_across} << (kBlockBits - box_bits)) +
      (thread >> box_bits);
  const std::int64_t tile_column = std::int64_t{blockIdx.x % tiles % tiles_across} * kWide
                                   << plan.width_bits;
  const std::int64_t column = rows ? 0 : tile_column + across * kWide;
  const bool active = row < outer && column < inner;

  const std::int64_t begin = segment * plan.segment;
  const std::int64_t end = min(length, begin + plan.segment);
  Walk<T> walk;
  int outputs = 1;  // of this thread
  if (rows) {
    walk = WalkArray(x + row * length + begin, active ? end - begin : 0, along, plan.height_bits);
  } else {
    outputs = active ? static_cast<int>(min(inner - column, std::int64_t{kWide})) : 0;
    walk.first = x + (row * length + begin + along) * pitch + column;
    walk.stride = pitch << plan.height_bits;
    walk.count =
        active && begin + along < end ? ((end - begin - along - 1) >> plan.height_bits) + 1 : 0;
    walk.each = walk.last = outputs;
  }
  walk.end = x + (outer * length - 1) * pitch + inner;

  ThreadFold<F, T> chains[kWide];
  if constexpr (kWhole) {
    FoldWholeWalk<F>(walk, chains);
  } else {
    FoldWalk<F>(walk, chains);
  }

  Wide values[kWide];
  if (rows) {
    Wide value[1] = {FoldChains<F>(walk, chains, [=](std::uint32_t step, int v) {
      return begin + ((std::int64_t{step} << plan.height_bits) + along) * kWide + v;
    })};
    FoldHeight<F>(value, 0, plan.height_bits, cells);
    values[0] = value[0];
  } else {
#pragma unroll
    for (int v = 0; v < kWide; ++v) {
      values[v] = chains[v].Value(walk.ChainLength(v), [=](std::uint32_t step) {
        return begin + (std::int64_t{step} << plan.height_bits) + along;
      });
    }
    FoldHeight<F>(values, plan.width_bits, plan.height_bits, cells);
  }

  // A tile has 2^tile_bits outputs.
  const int tile_bits = rows ? 0 : plan.width_bits + CeilLog2(kWide);
  if (plan.segments == 1) {
    if (along != 0 || !active) return;
    Out* to = out + row * inner + column;
    using All = Results<Out, kWide>;
    if (!kIsWide<F> && outputs == kWide &&
        reinterpret_cast<std::uintptr_t>(to) % alignof(All) == 0) {
      All results;
#pragma unroll
      for (int v = 0; v < kWide; ++v) Store<F, T>(values[v], length, results.values[v], mark);
      *reinterpret_cast<All*>(to) = results;
    } else {
#pragma unroll
      for (int v = 0; v < kWide; ++v)
        if (v < outputs) Store<F, T>(values[v], length, to[v], mark);
    }
    return;
  }

  partials += tile * plan.segments << tile_bits;
  if (along == 0) {
    Wide* to = partials + (segment << tile_bits) + across * kWide;
#pragma unroll
    for (int v = 0; v < kWide; ++v)
      if (v == 0 || !rows) to[v] = values[v];
  }
  __shared__ bool last;
  __threadfence();  // this thread's values are visible to other blocks
  __syncthreads();  // all threads are past the fence before the block is counted
  if (thread == 0) {
    last = atomicAdd(tickets + tile, 1u) == static_cast<std::uint32_t>(plan.segments - 1);
    if (last) tickets[tile] = 0;
  }
  __syncthreads();  // last is written
  if (!last) return;
  __threadfence();  // the values of the blocks counted earlier are visible from here on

  const int output = thread & ((1 << tile_bits) - 1);
  Wide value[1] = {FoldThread<F>(
      thread >> tile_bits, plan.segments, kBlock >> tile_bits,
      [=](std::int64_t s) { return LoadShared(partials + (s << tile_bits) + output); })};
  FoldHeight<F>(value, tile_bits, kBlockBits - tile_bits, cells);
  if (thread == output && tile_column + output < inner)
    Store<F, T>(value[0], length, out[row * inner + tile_column + output], mark);
}

// The number of vectors in the run of a block: four for each thread, 16 KiB in total. Eight runs
// fit on an SM.
constexpr int kRunVectors = 4 * kBlock;

// Returns the size in bytes of a group (the elements for one value of outer).
std::int64_t GroupBytes(const ReduceAxesProblem& p) {
  return p.length * std::max(p.inner, p.inner_of_all) * static_cast<std::int64_t>(SizeOf(p.dtype));
}
bool IsShort(const ReduceAxesProblem& p) { return p.length > 0 && GroupBytes(p) <= kShortBytes; }

// Returns the number of groups in the run of a block. It is a multiple of the block's threads, so
// all threads have the same number of groups and every run begins at the same position within a
// vector.
std::int64_t GroupsOfRun(const ReduceAxesProblem& p) {
  return (kRunVectors * kVectorBytes / GroupBytes(p)) & -std::int64_t{kBlock};
}

// Folds short groups: x[outer, length, inner], whose rows are `pitch` elements apart. One thread
// folds each output, in the order of its elements. It accumulates in Fold::Wide, which costs
// nothing when memory is the limit, and rounds 16-bit results once.
template <class F, class T>
__global__ void __launch_bounds__(kBlock)
    FoldShort(const T* x, std::int64_t outer, int length, int inner, int pitch, int groups_of_run,
              typename F::Out* out) {
  constexpr int kWide = kVector<T>;
  __shared__ uint4 run[kRunVectors + 1];
  const std::int64_t first = std::int64_t{blockIdx.x} * groups_of_run;
  const auto groups = static_cast<int>(min(outer - first, std::int64_t{groups_of_run}));
  const int group = length * pitch;
  const T* const end = x + (outer * group - pitch + inner);
  // The run begins at an aligned address, up to a vector before its first element.
  const T* const begin = x + first * group;
  const auto before =
      static_cast<int>(reinterpret_cast<std::uintptr_t>(begin) % kVectorBytes / sizeof(T));
  const T* const aligned = begin - before;
  const int vectors = (before + groups * group + kWide - 1) / kWide;
  constexpr int kEach = kRunVectors / kBlock + 1;
  uint4 loaded[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = j * kBlock + static_cast<int>(threadIdx.x);
    if (i >= vectors) break;
    const T* const from = aligned + i * kWide;
    if (from >= x && from + kWide <= end) {
      loaded[j] = LoadAligned<Load::kOnce>(from);
    } else {
      T elements[kWide] = {};
#pragma unroll
      for (int v = 0; v < kWide; ++v)
        if (from + v >= x && from + v < end) elements[v] = from[v];
      std::memcpy(&loaded[j], elements, sizeof elements);
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = j * kBlock + static_cast<int>(threadIdx.x);
    if (i < vectors) run[i] = loaded[j];
  }
  __syncthreads();  // the run is in shared memory

  const T* const elements = reinterpret_cast<const T*>(run) + before;
  for (int o = static_cast<int>(threadIdx.x); o < groups * inner; o += kBlock) {
    ThreadFold<WideFold<F, T>, T> chain;
    if (group % kWide == 0 && pitch == 1 && before == 0) {
      // Reads whole vectors of a row, because single elements of several threads would be in the
      // same bank.
      for (int step = 0; step < length; step += kWide) {
        const uint4 vector = run[(o * length + step) / kWide];
        if (step == 0) chain.Begin(ElementOf<T>(vector, 0));
#pragma unroll
        for (int v = 0; v < kWide; ++v)
          chain.Add(ElementOf<T>(vector, v), static_cast<std::uint32_t>(step + v));
      }
    } else {
      const int g = inner == 1 ? o : o / inner;
      const T* const from = elements + g * group + (o - g * inner);
      chain.Begin(from[0]);
      for (int step = 0; step < length; ++step)
        chain.Add(from[step * pitch], static_cast<std::uint32_t>(step));
    }
    chain.Flush(0, length);
    out[first * inner + o] = F::FinishAxis(
        chain.Value(length, [](std::uint32_t step) { return std::int64_t{step}; }), length);
  }
}

template <class F, class T>
void LaunchShort(const ReduceAxesProblem& p, CudaStream& stream) {
  if (p.outer * p.inner == 0) return;
  const std::int64_t groups = GroupsOfRun(p);
  const auto blocks = static_cast<unsigned>(CeilDiv(p.outer, groups));
  FoldShort<F, T><<<blocks, kBlock, 0, stream.handle()>>>(
      static_cast<const T*>(p.x), p.outer, static_cast<int>(p.length), static_cast<int>(p.inner),
      static_cast<int>(std::max(p.inner, p.inner_of_all)), static_cast<int>(groups),
      static_cast<typename F::Out*>(p.out));
  CUDA_CHECK_LAUNCH(FoldShort);
}

// Return the slabs of p, and the rows that remain after them, as problems.
ReduceAxesProblem Slabs(const ReduceAxesProblem& p) {
  ReduceAxesProblem slabs = p;
  slabs.outer = kSlabs;
  slabs.length = SlabRows(p);
  return slabs;
}
ReduceAxesProblem Rest(const ReduceAxesProblem& p) {
  ReduceAxesProblem rest = p;
  rest.length = p.length % kSlabs;
  return rest;
}

template <class F, class T>
void LaunchFold(const ReduceAxesProblem& p, const Plan& plan, CudaStream& stream) {
  using Wide = typename F::Wide;
  const std::int64_t pitch = std::max(p.inner, p.inner_of_all);
  Wide* partials = nullptr;
  std::uint32_t* tickets = nullptr;
  if (plan.segments > 1) {
    const std::int64_t outputs = plan.rows ? 1 : std::int64_t{kVector<T>} << plan.width_bits;
    partials = static_cast<Wide*>(stream.Scratch(
        static_cast<std::size_t>(plan.tiles * plan.segments * outputs) * sizeof(Wide)));
    tickets = stream.Tickets();
  }
  const auto blocks = static_cast<unsigned>(plan.tiles * plan.segments);
  const auto launch = [&](auto aligned) {
    constexpr bool kWhole = aligned();
    constexpr bool kKnown = kWhole || sizeof(T) >= 4;
    constexpr Lines kRows = kKnown ? Lines::kRows : Lines::kEither;
    constexpr Lines kColumns = kKnown ? Lines::kColumns : Lines::kEither;
    const auto kernel =
        plan.rows ? FoldAxis<F, T, kWhole, kRows> : FoldAxis<F, T, kWhole, kColumns>;
    kernel<<<blocks, kBlock, 0, stream.handle()>>>(
        static_cast<const T*>(p.x), p.outer, p.length, p.inner, pitch, plan, partials, tickets,
        static_cast<typename F::Out*>(p.out), stream.result());
  };
  // Whether every line of vectors begins and ends at a multiple of 16 bytes.
  const auto line = static_cast<std::uintptr_t>(plan.rows ? p.length : pitch) * sizeof(T);
  const bool whole = (reinterpret_cast<std::uintptr_t>(p.x) | line) % kVectorBytes == 0;
  if constexpr (kIsWide<F>) {
    launch(std::false_type{});  // it runs rarely, and this is fast enough
  } else if (whole) {
    launch(std::true_type{});
  } else {
    launch(std::false_type{});
  }
  CUDA_CHECK_LAUNCH(FoldAxis);
}

// Folds the partial results of `slabs` slabs, each of `rows` rows, into the results. Each thread
// computes one result.
template <class F, class T>
__global__ void __launch_bounds__(kBlock)
    FoldSlabs(const typename F::Wide* partials, std::int64_t slabs, std::int64_t rows,
              std::int64_t length, std::int64_t inner, typename F::Out* out, Scalar* mark) {
  const std::int64_t column = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (column >= inner) return;
  typename F::Wide value = partials[column];
#pragma unroll 4
  for (std::int64_t slab = 1; slab < slabs; ++slab) {
    typename F::Wide next = partials[slab * inner + column];
    if constexpr (F::kArg) next.index += slab * rows;
    value = F::Combine(value, next);
  }
  Store<F, T>(value, length, out[column], mark);
}

// Folds slabs [first, end) into partial results, the first of which is at `partials`.
template <class F, class T>
void LaunchSlabs(const ReduceAxesProblem& p, std::int64_t first, std::int64_t end,
                 typename F::Wide* partials, CudaStream& stream) {
  const std::int64_t whole = std::min(end, kSlabs);
  if (first < whole) {
    ReduceAxesProblem slabs = Slabs(p);
    slabs.outer = whole - first;
    slabs.x = static_cast<const T*>(p.x) + first * slabs.length * p.inner;
    slabs.out = partials;
    LaunchFold<PartialFold<F>, T>(slabs, MakeSlabPlan(slabs), stream);
  }
  if (end > kSlabs) {
    ReduceAxesProblem rest = Rest(p);
    rest.x = static_cast<const T*>(p.x) + (p.length - rest.length) * p.inner;
    rest.out = partials + (kSlabs - first) * p.inner;
    LaunchFold<PartialFold<F>, T>(rest, MakePlan(rest), stream);
  }
}

// Folds p in slabs. shares: the shares of the slabs, or empty if the stream folds all of them.
template <class F, class T>
void RunSlabs(const ReduceAxesProblem& p, std::span<const TeamShare> shares, CudaStream& own) {
  using Wide = typename F::Wide;
  const std::int64_t slabs = SlabCount(p);
  const auto bytes = [&](std::int64_t count) {
    return static_cast<std::size_t>(count * p.inner) * sizeof(Wide);
  };
  auto* const partials = static_cast<Wide*>(own.Scratch(bytes(slabs)));
  if (shares.empty()) LaunchSlabs<F, T>(p, 0, slabs, partials, own);
  for (const TeamShare& share : shares) {
    OnDeviceOf(*share.stream, [&] {
      CudaStream& stream = Cuda(*share.stream);
      Wide* const from_first = partials + share.first * p.inner;
      if (&stream == &own) return LaunchSlabs<F, T>(p, share.first, share.end, from_first, own);
      const std::size_t size = bytes(share.end - share.first);
      auto* const here = static_cast<Wide*>(stream.Scratch(size));
      LaunchSlabs<F, T>(p, share.first, share.end, here, stream);
      stream.CopyToPeer(own, from_first, here, size);
    });
  }
  for (const TeamShare& share : shares) {
    if (share.stream != &own) own.WaitFor(*share.stream);
  }
  const auto blocks = static_cast<unsigned>(CeilDiv(p.inner, kBlock));
  FoldSlabs<F, T><<<blocks, kBlock, 0, Cuda(own).handle()>>>(
      partials, slabs, SlabRows(p), p.length, p.inner, static_cast<typename F::Out*>(p.out),
      own.result());
  CUDA_CHECK_LAUNCH(FoldSlabs);
}

// Returns the number of steps in Fold::Wide after a thread's chains, in one launch.
std::int64_t WideSteps(const ReduceAxesProblem& p, const Plan& plan) {
  std::int64_t steps = WalkSteps(plan.steps, SizeOf(p.dtype)) + plan.height_bits;
  // A thread folds at most all segments of an output. The fold over the threads follows.
  if (plan.segments > 1) steps += plan.segments + CeilDiv(plan.segments, kMaxChain) + kBlockBits;
  return steps;
}

// The steps from which the bound and the cost of a problem are computed.
struct Steps {
  std::int64_t chain;  // of a thread in Fold::Acc
  std::int64_t wide;   // after those, in Fold::Wide
};
Steps StepsOf(const ReduceAxesProblem& p) {
  const auto of = [](const ReduceAxesProblem& launch, const Plan& plan) {
    return Steps{plan.steps, WideSteps(launch, plan)};
  };
  if (IsShort(p)) return {1, p.length};
  if (SlabRows(p) == 0) return of(p, MakePlan(p));
  const Steps slabs = of(Slabs(p), MakeSlabPlan(Slabs(p))), rest = of(Rest(p), MakePlan(Rest(p)));
  return {std::max(slabs.chain, rest.chain), std::max(slabs.wide, rest.wide) + SlabCount(p)};
}

// Returns the number of bytes that a launch needs for the values of segments.
std::uint64_t SegmentBytes(const ReduceAxesProblem& p, const Plan& plan) {
  if (plan.segments == 1) return 0;
  const std::int64_t vector = kVectorBytes / static_cast<std::int64_t>(SizeOf(p.dtype));
  const std::int64_t outputs = plan.rows ? 1 : vector << plan.width_bits;
  return static_cast<std::uint64_t>(plan.tiles * plan.segments * outputs) *
         WideBytes(p.op, p.dtype);
}

// Returns the scratch memory for slabs. Without slabs, scratch memory is negligible.
std::uint64_t Scratch(const ReduceAxesProblem& p) {
  if (SlabRows(p) == 0) return 0;
  return static_cast<std::uint64_t>(SlabCount(p) * p.inner) * WideBytes(p.op, p.dtype) +
         SegmentBytes(Slabs(p), MakeSlabPlan(Slabs(p))) + SegmentBytes(Rest(p), MakePlan(Rest(p)));
}

double Roundoff(const ReduceAxesProblem& p) {
  const Steps steps = StepsOf(p);
  return ReduceRoundoff(p.op, p.dtype, p.length,
                        {std::min<std::int64_t>(steps.chain, kMaxChain), steps.wide});
}

Cost CostOf(const ReduceAxesProblem& p) {
  const bool cut = SlabRows(p) > 0;
  const Plan plan = cut ? MakeSlabPlan(Slabs(p)) : MakePlan(p);
  const auto outputs = static_cast<std::uint64_t>(p.outer * p.inner);
  const auto elements = outputs * static_cast<std::uint64_t>(p.length);
  const auto segments = static_cast<std::uint64_t>(plan.segments);
  const std::uint64_t wide = WideBytes(p.op, p.dtype);
  const std::uint64_t partials = cut ? static_cast<std::uint64_t>(SlabCount(p) * p.inner) : outputs;
  const Steps steps = StepsOf(p);
  return {.bytes = elements * SizeOf(p.dtype) + outputs * SizeOf(ResultDType(p.op, p.dtype)) +
                   (segments > 1 ? 2 * segments * partials * wide : 0) +
                   (cut ? 2 * partials * wide : 0),
          .flops = elements,
          .atomics = segments > 1 ? segments : 0,
          .depth = static_cast<std::uint64_t>(steps.chain + steps.wide)};
}

void EnqueueShared(const ReduceAxesProblem& p, std::span<const TeamShare> shares, Stream& stream) {
  if (!p.continues) stream.result()->integer = 0;
  DispatchDType(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    DispatchOp(p.op, [&](auto op) {
      using F = Fold<op(), T>;
      if (IsShort(p)) {
        LaunchShort<F, T>(p, Cuda(stream));
      } else if (SlabRows(p) > 0) {
        RunSlabs<F, T>(p, shares, Cuda(stream));
      } else {
        LaunchFold<F, T>(p, MakePlan(p), Cuda(stream));
      }
    });
  });
}
void Enqueue(const ReduceAxesProblem& p, Stream& stream) { EnqueueShared(p, {}, stream); }

bool LeftRange(const ReduceAxesProblem&, Stream& stream) { return stream.result()->integer != 0; }

// Never uses slabs, because this launch is rare and slabs would take as much scratch memory again.
void EnqueueWide(const ReduceAxesProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    DispatchOp(p.op, [&](auto op) {
      using F = Fold<op(), T>;
      if constexpr (kMayLeaveRange<F, T>)
        LaunchFold<WideFold<F, T>, T>(p, MakePlan(p), Cuda(stream));
    });
  });
}
void EnqueueWideAlone(const ReduceAxesProblem& p, std::span<const TeamShare>, Stream& stream) {
  EnqueueWide(p, stream);
}

}  // namespace

extern constexpr Strategy<ReduceAxesProblem> kReduceAxesAxis = {
    .name = "axis",
    .summary = "16-byte loads, blocks laid out according to the shape, long axes cut into segments",
    .source =
        "tree reductions from the notes on CUDA reductions, along one axis of an array; "
        "the last block finishes as in the CUDA sample threadFenceReduction",
    .backend = Backend::kCuda,
    .deterministic = true,
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .wide = {.left_range = LeftRange, .launch = EnqueueWide},
    .shared = {.launch = EnqueueShared, .launch_wide = EnqueueWideAlone},
    .scratch = Scratch,
};

}  // namespace tessera
