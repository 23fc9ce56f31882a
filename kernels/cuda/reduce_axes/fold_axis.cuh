// The kernel that folds an axis of any length: a thread folds vectors, a block folds its threads,
// and the last of several blocks folds the segments of the axis.
//
// Invariant: an output is folded in an order that depends only on the plan: first the chains of a
// thread, then the columns of a vector (along rows), the threads along the axis, and the segments.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/cuda/reduce_axes/plan.cuh"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera::axes {

// The number of blocks that must fit into an SM's registers. Four blocks have 128 KiB of loads in
// flight. With two blocks, the work of a block before its first load and after its last load adds
// to the time. Four blocks fit only with whole vectors and at most four chains per thread. With
// Moments or WideSquares, fewer than three fit.
template <class F, class T, bool kWhole>
inline constexpr int kResident = (sizeof(typename F::Wide) > 16) ? 2
                                 : kWhole && sizeof(T) >= 4      ? 4
                                                                 : 3;

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

// F whose results are partial results, which are folded with others later.
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
// With such kernels, for arrays of 8192 x 8192, whole and aligned rows of 16-bit elements take 33
// us instead of 42, and unaligned rows of f32 take 86 us instead of 93. However, unaligned rows of
// 16-bit elements take 57 us with kEither and 66 us with kRows (NVIDIA H200, 2026-11-27).
enum class Lines { kEither, kRows, kColumns };

// The position of a thread in the box of its block and in the array.
template <class T>
struct Place {
  bool rows;
  int across, along;  // in the box
  std::int64_t segment, tile;
  std::int64_t row;          // the value of outer
  std::int64_t tile_column;  // the tile's first column
  std::int64_t column;       // the first column of the thread's vectors
  std::int64_t begin, end;   // of the segment
  bool active;               // whether the thread has outputs

  __device__ __forceinline__ Place(const Plan& plan, bool of_rows, std::int64_t outer,
                                   std::int64_t length, std::int64_t inner)
      : rows(of_rows) {
    constexpr int kWide = kVector<T>;
    const int thread = static_cast<int>(threadIdx.x);
    across = thread & ((1 << plan.width_bits) - 1);
    along = thread >> plan.width_bits & ((1 << plan.height_bits) - 1);
    const int box_bits = plan.width_bits + plan.height_bits;
    // The tile varies fastest, so that blocks that run at the same time read adjacent memory. All
    // numbers of tiles are at most the number of blocks, so 32 bits suffice; a 64-bit division
    // takes a hundred instructions.
    const auto tiles = static_cast<unsigned>(plan.tiles),
               tiles_across = static_cast<unsigned>(plan.across);
    segment = blockIdx.x / tiles;
    tile = blockIdx.x % tiles;
    row = (std::int64_t{blockIdx.x % tiles / tiles_across} << (kBlockBits - box_bits)) +
          (thread >> box_bits);
    tile_column = std::int64_t{blockIdx.x % tiles % tiles_across} * kWide << plan.width_bits;
    column = rows ? 0 : tile_column + across * kWide;
    active = row < outer && column < inner;
    begin = segment * plan.segment;
    end = min(length, begin + plan.segment);
  }

  // Returns the number of adjacent outputs of the thread.
  __device__ int Outputs(std::int64_t inner) const {
    if (rows) return 1;
    return active ? static_cast<int>(min(inner - column, std::int64_t{kVector<T>})) : 0;
  }

  // Returns the vectors that the thread folds.
  __device__ __forceinline__ Walk<T> WalkOf(const T* x, std::int64_t outer, std::int64_t length,
                                            std::int64_t inner, std::int64_t pitch,
                                            const Plan& plan, int outputs) const {
    Walk<T> walk;
    if (rows) {
      walk = WalkArray(x + row * length + begin, active ? end - begin : 0, along, plan.height_bits);
    } else {
      walk.first = x + (row * length + begin + along) * pitch + column;
      walk.stride = pitch << plan.height_bits;
      walk.count =
          active && begin + along < end ? ((end - begin - along - 1) >> plan.height_bits) + 1 : 0;
      walk.each = walk.last = outputs;
    }
    walk.end = x + (outer * length - 1) * pitch + inner;
    return walk;
  }
};

// Folds the chains of the threads along the axis. The threads at position 0 get the values of their
// outputs.
template <class F, class T>
__device__ __forceinline__ void FoldBox(const Place<T>& place, const Plan& plan,
                                        const Walk<T>& walk,
                                        const ThreadFold<F, T> (&chains)[kVector<T>],
                                        typename F::Wide (&values)[kVector<T>],
                                        typename F::Wide* cells) {
  constexpr int kWide = kVector<T>;
  const std::int64_t begin = place.begin;
  const int along = place.along;
  if (place.rows) {
    typename F::Wide value[1] = {FoldChains<F>(walk, chains, [=](std::uint32_t step, int v) {
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
}

// Stores the first `outputs` values as results, all of them together if possible.
template <class F, class T>
__device__ __forceinline__ void StoreResults(const typename F::Wide (&values)[kVector<T>],
                                             int outputs, std::int64_t length, typename F::Out* to,
                                             Scalar* mark) {
  constexpr int kWide = kVector<T>;
  using All = Results<typename F::Out, kWide>;
  if (!kIsWide<F> && outputs == kWide && reinterpret_cast<std::uintptr_t>(to) % alignof(All) == 0) {
    All results;
#pragma unroll
    for (int v = 0; v < kWide; ++v) Store<F, T>(values[v], length, results.values[v], mark);
    *reinterpret_cast<All*>(to) = results;
  } else {
#pragma unroll
    for (int v = 0; v < kWide; ++v)
      if (v < outputs) Store<F, T>(values[v], length, to[v], mark);
  }
}

// Whether the block is the last of the tile's blocks to arrive here. If it is, it sees the values
// that the other blocks have stored. All threads of the block call it.
__device__ __forceinline__ bool IsLastOfTile(std::uint32_t* ticket, std::int64_t segments) {
  __shared__ bool last;
  __threadfence();  // this thread's values are visible to other blocks
  __syncthreads();  // all threads are past the fence before the block is counted
  if (threadIdx.x == 0) {
    last = atomicAdd(ticket, 1u) == static_cast<std::uint32_t>(segments - 1);
    if (last) *ticket = 0;
  }
  __syncthreads();  // last is written
  if (!last) return false;
  __threadfence();  // the values of blocks counted earlier are visible from here on
  return true;
}

// Folds x[outer, length, inner], whose rows are `pitch` elements apart, over length into out[outer,
// inner]. If there are several segments, it uses partials[tile][segment][output of the tile] and a
// ticket per tile. kWhole: all vectors are whole and aligned.
template <class F, class T, bool kWhole, Lines kLines>
__global__ void __launch_bounds__(kBlock, kResident<F, T, kWhole>)
    FoldAxis(const T* x, std::int64_t outer, std::int64_t length, std::int64_t inner,
             std::int64_t pitch, Plan plan, typename F::Wide* partials, std::uint32_t* tickets,
             typename F::Out* out, Scalar* mark) {
  using Wide = typename F::Wide;
  constexpr int kWide = kVector<T>;
  __shared__ __align__(16) unsigned char shared[sizeof(Wide) * kBlock / 2 * kWide];
  auto* cells = reinterpret_cast<Wide*>(shared);
  const bool rows = kLines == Lines::kEither ? plan.rows : kLines == Lines::kRows;
  const Place<T> place(plan, rows, outer, length, inner);
  const int outputs = place.Outputs(inner);
  const Walk<T> walk = place.WalkOf(x, outer, length, inner, pitch, plan, outputs);

  ThreadFold<F, T> chains[kWide];
  if constexpr (kWhole) {
    FoldWholeWalk<F>(walk, chains);
  } else {
    FoldWalk<F>(walk, chains);
  }
  Wide values[kWide];
  FoldBox<F>(place, plan, walk, chains, values, cells);
  if (plan.segments == 1) {
    if (place.along == 0 && place.active)
      StoreResults<F, T>(values, outputs, length, out + place.row * inner + place.column, mark);
    return;
  }

  // The block stores the values of its segment. The last block folds those of all segments.
  const int tile_bits = rows ? 0 : plan.width_bits + CeilLog2(kWide);  // log2 of the tile's outputs
  partials += place.tile * plan.segments << tile_bits;
  if (place.along == 0) {
    Wide* to = partials + (place.segment << tile_bits) + place.across * kWide;
#pragma unroll
    for (int v = 0; v < kWide; ++v)
      if (v == 0 || !rows) to[v] = values[v];
  }
  if (!IsLastOfTile(tickets + place.tile, plan.segments)) return;
  const int thread = static_cast<int>(threadIdx.x), output = thread & ((1 << tile_bits) - 1);
  Wide value[1] = {FoldThread<F>(
      thread >> tile_bits, plan.segments, kBlock >> tile_bits,
      [=](std::int64_t s) { return LoadShared(partials + (s << tile_bits) + output); })};
  FoldHeight<F>(value, tile_bits, kBlockBits - tile_bits, cells);
  if (thread == output && place.tile_column + output < inner)
    Store<F, T>(value[0], length, out[place.row * inner + place.tile_column + output], mark);
}

}  // namespace tessera::axes
