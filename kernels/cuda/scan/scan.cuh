// Code that the strategies of Scan share: lines, scans within a warp, and the state of a chunk.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/same_bits/fixed_scan.h"

namespace tessera {

// Calls shuffle(word) for each word of a value, because registers are 32 bits wide.
template <class A, class Shuffle>
__device__ A ShuffleWords(A value, Shuffle shuffle) {
  static_assert(std::is_trivially_copyable_v<A> && sizeof(A) % sizeof(unsigned) == 0);
  unsigned words[sizeof(A) / sizeof(unsigned)];
  std::memcpy(words, &value, sizeof value);
#pragma unroll
  for (unsigned& word : words) word = shuffle(word);
  std::memcpy(&value, words, sizeof value);
  return value;
}
// These return the value of the lane that is `distance` lanes lower, or of lane `from`. REQUIRES:
// all lanes of the warp call them.
template <class A>
__device__ A ShuffleUp(A value, int distance, int width = kWarpSize) {
  return ShuffleWords(
      value, [&](unsigned word) { return __shfl_up_sync(kFullMask, word, distance, width); });
}
template <class A>
__device__ A ShuffleFrom(A value, int from) {
  return ShuffleWords(value, [&](unsigned word) { return __shfl_sync(kFullMask, word, from); });
}

// Kogge and Stone's scan over `width` adjacent lanes, where width is a power of two: in each of its
// log2(width) steps, a lane combines the value `distance` lanes below with its own, and the
// distance doubles. Returns the fold of this lane's value and all values below it. REQUIRES: the
// whole warp calls it.
template <class F, class A>
__device__ A ScanLanes(A value, int width = kWarpSize) {
  const int lane = static_cast<int>(threadIdx.x) % width;
  for (int distance = 1; distance < width; distance *= 2) {
    const A below = ShuffleUp(value, distance, width);
    if (lane >= distance) value = F::Combine(below, value);
  }
  return value;
}

// Returns the value of the lane below, or the identity on the first lane.
template <class F, class A>
__device__ A LaneBelow(A value, int width = kWarpSize) {
  const A below = ShuffleUp(value, 1, width);
  return threadIdx.x % static_cast<unsigned>(width) == 0 ? F::template Identity<A>() : below;
}

// The array of a problem as lines, for strategies that read elements one by one.
template <class F>
struct ScanLines {
  using T = typename F::Element;
  using Out = typename F::Out;

  explicit ScanLines(const ScanProblem& p)
      : x(static_cast<const T*>(p.x)),
        out(static_cast<Out*>(p.out)),
        lines(p.outer * p.inner),
        length(p.length),
        inner(p.inner),
        exclusive(p.exclusive),
        reverse(p.reverse) {}

  // Returns the index of the element at position i of a line.
  __device__ std::int64_t At(std::int64_t line, std::int64_t i) const {
    return (line / inner * length + (reverse ? length - 1 - i : i)) * inner + line % inner;
  }
  __device__ typename F::Wide Load(std::int64_t line, std::int64_t i) const {
    return i < length ? F::Widen(F::Load(x[At(line, i)], i))
                      : F::template Identity<typename F::Wide>();
  }
  __device__ void Store(std::int64_t line, std::int64_t i, typename F::Wide value) const {
    if (i < length) out[At(line, i)] = F::FinishAxis(value, 1);
  }

  const T* x;
  Out* out;
  std::int64_t lines, length, inner;
  bool exclusive, reverse;
};

// --- Lessons ---

// The types of the strategies that teach Scan. They read elements one by one, so 16-bit types would
// only be slower.
inline constexpr DTypes kLessonDTypes =
    DTypesOf(DType::kF32, DType::kF64, DType::kI32, DType::kI64);

// Calls f(std::type_identity<Fold<op, T>>{}) for an operation on one of these types.
template <class F>
void DispatchLesson(const ScanProblem& p, F&& f) {
  DispatchScan(p.op, p.dtype, [&]<class Chosen>(std::type_identity<Chosen> fold) {
    if constexpr (sizeof(typename Chosen::Element) > 2) f(fold);
  });
}

// Scans one value per thread of a block: within the warps, and then over the warps' totals. Returns
// the fold of the threads before this one. *total is the fold of all threads. REQUIRES: a barrier
// between two calls in a kernel.
template <class F>
__device__ typename F::Wide ScanBlock(typename F::Wide value, typename F::Wide* total) {
  using Wide = typename F::Wide;
  __shared__ Wide warps[kWarpSize];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const Wide folded = ScanLanes<F>(value);
  const Wide below = LaneBelow<F>(folded);
  if (lane == kWarpSize - 1) warps[warp] = folded;
  __syncthreads();  // every warp's total is in its slot
  auto before = F::template Identity<Wide>();
  *total = before;
  for (int i = 0; i < static_cast<int>(blockDim.x) / kWarpSize; ++i) {
    if (i == warp) before = *total;
    *total = F::Combine(*total, warps[i]);
  }
  return F::Combine(before, below);
}

// For strategies with one or more blocks per line: requires that the grid is not too large.
inline std::string RefusesBlocks(double blocks) {
  constexpr double kMostBlocks = std::numeric_limits<std::int32_t>::max();
  return blocks <= kMostBlocks ? "" : "fewer than 2^31 blocks";
}
inline std::string RefusesLines(const ScanProblem& p) {
  return RefusesBlocks(static_cast<double>(p.outer) * static_cast<double>(p.inner));
}

// The blocks of the lessons' launches consist of whole warps.
inline constexpr LaunchLimits::Range kWholeWarps = {kWarpSize, kMostThreads};
constexpr unsigned ScanThreads(const ScanProblem& p) {
  const unsigned asked = p.launch.block_size != 0 ? p.launch.block_size : 256;
  return (asked + kWarpSize - 1) / kWarpSize * kWarpSize;
}

}  // namespace tessera
