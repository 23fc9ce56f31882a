// Sorting and merging in the shared memory of a block by networks of comparisons (Batcher, 1968).
// The choice of places to compare does not depend on their values, so all threads compare at the
// same time without communication.
//
// A sequence that rises and then falls, or a rotation of one, is bitonic. A comparison of its
// halves, place by place, leaves two bitonic halves, and no element of the first is above any of
// the second. The same is done with the halves of the halves, down to pairs, and then the sequence
// is sorted. Two sorted lists, one of them in reverse, are a bitonic sequence.
//
//     sorted  1 4 6 9 | 2 3 7 8     compare 1-8 4-7 6-3 9-2     1 4 3 2 | 9 6 7 8
//                                   then 1-3 4-2                1 2 3 4
#pragma once

#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"

namespace tessera {

// A warp compares pairs i to i + 31, where i is a multiple of 32. If these are within the 64 places
// from 2 i on, no other warp accesses the places before or after, and a barrier of the warp is
// enough. Otherwise the block needs a barrier.
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

// Sorts pieces of `size` places each, which are bitonic sequences, of n places in total. REQUIRES:
// a barrier before it, of all threads that access `size` places. It ends with a barrier of the
// warp.
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

// Sorts n places in ascending order: pairs, fours, eights, each from two sorted halves. It ends
// with a barrier of the block. REQUIRES: n is a power of two, blockDim.x is a multiple of 32, and
// there is a barrier of the block before it.
template <class E>
__device__ void SortBlock(E* entries, int n) {
  for (int size = 2; size <= n; size *= 2) {
    for (int i = static_cast<int>(threadIdx.x); i < n / 2; i += static_cast<int>(blockDim.x)) {
      const int low = 2 * i - (i & (size / 2 - 1));
      // The second place is as far from the end of the piece as `low` is from its beginning.
      Order(entries[low], entries[low ^ (size - 1)]);
    }
    MeetAfter(size);
    SortBitonic(entries, n, size / 2);
    if (size == n || 2 * size > kWarpPlaces) __syncthreads();  // warps take others' places next
  }
}

// Replaces best, a sorted list of `size` places, with the best of it and fresh, a sorted list of
// `count` places. It ends with a barrier of the block. REQUIRES: size is a power of two, and there
// is a barrier of the block before it.
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
