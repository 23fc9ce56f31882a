// Code that the strategies of Histogram share: a walk over the elements, and the launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/loads.cuh"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/same_bits/bins.h"

namespace tessera {

using Counter = unsigned long long;

inline constexpr int kHistogramThreads = 512;
// The grid nearly fills an H200, which can hold 270336 threads.
inline constexpr std::int64_t kHistogramBlocks = kFixedGrid * 256 / kHistogramThreads;

// Calls add(bin, count) for every run of elements in the same bin. The threads of the grid share
// the elements in vectors of 16 bytes, several of which are in flight. The first threads also
// process the elements before the first aligned vector and after the last one. A thread's run ends
// when its next element is in another bin, so if all elements are in one bin, every thread adds
// once.
template <class E, class Bins, class Add>
__device__ void CountRuns(const E* x, std::int64_t n, Bins& bins, const Add& add) {
  constexpr int kWide = kVector<E>, kLoads = sizeof(E) == 1 ? 2 : 4;
  bins.Begin();
  std::int32_t last = kNoBin;
  unsigned run = 0;
  const auto count = [&](E element) {
    const std::int32_t bin = bins(element);
    if (bin != last) {
      if (last >= 0) add(last, run);
      last = bin;
      run = 0;
    }
    ++run;
  };
  const auto misaligned =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(x) % kVectorBytes / sizeof(E));
  const std::int64_t head = min(n, misaligned == 0 ? std::int64_t{0} : kWide - misaligned);
  const std::int64_t vectors = (n - head) / kWide, tail = head + vectors * kWide;
  const std::int64_t own = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t first = own; first < vectors; first += kLoads * step) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      if (first + j * step < vectors)
        loaded[j] = LoadAligned<Load::kOnce>(x + head + (first + j * step) * kWide);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (first + j * step >= vectors) break;
#pragma unroll
      for (int v = 0; v < kWide; ++v) count(ElementOf<E>(loaded[j], v));
    }
  }
  if (own < head) count(x[own]);
  if (own < n - tail) count(x[tail + own]);
  if (last >= 0) add(last, run);
}

// Returns the number of blocks of a grid in which every block has at least `least` elements. No
// block has so many elements that a 32-bit counter could overflow.
inline unsigned HistogramGrid(const HistogramProblem& p, std::int64_t least) {
  const std::int64_t blocks = std::clamp<std::int64_t>(CeilDiv(p.n, least), 1, kHistogramBlocks);
  return static_cast<unsigned>(std::max(blocks, CeilDiv(p.n, std::int64_t{1} << 31)));
}

// Returns the maximum number of elements of a thread.
inline std::uint64_t HistogramDepth(const HistogramProblem& p, std::int64_t least) {
  return static_cast<std::uint64_t>(
      CeilDiv(p.n, std::int64_t{HistogramGrid(p, least)} * kHistogramThreads));
}

inline Counter* CountersOf(const HistogramProblem& p) {
  return reinterpret_cast<Counter*>(p.counts);
}

}  // namespace tessera
