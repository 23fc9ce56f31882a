// The states of tiles in a decoupled look-back over counts (Merrill and Garland, Single-pass
// Parallel Prefix Scan with Decoupled Look-back, 2016). A state is one word, with two bits that say
// what the other bits hold. The word arrives as a whole, so neither side needs a fence. All states
// begin as zeros.
#pragma once

#include <cstdint>

namespace tessera {

// What the lower bits of a state hold: nothing yet, the tile's own count, or the count of all tiles
// up to and including this one.
enum : unsigned { kNothing, kOwn, kAll };

template <class Count>
inline constexpr int kStateBits = 8 * static_cast<int>(sizeof(Count)) - 2;
template <class Count>
inline constexpr Count kCountMask = (Count{1} << kStateBits<Count>)-1;

template <class Count>
__device__ Count StateOf(unsigned kind, Count count) {
  return static_cast<Count>(kind) << kStateBits<Count> | count;
}
template <class Count>
__device__ unsigned KindOf(Count state) {
  return static_cast<unsigned>(state >> kStateBits<Count>);
}

__device__ inline std::uint32_t LoadState(const std::uint32_t* state) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(state) : "memory");
  return value;
}
__device__ inline std::uint64_t LoadState(const std::uint64_t* state) {
  std::uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(state) : "memory");
  return value;
}
__device__ inline void StoreState(std::uint32_t* state, std::uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(state), "r"(value) : "memory");
}
__device__ inline void StoreState(std::uint64_t* state, std::uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(state), "l"(value) : "memory");
}

}  // namespace tessera
