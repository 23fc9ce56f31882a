// 16-byte loads, the widest that a thread can issue, for operands at any address.
#pragma once

#include <cstdint>

namespace tessera {

inline constexpr int kVectorBytes = 16;

// Both kinds of loads require memory that does not change while the kernel runs. kOnce keeps the
// data out of the L1 cache.
enum class Load { kOnce, kAgain };

// Loads 16 bytes. REQUIRES: address is a multiple of 16. The assembly is volatile to keep the
// compiler from moving the load down to the first use of its value.
template <Load kLoad>
__device__ uint4 LoadAligned(const void* address) {
  uint4 v;
  if constexpr (kLoad == Load::kOnce) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
  } else {
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
  }
  return v;
}

// Returns the 16 bytes that begin at byte `shift` of the 32 bytes in lo and hi. REQUIRES: shift is
// a multiple of `size`.
template <int size>
__device__ uint4 Realigned(uint4 lo, uint4 hi, unsigned shift) {
  if constexpr (size == 8) {
    return shift == 0 ? lo : make_uint4(lo.z, lo.w, hi.x, hi.y);
  } else {
    const bool two = (shift & 8) != 0, one = (shift & 4) != 0;
    const unsigned a0 = two ? lo.z : lo.x, a1 = two ? lo.w : lo.y, a2 = two ? hi.x : lo.z,
                   a3 = two ? hi.y : lo.w, a4 = two ? hi.z : hi.x, a5 = two ? hi.w : hi.y;
    const unsigned b0 = one ? a1 : a0, b1 = one ? a2 : a1, b2 = one ? a3 : a2, b3 = one ? a4 : a3,
                   b4 = one ? a5 : a4;
    if constexpr (size == 4) return make_uint4(b0, b1, b2, b3);
    const unsigned bytes = (shift & 2) != 0 ? 0x5432 : 0x3210;
    return make_uint4(__byte_perm(b0, b1, bytes), __byte_perm(b1, b2, bytes),
                      __byte_perm(b2, b3, bytes), __byte_perm(b3, b4, bytes));
  }
}

}  // namespace tessera
