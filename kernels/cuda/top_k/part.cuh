// How `threshold` reads a row: a block compares the elements of its part of the row with the limit
// of its candidates directly after it has loaded them.
//
//     part      . . .|x x x x|x x x x|x x x x|. .     aligned 16-byte vectors, in tiles
//               head                          tail    single loads, after all vectors
//
// A comparison is one instruction on the value, whose sign is flipped if necessary so that the
// largest are always selected. Elements that pass are then compared as entries (key and place).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/common/loads.cuh"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/top_k/candidates.cuh"
#include "kernels/cuda/top_k/top_k.cuh"

namespace tessera {

inline constexpr int kTileVectors = 4;  // per thread

// Returns the bits to flip so that the order of elements is reversed if the smallest are requested:
// the sign of a floating-point number, or all bits of an integer. There is one mask for the even
// words of a vector and one for the odd words.
template <class T>
__device__ uint2 Flip(bool smallest) {
  if (!smallest) return {0, 0};
  if (std::is_integral_v<T>) return {~0u, ~0u};
  if (sizeof(T) == 8) return {0, 0x80000000u};
  if (sizeof(T) == 4) return {0x80000000u, 0x80000000u};
  return {0x80008000u, 0x80008000u};
}

// The part of a row that a block reads.
template <class T>
class Part {
 public:
  using E = Entry<T>;
  using Value = ValueOf<T>;

  __device__ Part(const T* x, std::uint32_t length, bool smallest)
      : x_(x), length_(length), smallest_(smallest), flip_(Flip<T>(smallest)) {}

  // Offers the part's elements. An element's place is its index in the part.
  __device__ void OfferTo(Candidates<E>& candidates) {
    constexpr std::uint32_t kWide = kVector<T>;
    const auto misaligned =
        static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(x_) % kVectorBytes / sizeof(T));
    const std::uint32_t head = min(length_, misaligned == 0 ? 0 : kWide - misaligned);
    const std::uint32_t vectors = (length_ - head) / kWide;
    const std::uint32_t tail = head + vectors * kWide;
    const T* const body = x_ + head;
    const std::uint32_t step = blockDim.x;

    uint4 next[kTileVectors] = {};
    Load(body, threadIdx.x, vectors, next);
    for (std::uint32_t first = threadIdx.x; first - threadIdx.x < vectors;
         first += kTileVectors * step) {
      uint4 now[kTileVectors];
      std::uint32_t there = 0;
#pragma unroll
      for (int j = 0; j < kTileVectors; ++j) {
        now[j] = next[j];
        if (first + j * step < vectors) there |= ((1u << kWide) - 1) << (j * kWide);
      }
      Load(body, first + kTileVectors * step, vectors, next);
      OfferTile<kTileVectors>(candidates, now, there, head + first * kWide, step * kWide);
      if (candidates.closed()) break;  // k elements have the best key (NaN for the largest)
    }
    if (head == 0 && tail == length_) return;
    // Thread 0 has the elements before the vectors, and thread 1 those after them.
    const std::uint32_t from = threadIdx.x == 0 ? 0 : tail;
    const std::uint32_t count = threadIdx.x == 0 ? head : threadIdx.x == 1 ? length_ - tail : 0;
    const uint4 rest[1] = {LoadElements(x_ + from, static_cast<int>(count), T{})};
    OfferTile<1>(candidates, rest, (1u << count) - 1, from, 0);
  }

 private:
  // Loads the vectors of the thread's tile, starting at `first`.
  __device__ static void Load(const T* body, std::uint32_t first, std::uint32_t vectors,
                              uint4 (&to)[kTileVectors]) {
#pragma unroll
    for (int j = 0; j < kTileVectors; ++j) {
      const std::uint32_t at = first + j * blockDim.x;
      if (at < vectors)
        to[j] = LoadAligned<tessera::Load::kOnce>(body + std::size_t{at} * kVector<T>);
    }
  }

  // Offers the elements e whose bits are set in `there`. Element e has place `first` + e % kWide +
  // e / kWide * stride.
  template <int kCount>
  __device__ void OfferTile(Candidates<E>& candidates, const uint4 (&vectors)[kCount],
                            std::uint32_t there, std::uint32_t first, std::uint32_t stride) {
    constexpr int kWide = kVector<T>;
    std::uint32_t pending = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      // A first test compares only values. Elements that pass it are then compared as entries. NaNs
      // pass, because they are not less than or equal to any value.
      const uint4 flipped = Flipped(vectors[j]);
      bool passes[kWide], any = false;
#pragma unroll
      for (int v = 0; v < kWide; ++v) {
        passes[v] = !(static_cast<Value>(ElementOf<T>(flipped, v)) <= worst_);
        any |= passes[v];
      }
      if (!any) continue;
#pragma unroll
      for (int v = 0; v < kWide; ++v)
        if (passes[v]) pending |= 1u << (j * kWide + v);
    }
    // Elements before the first vector are offered last but come before equal elements of the
    // vectors, so they are always compared as entries.
    if (candidates.open() || kCount == 1) pending = ~0u;
    pending &= there;
    // The pending elements are known only at run time, and registers cannot be indexed, so the
    // vectors are copied to memory.
    uint4 kept[kCount];
    if (pending != 0) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) kept[j] = vectors[j];
    }
    const auto at = [&](int e) {
      T element;
      std::memcpy(&element, reinterpret_cast<const char*>(kept) + e * sizeof(T), sizeof(T));
      return MakeEntry<T>(TopKKey(element, smallest_), first + e % kWide + e / kWide * stride);
    };
    if (candidates.Offer(pending, at) && !candidates.open()) {
      const T worst = x_[PlaceOf(candidates.limit())];
      worst_ = static_cast<Value>(ElementOf<T>(Flipped(LoadElements(&worst, 1, worst)), 0));
    }
  }

  __device__ uint4 Flipped(const uint4& vector) const {
    return {vector.x ^ flip_.x, vector.y ^ flip_.y, vector.z ^ flip_.x, vector.w ^ flip_.y};
  }

  const T* const x_;
  const std::uint32_t length_;
  const bool smallest_;
  const uint2 flip_;
  Value worst_{};  // the limit's element, flipped, once there is a limit
};

}  // namespace tessera
