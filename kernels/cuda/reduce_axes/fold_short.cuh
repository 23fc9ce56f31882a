// The kernel for groups (the elements for one value of outer) of a few bytes.
//
// Invariant: one thread folds each output, in the order of its elements, from a run of memory that
// its block has copied as a whole.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/reduce_axes/fold_axis.cuh"

namespace tessera::axes {

// Groups of at most this many bytes are folded by FoldShort.
// It is 16 times as fast as FoldAxis for groups of a single f16, and 0.9 times as fast for
// unaligned rows of 16 f32 (NVIDIA H200, 2026-11-28).
inline constexpr std::int64_t kShortBytes = 64;
// The number of vectors in the run of a block: four per thread, 16 KiB in total. The shared memory
// of an SM has space for eight runs.
inline constexpr int kRunVectors = 4 * kBlock;

// Returns the size in bytes of a group (the elements for one value of outer).
inline std::int64_t GroupBytes(const ReduceAxesProblem& p) {
  return p.length * std::max(p.inner, p.inner_of_all) * static_cast<std::int64_t>(SizeOf(p.dtype));
}
inline bool IsShort(const ReduceAxesProblem& p) {
  return p.length > 0 && GroupBytes(p) <= kShortBytes;
}

// Returns the number of groups in the run of a block. It is a multiple of the block's threads, so
// all threads have the same number of groups and every run begins at the same position within a
// vector.
inline std::int64_t GroupsOfRun(const ReduceAxesProblem& p) {
  return (kRunVectors * kVectorBytes / GroupBytes(p)) & -std::int64_t{kBlock};
}

// Copies the vectors of a run, which begins at an aligned address, to shared memory. Elements
// outside [x, end) become 0. All loads are in flight before the first store.
template <class T>
__device__ __forceinline__ void CopyRun(const T* aligned, int vectors, const T* x, const T* end,
                                        uint4* run) {
  constexpr int kWide = kVector<T>;
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
  // The copy begins at an aligned address, less than a vector before the run's first element.
  const T* const begin = x + first * group;
  const auto before =
      static_cast<int>(reinterpret_cast<std::uintptr_t>(begin) % kVectorBytes / sizeof(T));
  const int vectors = (before + groups * group + kWide - 1) / kWide;
  CopyRun(begin - before, vectors, x, x + (outer * group - pitch + inner), run);

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

}  // namespace tessera::axes
