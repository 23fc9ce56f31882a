// Sorting and merging in a block's shared memory by comparison networks (Batcher, 1968). The places
// that are compared do not depend on the values, so all threads compare at the same time without
// communication.
//
// A sequence that rises and then falls, or a rotation of such a sequence, is bitonic. Comparing its
// two halves place by place leaves two bitonic halves, and no element of the first half is above
// any element of the second. Repeating this for the halves of each half, down to pairs, sorts the
// sequence. A sorted list followed by another one in reverse order is a bitonic sequence.
//
//     sorted  1 4 6 9 | 2 3 7 8     compare 1-8 4-7 6-3 9-2     1 4 3 2 | 9 6 7 8
//                                   then 1-3 4-2                1 2 3 4
#pragma once

#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"

namespace tessera {

// A warp compares pairs i to i + 31, where i is a multiple of 32. If these pairs are within the 64
// places starting at 2 i, no other warp accesses those places in the previous or the next round,
// and a warp barrier is enough. Otherwise, a block barrier is needed.
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

// Sorts n places in pieces of `size` places, each of which is a bitonic sequence. Ends with a warp
// barrier. REQUIRES: a barrier before the call, for all threads that access the same piece.
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

// Sorts n places in ascending order: first pairs, then groups of four, eight and so on, each from
// two sorted halves. Ends with a block barrier. REQUIRES: n is a power of two, blockDim.x is a
// multiple of 32, and there is a block barrier before the call.
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
    if (size == n || 2 * size > kWarpPlaces) __syncthreads();  // warps access others' places next
  }
}

// Merges `fresh`, a sorted list of `count` places, into `best`, a sorted list of `size` places.
// `best` keeps the best of both. Ends with a block barrier. REQUIRES: size is a power of two, and
// there is a block barrier before the call.
template <class E>
__device__ void MergeBest(E* best, int size, const E* fresh, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < min(size, count);
       i += static_cast<int>(blockDim.x)) {
    E& place = best[size - 1 - i];
    const E other = fresh[i];
    if (other < place) place = other;
  }
  __syncthreads();  // `best` holds the best of both as a bitonic sequence
  SortBitonic(best, size, size);
  __syncthreads();  // `best` is sorted
}

}  // namespace tessera
