// The best elements that a block of `threshold` has seen: a sorted list in shared memory, and a
// buffer of elements that have beaten the limit since the last update of the list. The limit is the
// k-th entry of the list.
//
//     best    sorted, a power of two >= k          limit = best[k - 1], in a register
//     fresh   2 * blockDim.x places, in any order  count: places that have been requested
//
// Most elements are no better than the limit and cost a single comparison. When the buffer is full,
// it is sorted and merged with the list (bitonic.cuh), which lowers the limit. If elements are in
// random order, this is rare: the list has k of the m elements seen so far, so a buffer of the same
// size lasts for about another m elements. In a row whose elements keep getting better, every
// element beats the limit. If many threads have such elements, each of these threads first offers
// only its best one. The k-th best of the offered elements is better than nearly all other
// elements, so these are dropped without being sorted. The first limit is found in the same way.
//
// An entry's place is part of the comparison, so the order in which entries reach the buffer does
// not affect the result.
#pragma once

#include <cstdint>

#include "kernels/cuda/top_k/bitonic.cuh"
#include "kernels/cuda/top_k/top_k.cuh"

namespace tessera {

// The candidates of one block. Every function is called by all threads of the block. REQUIRES:
// blockDim.x is a multiple of 32.
template <class E>
class Candidates {
 public:
  // `entries` is shared memory for size + 2 * blockDim.x entries, where size is a power of two >=
  // k. `count` is a counter in shared memory.
  __device__ Candidates(E* entries, std::uint32_t* count, int k, int size)
      : best_(entries), fresh_(entries + size), count_(count), k_(k), size_(size) {
    for (int i = static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x))
      best_[i] = kNone;
    if (threadIdx.x == 0) *count_ = 0;
    __syncthreads();  // the list is empty
  }

  // Only entries below the limit matter. If the limit is kNone, every entry matters.
  __device__ E limit() const { return limit_; }
  __device__ bool open() const { return limit_ == kNone; }
  // Returns whether the limit has the lowest possible key, so that later entries do not matter.
  __device__ bool closed() const { return limit_ >> 32 == 0; }
  // Lowers the limit. REQUIRES: k entries are below the new limit.
  __device__ void Lower(E limit) { limit_ = limit; }

  // Offers the thread's entries at(e) for each bit e that is set in `pending`. Returns whether the
  // limit may have changed.
  template <class At>
  __device__ bool Offer(std::uint32_t pending, At at) {
    if (!open()) Retest(pending, at);
    const int threads = static_cast<int>(blockDim.x);
    bool moved = false;
    while (const int holders = __syncthreads_count(pending != 0)) {
      if (holders > threads / 4) {
        int held = Held();
        if (held > Room() - threads) {
          Merge(held);
          held = 0;
        }
        fresh_[held + static_cast<int>(threadIdx.x)] = TakeBest(pending, at);
        Merge(held + threads);
        moved = true;
        Retest(pending, at);
      }
      Push(pending, at);
      if (!__syncthreads_or(pending != 0)) break;
      Merge(Held());
      moved = true;
      Retest(pending, at);
    }
    return moved;
  }

  // Merges all entries that have been offered, and returns the list.
  __device__ const E* Sorted() {
    __syncthreads();  // the last entries of all threads are in the buffer
    const int held = Held();
    if (held > 0) Merge(held);
    return best_;
  }

 private:
  static constexpr E kNone = static_cast<E>(~E{0});

  __device__ int Room() const { return 2 * static_cast<int>(blockDim.x); }
  // Returns the number of entries in the buffer. REQUIRES: no thread calls Push between the
  // barriers before and after this call.
  __device__ int Held() const { return min(static_cast<int>(*count_), Room()); }

  // Moves entries to the buffer. Entries for which there is no space stay pending.
  template <class At>
  __device__ void Push(std::uint32_t& pending, At at) {
    if (!__any_sync(kFullMask, pending != 0)) return;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int mine = __popc(pending);
    int sum = mine;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int before = __shfl_up_sync(kFullMask, sum, offset);
      if (lane >= offset) sum += before;
    }
    int first = 0;
    if (lane == kWarpSize - 1)
      first = static_cast<int>(atomicAdd(count_, static_cast<std::uint32_t>(sum)));
    int place = __shfl_sync(kFullMask, first, kWarpSize - 1) + sum - mine;
    for (; pending != 0 && place < Room(); pending &= pending - 1)
      fresh_[place++] = at(__ffs(static_cast<int>(pending)) - 1);
  }

  // Removes and returns the best of the pending entries, or kNone if there are none.
  template <class At>
  __device__ static E TakeBest(std::uint32_t& pending, At at) {
    E best = kNone;
    std::uint32_t taken = 0;
    for (std::uint32_t left = pending; left != 0; left &= left - 1) {
      const E entry = at(__ffs(static_cast<int>(left)) - 1);
      if (entry < best) {
        best = entry;
        taken = left & (0 - left);
      }
    }
    pending ^= taken;
    return best;
  }

  // Drops entries that are not below the limit.
  template <class At>
  __device__ void Retest(std::uint32_t& pending, At at) const {
    for (std::uint32_t left = pending; left != 0; left &= left - 1) {
      if (!(at(__ffs(static_cast<int>(left)) - 1) < limit_)) pending ^= left & (0 - left);
    }
  }

  // Merges the first `held` entries of the buffer into the list, and empties the buffer.
  __device__ void Merge(int held) {
    int places = 1;
    while (places < held) places *= 2;
    for (int i = held + static_cast<int>(threadIdx.x); i < places;
         i += static_cast<int>(blockDim.x))
      fresh_[i] = kNone;
    __syncthreads();  // the buffer is complete, and all threads have read the count
    if (threadIdx.x == 0) *count_ = 0;
    SortBlock(fresh_, places);
    MergeBest(best_, size_, fresh_, places);
    const E last = best_[k_ - 1];
    if (last < limit_) limit_ = last;
  }

  E* const best_;
  E* const fresh_;
  std::uint32_t* const count_;
  const int k_;
  const int size_;
  E limit_ = kNone;
};

}  // namespace tessera
