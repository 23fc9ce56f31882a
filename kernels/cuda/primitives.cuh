// What the rows share: geometry and error bounds on the host; folds of a thread, a warp and a block
// on the device.
//
// All folds take any number of elements and any block size, combine in an order that launch and n
// alone decide, and work on accumulators of Fold<op, T> (kernels/reduce_ops.h): plain numbers or
// Indexed<T>.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/reduce_ops.h"
#include "kernels/strategy.h"

namespace tessera {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;
// For rows that let the request choose; their kernels name the maximum as their launch bound, so
// that registers suffice.
inline constexpr LaunchLimits::Range kAnyBlockSize = {kWarpSize, 1024};

// Elements that a thread folds in Fold::Acc before it moves on to Fold::Wide: long enough that the
// move costs nothing, short enough for an f32 sum to lose at most six bits on the way.
inline constexpr int kMaxChain = 64;
// Independent loads in flight a thread. 2048 threads a multiprocessor times 8 times 4 bytes are 64
// KiB, above the about 48 KiB that an H200's memory latency and bandwidth ask for.
inline constexpr int kBatch = 8;

// --- Host: geometry ---

constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Levels of a tree over n values.
constexpr int CeilLog2(std::int64_t n) {
  return n <= 1 ? 0 : std::bit_width(static_cast<std::uint64_t>(n - 1));
}

// A grid of threads that share n elements, thread t taking t, t + threads, t + 2 threads, ...
struct Grid {
  std::uint32_t block_size;
  std::uint32_t blocks;
  std::int64_t per_thread;  // elements of the busiest thread
};

// The knobs of launch, with defaults where they are 0. A fixed grid_size decides how many elements
// a thread gets; otherwise items_per_thread decides how large the grid is. At least one block,
// whatever n is.
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

// Calls f with a value of the floating-point type that dtype names. REQUIRES: dtype is F32 or F64.
template <class F>
void DispatchReal(DType dtype, F&& f) {
  if (dtype == DType::kF32) {
    f(float{});
  } else {
    f(double{});
  }
}

// --- Host: error bounds ---

constexpr double UnitRoundoff(DType dtype) {
  return dtype == DType::kF32 ? kRoundoffF32 : kRoundoffF64;
}

// The bound of two stages, one after the other: (1 + first) (1 + second) - 1.
constexpr double Then(double first, double second) { return first + second + first * second; }

// A sum of which every term passes at most `steps` roundings is within steps * u of the exact one,
// without terms of higher order (Jeannerod and Rump, "Improved error bounds for inner products in
// floating-point arithmetic", 2013). Here: narrow_steps in Fold::Acc, then wide_steps in
// Fold::Wide, for a reduction of n elements.
inline double ReduceRoundoff(ReduceOp op, DType dtype, std::int64_t n, std::int64_t narrow_steps,
                             std::int64_t wide_steps) {
  switch (op) {
    case ReduceOp::kMin:
    case ReduceOp::kMax:
    case ReduceOp::kArgMin:
    case ReduceOp::kArgMax:
      return 0;
    case ReduceOp::kProduct:
      // Every multiplication of the tree enters the relative error, not only those on one path.
      return std::expm1(static_cast<double>(n) * kRoundoffF64);
    case ReduceOp::kNormL2:
    case ReduceOp::kSumSquares:
      // In double from the start. The square, and a root at the end, round once each.
      return static_cast<double>(narrow_steps + wide_steps + 2) * kRoundoffF64;
    case ReduceOp::kSum:
    case ReduceOp::kMean:
    case ReduceOp::kNormL1:
      break;
  }
  // The division of a mean rounds once more.
  return Then(static_cast<double>(narrow_steps) * UnitRoundoff(dtype),
              static_cast<double>(wide_steps + 1) * kRoundoffF64);
}

// --- Device: one thread ---

// An accumulator of either kind as Fold::Wide.
template <class F, class A>
__device__ typename F::Wide Widened(A a) {
  if constexpr (std::is_same_v<A, typename F::Wide>) {
    return a;
  } else {
    return F::Widen(a);
  }
}

// The fold of load(i) for i = first, first + step, ... below end. load returns Fold::Acc, in which
// chains of kMaxChain values are folded, or Fold::Wide.
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
        // All loads before the first use, so that they are in flight together.
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

// The thread's position in the grid, and the number of threads in it.
__device__ inline std::int64_t GridThread() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ inline std::int64_t GridThreads() { return std::int64_t{gridDim.x} * blockDim.x; }

// --- Device: one warp ---

template <class T>
__device__ T ShuffleDown(unsigned mask, T value, int offset) {
  return __shfl_down_sync(mask, value, offset);
}

template <class T>
__device__ Indexed<T> ShuffleDown(unsigned mask, Indexed<T> a, int offset) {
  return {ShuffleDown(mask, a.value, offset), ShuffleDown(mask, a.index, offset)};
}

// Folds the values of lanes 0 to lanes - 1, which all call it and nobody else in the warp; the
// result is lane 0's. A lane that reads beyond the last one would read nothing defined, hence the
// guard.
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

// Dynamic shared memory as an array of T.
template <class T>
__device__ T* DynamicShared() {
  extern __shared__ __align__(16) unsigned char tessera_dynamic_shared[];
  return reinterpret_cast<T*>(tessera_dynamic_shared);
}

// Folds one value a thread by a tree in cells, shared memory of blockDim.x values; the result is
// thread 0's. Every thread of the block calls it. Strides are halved, rounded up, so that any block
// size works: with an odd number of live cells the middle one waits for the next level. Threads
// that work stay neighbours, so warps retire whole.
template <class F, class A>
__device__ A FoldBlockTree(A value, A* cells) {
  cells[threadIdx.x] = value;
  __syncthreads();  // the cells of the first level are written
  for (unsigned live = blockDim.x; live > 1;) {
    const unsigned half = (live + 1) / 2;
    if (threadIdx.x < live - half)
      cells[threadIdx.x] = F::Combine(cells[threadIdx.x], cells[threadIdx.x + half]);
    __syncthreads();  // the upper half has been read, the lower half is written
    live = half;
  }
  return cells[0];
}

// The same by shuffles: no barrier inside a warp, and one between the warps, whose results meet in
// shared memory. Once in a kernel, or with a barrier between two calls.
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

// Steps that one value passes in FoldBlockShuffle.
inline int ShuffleDepth(std::uint32_t block_size) {
  return CeilLog2(kWarpSize) + CeilLog2(CeilDiv(block_size, kWarpSize));
}

}  // namespace tessera
