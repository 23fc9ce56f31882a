// Code that is compiled twice: for every processor of the architecture, and for those with AVX2 and
// a fused multiply-add. Without contraction of a * b + c, both versions compute the same bits.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
// Compiles a function and everything that it calls for processors with AVX2 and FMA.
#define TESSERA_WIDE __attribute__((target("avx2,fma"), flatten))
#else
#define TESSERA_WIDE
#endif

namespace tessera {

// Whether this processor can run functions that are marked with TESSERA_WIDE.
inline bool IsWide() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return wide;
#else
  return true;
#endif
}

}  // namespace tessera
