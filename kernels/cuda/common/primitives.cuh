// Code that the strategies share: geometry on the host, and folds within a thread, a warp and a
// block on the device.
//
// All folds accept any number of elements and any block size. The order in which they combine
// values depends only on the launch and n. They work on accumulators of Fold<op, T>
// (kernels/same_bits/reduction.h): numbers, or small structs such as Indexed<T> and Moments.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/problem/strategy.h"
#include "kernels/same_bits/reduction.h"

namespace tessera {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;
// The launch bound of kernels that accept any block size. It limits the registers per thread, so
// that even the largest block can be launched.
inline constexpr int kMostThreads = 1024;
inline constexpr LaunchLimits::Range kAnyBlockSize = {kWarpSize, kMostThreads};
inline constexpr LaunchLimits::Range kAnyGridSize = {1, 1u << 20};
inline constexpr LaunchLimits::Range kAnyItems = {1, 256};

// The number of elements that a thread folds in Fold::Acc (a chain) before it adds the result to a
// total in Fold::Wide. Chains are long enough that this addition costs almost nothing, and short
// enough that an f32 sum loses at most six bits.
inline constexpr int kMaxChain = 64;
// The number of independent loads that a thread has in flight. With 2048 threads per SM, 8 loads of
// 4 bytes per thread are 64 KiB; the latency and bandwidth of an H200's memory require about 48
// KiB.
inline constexpr int kBatch = 8;

// --- Host: geometry ---

constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Returns the number of levels of a tree over n values.
constexpr int CeilLog2(std::int64_t n) {
  return n <= 1 ? 0 : std::bit_width(static_cast<std::uint64_t>(n - 1));
}

// The threads of a grid share n elements: with T threads, thread t takes elements t, t + T, t + 2T,
// ...
struct Grid {
  std::uint32_t block_size;
  std::uint32_t blocks;
  std::int64_t per_thread;  // maximum number of elements of a thread
};

// Returns the grid of a launch, with defaults for the parameters that are 0. If grid_size is set,
// it determines how many elements a thread gets. Otherwise items_per_thread determines the size of
// the grid. The grid has at least one block, for any n.
inline Grid MakeGrid(std::int64_t n, const Launch& launch, std::uint32_t block_size,
                     std::uint32_t items_per_thread) {
  if (launch.block_size != 0) block_size = launch.block_size;
  if (launch.items_per_thread != 0) items_per_thread = launch.items_per_thread;
  const std::int64_t wanted = CeilDiv(n, std::int64_t{block_size} * items_per_thread);
  constexpr std::int64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();
  const auto blocks =
      launch.grid_size != 0
          ? launch.grid_size
          : static_cast<std::uint32_t>(std::clamp<std::int64_t>(wanted, 1, kMostBlocks));
  return {block_size, blocks, CeilDiv(n, std::int64_t{block_size} * blocks)};
}

// Like MakeGrid, but the grid has `blocks` blocks for any n unless the launch sets a grid size.
inline Grid MakeFixedGrid(std::int64_t n, Launch launch, std::uint32_t block_size,
                          std::uint32_t blocks) {
  if (launch.grid_size == 0) launch.grid_size = blocks;
  return MakeGrid(n, launch, block_size, 1);
}

// The number of blocks in strategies with a fixed grid. With 256 threads per block they nearly fill
// an H200, which can hold 270336 threads.
inline constexpr std::uint32_t kFixedGrid = 1024;

// Calls f(T{}), where T is the C++ type of `dtype`. REQUIRES: dtype is F32 or F64.
template <class F>
void DispatchReal(DType dtype, F&& f) {
  if (dtype == DType::kF32) {
    f(float{});
  } else {
    f(double{});
  }
}

// Calls f(std::integral_constant<int, c>()), where c is the first of the constants that is at least
// `value`, or the last one. REQUIRES: the constants ascend.
template <int kFirst, int... kOthers, class F>
decltype(auto) DispatchAtLeast(std::int64_t value, F&& f) {
  if constexpr (sizeof...(kOthers) > 0) {
    if (value > kFirst) return DispatchAtLeast<kOthers...>(value, f);
  }
  return f(std::integral_constant<int, kFirst>());
}

// --- Device: one thread ---

// Converts an accumulator of either type to Fold::Wide.
template <class F, class A>
__device__ typename F::Wide Widened(A a) {
  if constexpr (std::is_same_v<A, typename F::Wide>) {
    return a;
  } else {
    return F::Widen(a);
  }
}

// Folds load(i) for i = first, first + step, ... below end. load returns Fold::Acc or Fold::Wide,
// and chains of kMaxChain values are folded in the type that it returns.
template <class F, class Load>
__device__ typename F::Wide FoldThread(std::int64_t first, std::int64_t end, std::int64_t step,
                                       Load load) {
  using Wide = typename F::Wide;
  using A = decltype(load(first));
  Wide total = F::template Identity<Wide>();
  while (first < end) {
    A chain = F::template Identity<A>();
    for (int folded = 0; folded < kMaxChain && first < end; folded += kBatch) {
      A batch[kBatch];
      if (first + (kBatch - 1) * step < end) {
        // All loads come before the first use, so that they are in flight together.
#pragma unroll
        for (int j = 0; j < kBatch; ++j) batch[j] = load(first + j * step);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) chain = F::Combine(chain, batch[j]);
        first += kBatch * step;
      } else {
        for (; first < end; first += step) chain = F::Combine(chain, load(first));
      }
    }
    total = F::Combine(total, Widened<F>(chain));
  }
  return total;
}

// Like FoldThread, but without batches of loads, as in the first lessons. The compiler decides
// whether a load waits for the previous addition.
template <class F, class Load>
__device__ typename F::Wide FoldThreadInTurn(std::int64_t first, std::int64_t end,
                                             std::int64_t step, Load load) {
  using Wide = typename F::Wide;
  using A = decltype(load(first));
  Wide total = F::template Identity<Wide>();
  while (first < end) {
    A chain = F::template Identity<A>();
    for (int folded = 0; folded < kMaxChain && first < end; ++folded, first += step)
      chain = F::Combine(chain, load(first));
    total = F::Combine(total, Widened<F>(chain));
  }
  return total;
}

// The thread's index in the grid, and the number of threads in the grid.
__device__ inline std::int64_t GridThread() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ inline std::int64_t GridThreads() { return std::int64_t{gridDim.x} * blockDim.x; }

// The thread's warp in its block, and its lane in the warp.
__device__ inline int WarpIndex() { return static_cast<int>(threadIdx.x) / kWarpSize; }
__device__ inline int LaneIndex() { return static_cast<int>(threadIdx.x) % kWarpSize; }

// --- Device: one warp ---

// Returns the value of the lane that is `offset` lanes higher. The value is moved word by word,
// because registers are 32 bits wide.
template <class A>
__device__ A ShuffleDown(unsigned mask, A value, int offset) {
  static_assert(std::is_trivially_copyable_v<A> && sizeof(A) % sizeof(unsigned) == 0);
  unsigned words[sizeof(A) / sizeof(unsigned)];
  std::memcpy(words, &value, sizeof value);
#pragma unroll
  for (unsigned& word : words) word = __shfl_down_sync(mask, word, offset);
  std::memcpy(&value, words, sizeof value);
  return value;
}

// Folds the values of lanes 0 to lanes - 1. Lane 0 gets the result. The condition in the loop keeps
// a lane from using values of lanes beyond the last, which are undefined. REQUIRES: exactly these
// lanes of the warp call it.
template <class F, class A>
__device__ A FoldWarp(A value, int lanes) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  const unsigned mask = lanes == kWarpSize ? kFullMask : (1u << lanes) - 1;
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const A other = ShuffleDown(mask, value, offset);
    if (lane + offset < lanes) value = F::Combine(value, other);
  }
  return value;
}

// --- Device: one block ---

// Returns dynamic shared memory as an array of T.
template <class T>
__device__ T* DynamicShared() {
  extern __shared__ __align__(16) unsigned char tessera_dynamic_shared[];
  return reinterpret_cast<T*>(tessera_dynamic_shared);
}

// Two numberings of the same tree, which fold cells[0, count) into cells[0]. The threads of a block
// share the work; count <= 2 * blockDim.x. All threads call Fold after a barrier that makes the
// cells visible, and all see the result when Fold returns.
//
// With doubling strides, thread t works on cell 2t, at first in all lanes of a warp and then in
// fewer and fewer. A level writes cells at multiples of 2 * stride and reads the cells between.
//
//   stride 1   0<1 2<3 4<5 6<7    threads 0 1 2 3
//   stride 2   0<--2   4<--6      threads 0   2
//   stride 4   0<------4          thread  0
struct DoublingStrides {
  template <class F, class A>
  __device__ static void Fold(A* cells, unsigned count) {
    const unsigned mine = 2 * threadIdx.x;
    for (unsigned stride = 1; stride < count; stride *= 2) {
      if (threadIdx.x % stride == 0 && mine + stride < count)
        cells[mine] = F::Combine(cells[mine], cells[mine + stride]);
      __syncthreads();  // the level has been written, and its cells have been read
    }
  }
};
// With halving strides, thread t works on cell t, so the active threads are adjacent, and so are
// their cells. A level writes the lower half of the live cells and reads the upper half. An odd
// cell waits for the next level.
//
//   live 8     0<------4  1<------5  2<------6  3<------7    threads 0 1 2 3
//   live 4     0<--2  1<--3                                  threads 0 1
//   live 2     0<1                                           thread  0
struct HalvingStrides {
  template <class F, class A>
  __device__ static void Fold(A* cells, unsigned count) {
    for (unsigned live = count; live > 1;) {
      const unsigned half = (live + 1) / 2;
      if (threadIdx.x < live - half)
        cells[threadIdx.x] = F::Combine(cells[threadIdx.x], cells[threadIdx.x + half]);
      __syncthreads();  // the upper half has been read, the lower half is written
      live = half;
    }
  }
};

// Folds one value per thread with halving strides. `cells` is shared memory for blockDim.x values.
// All threads of the block call this function and get the result.
template <class F, class A>
__device__ A FoldBlockTree(A value, A* cells) {
  cells[threadIdx.x] = value;
  __syncthreads();  // the cells of the first level are written
  HalvingStrides::Fold<F>(cells, blockDim.x);
  return cells[0];
}

// Like FoldBlockTree, but with shuffles, which need no barrier within a warp. The warps exchange
// their results through shared memory, with one barrier. Thread 0 gets the result. REQUIRES: a
// barrier between two calls in a kernel.
template <class F, class A>
__device__ A FoldBlockShuffle(A value) {
  __shared__ A warp_values[kWarpSize];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int threads = static_cast<int>(blockDim.x);
  value = FoldWarp<F>(value, min(kWarpSize, threads - warp * kWarpSize));
  if (lane == 0) warp_values[warp] = value;
  __syncthreads();  // every warp's value is in its slot
  const int warps = (threads + kWarpSize - 1) / kWarpSize;
  // The first warp has at least as many lanes as the block has warps.
  if (threadIdx.x < static_cast<unsigned>(warps)) value = FoldWarp<F>(warp_values[lane], warps);
  return value;
}

// The number of folds that a value goes through in FoldBlockShuffle.
inline int ShuffleDepth(std::uint32_t block_size) {
  return CeilLog2(kWarpSize) + CeilLog2(CeilDiv(block_size, kWarpSize));
}

// --- Device: all blocks ---

// Adds x to *cell. The order of the additions differs from run to run. Integers wrap.
__device__ inline void AtomicAdd(double* cell, double x) { atomicAdd(cell, x); }
__device__ inline void AtomicAdd(std::int64_t* cell, std::int64_t x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(cell), static_cast<unsigned long long>(x));
}
__device__ inline void AtomicAdd(WideSquares<double>* cell, const WideSquares<double>& x) {
  atomicAdd(&cell->middle, x.middle);
  atomicAdd(&cell->large, x.large);
  atomicAdd(&cell->small, x.small);
}
// Adds in two steps, between which other threads may add. Every addition that makes the lower word
// wrap carries into the upper one, so both words are correct once all additions are done.
__device__ inline void AtomicAdd(Int128* cell, Int128 x) {
  const auto before = atomicAdd(reinterpret_cast<unsigned long long*>(&cell->low),
                                static_cast<unsigned long long>(x.low));
  const bool carry = before + x.low < before;
  AtomicAdd(&cell->high, WrapAdd(x.high, std::int64_t{carry}));
}

}  // namespace tessera
