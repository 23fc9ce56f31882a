// Functions for the tensor core instructions of compute capability 8.0: mma.sync and ldmatrix,
// which all lanes of a warp execute together (PTX ISA, "Matrix Fragments").
//
// Lane 4 g + t, for g < 8 and t < 4, holds these elements of the operands of one instruction:
//
//     16 bits, 16 x 16 times 16 x 8                  f64, 16 x 8 times 8 x 8
//     a: rows g and g + 8, columns 2 t, 2 t + 1,     a: rows g and g + 8, columns t and t + 4
//        2 t + 8 and 2 t + 9
//     b: rows numbered like a's columns, column g    b: rows t and t + 4, column g
//     c: rows g and g + 8, columns 2 t, 2 t + 1      c: the same
//
// For older GPUs, the file only has to compile, because the strategies that use it require compute
// capability 8.0.
#pragma once

#include <type_traits>

#include "kernels/base/element.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Loads four 8 x 8 matrices of 16-bit elements from shared memory. Lane 8 j + r passes the address
// of row r of matrix j, which is aligned to 16 bytes. Every lane gets two adjacent elements of row
// g of each matrix, or of column g if kTranspose.
template <bool kTranspose>
__device__ void LoadMatrices(unsigned row, unsigned (&pairs)[4]) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(row)
                 : "memory");
  }
#endif
}
template <bool kTranspose>
__device__ void LoadMatrices(const void* row, unsigned (&pairs)[4]) {
  LoadMatrices<kTranspose>(static_cast<unsigned>(__cvta_generic_to_shared(row)), pairs);
}

// Computes c += a b with sums in f32. T: Half or BFloat16.
template <class T>
__device__ void MultiplyHalves(const unsigned (&a)[4], unsigned b0, unsigned b1, float (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, Half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// Computes c += a b. `a` has the elements [g, t], [g + 8, t], [g, t + 4] and [g + 8, t + 4].
// Compute capability 8 only has an instruction for a quarter of this product.
__device__ inline void MultiplyDoubles(const double (&a)[4], double b0, double b1, double (&c)[4]) {
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
#elif __CUDA_ARCH__ >= 800
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(c[2 * half]), "+d"(c[2 * half + 1])
        : "d"(a[half]), "d"(b0));
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(c[2 * half]), "+d"(c[2 * half + 1])
        : "d"(a[half + 2]), "d"(b1));
  }
#endif
}

}  // namespace tessera
