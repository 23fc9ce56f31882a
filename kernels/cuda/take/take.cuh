// Code that the strategies of Take share: indices, and the report of the first bad one.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/problem/take.h"

namespace tessera {

// The indices of a problem. *mark is 0, or ~position for the first position that has been marked.
// The mark is in device memory, because atomics on host memory are slow.
template <class I>
struct TakeIndexes {
  const I* indices;
  std::int64_t length;
  TakeMode mode;
  unsigned long long* mark;  // null unless the mode is kError

  __device__ I Load(std::int64_t position) const { return __ldg(indices + position); }

  // Returns the index in [0, length) that the loaded index stands for. If that is out of range,
  // returns -1 and, if `marks` is set, marks the position. If many indices are bad, the load before
  // the atomic spares most threads the atomic.
  __device__ std::int64_t Resolve(I loaded, std::int64_t position, bool marks) const {
    const std::int64_t index = ResolveIndex(loaded, length, mode);
    if (index < 0 && marks) {
      const auto value = ~static_cast<unsigned long long>(position);
      if (*static_cast<volatile unsigned long long*>(mark) < value) atomicMax(mark, value);
    }
    return index;
  }
};

// If no position has been marked, the result is ~0 = -1.
template <class I>
__global__ void StoreFirstBad(TakeIndexes<I> indexes, Scalar* result) {
  result->index = static_cast<std::int64_t>(~*indexes.mark);
}

// Calls launch(indexes), which enqueues kernels that resolve every index, and in mode kError lets
// the device write the position of the first bad index to the problem's result.
template <class I, class Launch>
void LaunchWithIndexes(const TakeProblem& p, CudaStream& stream, Launch launch) {
  TakeIndexes<I> indexes = {static_cast<const I*>(p.indices), p.length, p.mode, nullptr};
  const bool checks = p.mode == TakeMode::kError;
  if (checks) {
    void* const mark = stream.Scratch(sizeof *indexes.mark);
    stream.Zero(mark, sizeof *indexes.mark);
    indexes.mark = static_cast<unsigned long long*>(mark);
  }
  launch(indexes);
  if (!checks) return;
  StoreFirstBad<<<1, 1, 0, stream.handle()>>>(indexes, p.result);
  CUDA_CHECK_LAUNCH(StoreFirstBad);
}

inline Cost CudaTakeCost(const TakeProblem& p) {
  constexpr std::int64_t kSector = 32;
  return TakeCost(p, kSector, /*depth=*/2);
}

}  // namespace tessera
