// Reduce along the middle axis of x[outer, length, inner]: rows of a matrix (inner = 1), columns
// (outer = 1), or any axes of an array that are neighbours. Three questions decide: do neighbouring
// threads read neighbouring memory, has every thread enough loads in flight, and has every SM
// enough threads.
//
// A thread loads vectors of 16 bytes, eight of them before it uses the first
// (kernels/cuda/common/vectors.cuh). A block of 256 threads is a box: `width` threads across
// neighbouring vectors of outputs, `height` threads along the axis, and, when that is less than a
// block, `depth` threads over neighbouring values of outer. All three are powers of two.
//
//   columns (inner > 1)                     rows (inner = 1): width 1, the vectors lie along the
//   axis
//
//          across: vectors of outputs              along the axis
//   axis   [t0   ] [t1   ] [t2   ]                 [t0   ] [t1   ] [t0   ] [t1   ]   row 0
//     |    [t3   ] [t4   ] [t5   ]                 [t2   ] [t3   ] [t2   ] [t3   ]   row 1
//     v    [t0   ] [t1   ] [t2   ]
//
// The height is what an axis needs for at most 8 or 16 vectors per thread, up to a block, then each
// thread takes more. Few outputs would leave the chip idle: there the axis is cut into segments, a
// block each. A block leaves the values of its segment in device memory and counts itself on a
// ticket of its outputs; whoever counts last folds all the segments, in index order, and sets the
// ticket back. So one launch does all of it, and there are no atomics on values. The cut depends on
// the shape and the element's size alone: the same input gives the same bits, on every GPU.
//
// If length and inner are so small that the elements for one value of outer have at most
// kShortBytes (for example pairs of numbers), one thread for each would have one small load in
// flight. Instead a block copies a run of memory to shared memory in vectors, and each of its
// threads folds whole outputs from there: loads and stores of neighbouring threads are adjacent in
// memory.
//
// Along the outermost axis of more than 1 GiB, if it is long, that launch folds slabs of rows to
// partial results, and another one those (kernels/team/axis_slabs.h): where several GPUs have the
// array, each of them folds the slabs that it has.
//
// Cost for 1024 x 1024, f32: 4 MiB read, 4 KiB written, one launch. Along rows a block for every 2
// rows, with 2 vectors per thread; along columns 32 tiles of 8 vectors in 4 segments, whose values,
// 32 KiB, are written and read again.
//
// Right for any extents, 0 included (length 0: identities), and any alignment: a thread whose
// vectors are not aligned assembles them from aligned ones or, at the ends of the array, from
// elements. For long f32 axes: chains of at most 64 in single precision, the rest double. Where
// such a chain leaves the range, a second launch adds in double.
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
// A block along columns is 8 vectors wide at least, where there are so many: whole lines of 128
// bytes. Up to 32 wide, a whole warp, its threads have less to fold between them; it grows that far
// while there are this many blocks side by side, since more segments would have to make up for
// fewer.
constexpr int kLeastWidthBits = 3;
constexpr int kMostWidthBits = 5;
constexpr int kTilesBits = 5;
// Threads that the work is spread over before a thread gets more than one vector: half of those an
// H200 runs at once.
constexpr std::int64_t kThreads = std::int64_t{1} << 17;
// Blocks that are wanted when a cut has to make them: those that 132 SMs run at once, as the
// kernels below are bounded for sums of elements of `size` bytes. Constants, so that the bits do
// not depend on the device.
constexpr std::int64_t BlocksWanted(std::int64_t size) { return 132 * (size < 4 ? 3 : 4); }
// Vectors a thread in a segment at least, so that all its loads are in flight at once.
constexpr std::int64_t kLeastSteps = 8;
// Groups (the elements for one value of outer) of at most this size are folded by FoldShort. Its
// speed is 16 times that of FoldAxis for single f16, and 0.9 times that for rows of 16 f32 that are
// not aligned (NVIDIA H200, 2026-11-28).
constexpr std::int64_t kShortBytes = 64;
// Blocks that an SM's registers have to suffice for. Four have 128 KiB of loads in flight; at two,
// what a block does before its first load and after its last shows. Four need vectors that are
// whole and no more than four of a thread's chains; Moments and WideSquares do not fit three.
template <class F, class T, bool kWhole>
constexpr int kResident = (sizeof(typename F::Wide) > 16) ? 2
                          : kWhole && sizeof(T) >= 4      ? 4
                                                          : 3;

// How the block lies over the array and how the axis is cut.
struct Plan {
  bool rows;             // inner = 1: vectors lie along the axis
  int width_bits;        // log2 of the threads across vectors of outputs
  int height_bits;       // log2 of the threads along the axis
  std::int64_t across;   // tiles along inner
  std::int64_t tiles;    // in all
  std::int64_t steps;    // vectors of a thread in one segment
  std::int64_t segment;  // elements of the axis in one segment
  std::int64_t segments;
};

// outer: how many values of outer the plan is made for, whatever number a launch has.
// most_in_column: vectors that a thread takes of a column before others share it.
Plan MakePlan(const ReduceAxesProblem& p, std::int64_t outer,
              std::int64_t most_in_column = 2 * kVectorsInFlight) {
  const std::int64_t vector = kVectorBytes / static_cast<std::int64_t>(SizeOf(p.dtype));
  Plan plan{};
  const std::int64_t inner = std::max(p.inner, p.inner_of_all);
  plan.rows = inner == 1;
  const std::int64_t steps = plan.rows ? CeilDiv(p.length, vector) : p.length;
  const std::int64_t columns = CeilDiv(inner, vector);  // vectors of outputs
  // Vectors a thread: a short row is read by few lanes, each of which takes several vectors of it;
  // a column by one thread, as long as that leaves it work for two batches of loads.
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
  // Whoever folds the segments is a block that has a thread for each output of one tile.
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
// Of slabs: enough segments for GPUs of which each has one slab, and up to 64 vectors per thread,
// so that blocks have less to fold for each of the many results (docs/notebook.md, "Columns").
Plan MakeSlabPlan(const ReduceAxesProblem& slabs) {
  return MakePlan(slabs, /*outer=*/1, /*most_in_column=*/64);
}

// Folds values[0, used) of the threads that differ in their position along the axis into those of
// position 0. cells: kBlock / 2 * kCount in shared memory. Every thread of the block calls it.
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
    // A thread of the upper half hands its values to the one `distance` below it; both know the
    // place by the lower one's number without bit `distance`.
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
    __syncthreads();  // and have been read
  }
}

// A value that another block wrote during this launch: from the L2.
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

// Neighbouring results, as one store where that is aligned.
template <class Out, int kCount>
struct alignas(sizeof(Out) * kCount < 16 ? sizeof(Out) * kCount : 16) Results {
  Out values[kCount];
};

// F in accumulators that sums of finite elements do not leave.
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

// F, whose results are values that others are yet to be folded with.
template <class F>
struct PartialFold : F {
  using Out = typename F::Wide;
  __device__ static Out FinishAxis(typename F::Wide value, std::int64_t) { return value; }
};
template <class F>
inline constexpr bool kIsPartial = false;
template <class F>
inline constexpr bool kIsPartial<PartialFold<F>> = true;

// Whether F adds up in f32 what may leave its range, which a chain of f16 does not. What has become
// of partial results shows in the results.
template <class F, class T>
inline constexpr bool kMayLeaveRange = std::is_same_v<typename F::Acc, float> && !F::kOrdering &&
                                       !std::is_same_v<T, Half> && !kIsPartial<F>;

// The value of one output. A sum that is not finite is marked, for the host to launch the kernel
// once more with WideFold, and holds its place with a NaN: that launch stores where it finds one,
// so that no output depends on what became of others.
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

// What a kernel folds. One that knows it needs fewer registers: rows of 16 bits, whole and aligned,
// take 33 us instead of 42 for 8192 x 8192, of f32 that is not aligned 86 instead of 93. Of 16 bits
// that are not aligned kEither takes 57 and kRows 66 (NVIDIA H200, 2026-11-27).
enum class Lines { kEither, kRows, kColumns };

// Folds x[outer, length, inner], whose rows are `pitch` elements apart, over length to
// out[outer, inner]. With segments: by way of partials[tile][segment][output of the tile] and the
// tickets of the tiles. kWhole: all vectors are whole and aligned.
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
  // Tiles first: blocks that run at the same time read neighbouring memory.
  // All of these are below the number of blocks; a 64-bit division takes a hundred instructions.
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

  // Outputs of a tile: 2^tile_bits.
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
  __syncthreads();  // and so are those of all threads of the block, before it is counted
  if (thread == 0) {
    last = atomicAdd(tickets + tile, 1u) == static_cast<std::uint32_t>(plan.segments - 1);
    if (last) tickets[tile] = 0;
  }
  __syncthreads();  // last is written
  if (!last) return;
  __threadfence();  // what the other blocks wrote before they were counted is seen from here on

  const int output = thread & ((1 << tile_bits) - 1);
  Wide value[1] = {FoldThread<F>(
      thread >> tile_bits, plan.segments, kBlock >> tile_bits,
      [=](std::int64_t s) { return LoadShared(partials + (s << tile_bits) + output); })};
  FoldHeight<F>(value, tile_bits, kBlockBits - tile_bits, cells);
  if (thread == output && tile_column + output < inner)
    Store<F, T>(value[0], length, out[row * inner + tile_column + output], mark);
}

// Vectors in the run of a block, four for each thread: 16 KiB. Eight runs fit an SM.
constexpr int kRunVectors = 4 * kBlock;

// Bytes of a group: the elements for one value of outer.
std::int64_t GroupBytes(const ReduceAxesProblem& p) {
  return p.length * std::max(p.inner, p.inner_of_all) * static_cast<std::int64_t>(SizeOf(p.dtype));
}
bool IsShort(const ReduceAxesProblem& p) { return p.length > 0 && GroupBytes(p) <= kShortBytes; }

// Groups in the run of a block: a multiple of the block's threads, so that each thread has equally
// many, and so that every run begins at the same position within a vector.
std::int64_t GroupsOfRun(const ReduceAxesProblem& p) {
  return (kRunVectors * kVectorBytes / GroupBytes(p)) & -std::int64_t{kBlock};
}

// Folds short groups, x[outer, length, inner] whose rows are `pitch` elements apart. Each output is
// folded by one thread, in the order of its elements. It accumulates in Fold::Wide, which costs
// nothing where memory is the limit, and rounds results of 16 bits once.
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
      // Reads whole vectors of a row: single elements of several threads would lie in the same
      // bank.
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

// The whole slabs of p, and the rows that are left behind them, as problems.
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

// All of p in one launch.
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
  // Every line of vectors begins at a multiple of 16 bytes and ends at one.
  const auto line = static_cast<std::uintptr_t>(plan.rows ? p.length : pitch) * sizeof(T);
  const bool whole = (reinterpret_cast<std::uintptr_t>(p.x) | line) % kVectorBytes == 0;
  if constexpr (kIsWide<F>) {
    launch(std::false_type{});  // for once, it is fast enough
  } else if (whole) {
    launch(std::true_type{});
  } else {
    launch(std::false_type{});
  }
  CUDA_CHECK_LAUNCH(FoldAxis);
}

// Folds the partial results of `slabs` slabs, each of so many rows, to results. A thread for each.
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

// Slabs [first, end), whose partial results begin at partials.
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

// shares: of slabs; empty where the stream folds all.
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

// Steps in Fold::Wide that follow a thread's chains, in one launch.
std::int64_t WideSteps(const ReduceAxesProblem& p, const Plan& plan) {
  std::int64_t steps = WalkSteps(plan.steps, SizeOf(p.dtype)) + plan.height_bits;
  // A thread folds at most all segments of an output, then others fold with it.
  if (plan.segments > 1) steps += plan.segments + CeilDiv(plan.segments, kMaxChain) + kBlockBits;
  return steps;
}

// What the bound and the cost of a problem are made of.
struct Steps {
  std::int64_t chain;  // in Fold::Acc, of a thread
  std::int64_t wide;   // in Fold::Wide, behind those
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

// What a launch takes for values of segments.
std::uint64_t SegmentBytes(const ReduceAxesProblem& p, const Plan& plan) {
  if (plan.segments == 1) return 0;
  const std::int64_t vector = kVectorBytes / static_cast<std::int64_t>(SizeOf(p.dtype));
  const std::int64_t outputs = plan.rows ? 1 : vector << plan.width_bits;
  return static_cast<std::uint64_t>(plan.tiles * plan.segments * outputs) *
         WideBytes(p.op, p.dtype);
}

// Of slabs; otherwise it is next to nothing.
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

// Never by slabs: it is rare, and would take as much scratch memory again.
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
    .summary = "16-byte loads, blocks laid out by the shape, long axes cut into segments",
    .source =
        "tree reductions of the notes on CUDA reductions, laid along one axis of an array; "
        "the last block finishes as in the CUDA sample threadFenceReduction",
    .backend = Backend::kCuda,
    .deterministic = true,
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .left_range = LeftRange,
    .launch_wide = EnqueueWide,
    .launch_shared = EnqueueShared,
    .launch_wide_shared = EnqueueWideAlone,
    .scratch = Scratch,
};

}  // namespace tessera
