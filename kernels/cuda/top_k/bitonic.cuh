// Sorting and merging in the shared memory of a block by networks of comparisons (Batcher, 1968):
// which places are compared does not depend on what is in them, so that all threads compare at the
// same time and no thread asks another.
//
// A sequence that rises and then falls, or is such a one rotated, is bitonic. Comparing its halves
// place by place leaves two bitonic halves, of which no element of the first is above any of the
// second; halves of halves, down to pairs, and it is sorted. Two sorted lists, one of them read
// backwards, are a bitonic sequence.
//
//     sorted  1 4 6 9 | 2 3 7 8     compare 1-8 4-7 6-3 9-2     1 4 3 2 | 9 6 7 8
//                                   then 1-3 4-2                1 2 3 4
#pragma once

#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"

namespace tessera {

// A warp compares pairs i to i + 31, i a multiple of 32. Where those lie in the 64 places from 2 i
// on, nobody else is concerned, before and after, and the threads of the warp meet; else those of
// the block.
inline constexpr int kWarpPlaces = 2 * kWarpSize;

__device__ inline void MeetAfter(int places) {
  if (places <= kWarpPlaces) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

template <class E>
__device__ void Order(E& low, E& high) {
  const E a = low, b = high;
  if (b < a) {
    low = b;
    high = a;
  }
}

// Sorts pieces of `size` places each, bitonic sequences, of n places in all. Begins after a meeting
// of whoever is concerned with `size` places, and ends with one of the warp.
template <class E>
__device__ void SortBitonic(E* entries, int n, int size) {
  for (int stride = size / 2; stride > 0; stride /= 2) {
    for (int i = static_cast<int>(threadIdx.x); i < n / 2; i += static_cast<int>(blockDim.x)) {
      const int low = 2 * i - (i & (stride - 1));
      Order(entries[low], entries[low + stride]);
    }
    MeetAfter(2 * stride);
  }
}

// Sorts n places, ascending: pairs, fours, eights, each from two sorted halves. n: a power of two;
// blockDim.x: a multiple of 32. The threads of the block have met before, and meet at the end.
template <class E>
__device__ void SortBlock(E* entries, int n) {
  for (int size = 2; size <= n; size *= 2) {
    for (int i = static_cast<int>(threadIdx.x); i < n / 2; i += static_cast<int>(blockDim.x)) {
      const int low = 2 * i - (i & (size / 2 - 1));
      // As far from the end of the piece as `low` is from its beginning.
      Order(entries[low], entries[low ^ (size - 1)]);
    }
    MeetAfter(size);
    SortBitonic(entries, n, size / 2);
    if (size == n || 2 * size > kWarpPlaces) __syncthreads();  // warps take others' places next
  }
}

// best, sorted, of `size` places, becomes the best of both it and fresh, sorted, of `count` places.
// The threads of the block have met before, and meet at the end. size: a power of two.
template <class E>
__device__ void MergeBest(E* best, int size, const E* fresh, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < min(size, count);
       i += static_cast<int>(blockDim.x)) {
    E& place = best[size - 1 - i];
    const E other = fresh[i];
    if (other < place) place = other;
  }
  __syncthreads();  // the best of both, in a bitonic sequence
  SortBitonic(best, size, size);
  __syncthreads();  // it is sorted
}

}  // namespace tessera
