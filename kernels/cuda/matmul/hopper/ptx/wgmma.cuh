// Functions for wgmma, the instruction of Hopper's tensor cores.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/matmul/hopper/ptx/ptx.cuh"

namespace tessera {

// --- The tensor cores (wgmma) ---
//
// A warpgroup of four warps multiplies 64 x kStep by kStep x n elements in the background, with the
// operands in shared memory and the sums in its registers. In lane l of the group's warp w, the
// sums d[4 j] and d[4 j + 1] are in row 16 w + l / 4, in column 8 j + 2 (l % 4) and the next
// column. The sums d[4 j + 2] and d[4 j + 3] are in the same columns, 8 rows further down.

// Returns the descriptor of an operand in shared memory for one instruction. A row has row_bytes
// bytes (64 or 128), and its 16-byte vectors are swizzled with TMA's pattern to avoid bank
// conflicts: vector p of row r is in slot p ^ r % 8, or in slot p ^ r / 2 % 4 if rows have 64
// bytes.
//   k along the rows: a row is one index of the other dimension. `stride` is the distance in bytes
//     from 8 rows to the next 8, which is 8 row_bytes. `lead` is ignored.
//   k across the rows (16-bit elements only): a row has 64 indices of the other dimension. `stride`
//     is the distance in bytes from 8 values of k to the next 8, and `lead` is the distance from 64
//     indices to the next 64.
constexpr std::uint64_t MatrixDescriptor(int row_bytes, int lead, int stride) {
  const std::uint64_t swizzle = row_bytes == 128 ? 1 : 2;
  return swizzle << 62 | static_cast<std::uint64_t>(stride / 16) << 32 |
         static_cast<std::uint64_t>(lead / 16) << 16;
}
__device__ inline std::uint64_t MatrixAt(std::uint64_t descriptor, std::uint32_t address) {
  return descriptor | (address & 0x3ffff) >> 4;
}

// Called before the first product of a batch: orders earlier writes to the sums' registers before
// the products.
__device__ inline void ProductsFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the latest kPending batches are still running.
template <int kPending>
__device__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Called after WaitForProducts. Keeps the compiler from reading the sums before the wait.
template <int kCount>
__device__ void SumsAreComplete(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ void SumsAreComplete(std::int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
// Called after WaitForProducts. Keeps the compiler from reusing the operands' registers before the
// wait.
template <int kCount>
__device__ void OperandsAreRead(std::uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// The operands' numbers in the text of the instructions, and the registers that these stand for.
#define TESSERA_NAMES_32                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TESSERA_NAMES_64                                                             \
  TESSERA_NAMES_32                                                                   \
  ", "                                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TESSERA_NAMES_96                                                             \
  TESSERA_NAMES_64                                                                   \
  ", "                                                                               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TESSERA_NAMES_128                                                                      \
  TESSERA_NAMES_96                                                                             \
  ", "                                                                                         \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
  "%111, "                                                                                     \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
// V: "+f" or "+r", the asm constraint of the sums.
#define TESSERA_SUMS_4(V, i) V(d[i]), V(d[i + 1]), V(d[i + 2]), V(d[i + 3])
#define TESSERA_SUMS_16(V, i)                                               \
  TESSERA_SUMS_4(V, i), TESSERA_SUMS_4(V, i + 4), TESSERA_SUMS_4(V, i + 8), \
      TESSERA_SUMS_4(V, i + 12)
#define TESSERA_SUMS_32(V) TESSERA_SUMS_16(V, 0), TESSERA_SUMS_16(V, 16)
#define TESSERA_SUMS_64(V) TESSERA_SUMS_32(V), TESSERA_SUMS_16(V, 32), TESSERA_SUMS_16(V, 48)
#define TESSERA_SUMS_96(V) TESSERA_SUMS_64(V), TESSERA_SUMS_16(V, 64), TESSERA_SUMS_16(V, 80)
#define TESSERA_SUMS_128(V) TESSERA_SUMS_96(V), TESSERA_SUMS_16(V, 96), TESSERA_SUMS_16(V, 112)

// N columns take R = N / 2 registers per thread. A, B, P, X and Y are operand numbers, R to R + 4.
#define TESSERA_PRODUCT(N, R, STEP, TYPES, A, B, P, MAJORS, ...)                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                          \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #N STEP ".f32." TYPES " {" TESSERA_NAMES_##R \
               "}, %" #A ", %" #B ", p, 1, 1" MAJORS ";\n}"                                     \
               : TESSERA_SUMS_##R("+f")                                                         \
               : "l"(a), "l"(b), "r"(static_cast<int>(add))__VA_ARGS__)
#define TESSERA_PRODUCT_16(N, R, TYPES, A, B, P, X, Y)                                           \
  TESSERA_PRODUCT(N, R, "k16", TYPES, A, B, P, ", %" #X ", %" #Y, , "n"(static_cast<int>(kMnA)), \
                  "n"(static_cast<int>(kMnB)))
#define TESSERA_PRODUCT_ALL(N, R, A, B, P, X, Y)                          \
  if constexpr (std::is_same_v<T, BFloat16>) {                            \
    TESSERA_PRODUCT_16(N, R, "bf16.bf16", A, B, P, X, Y);                 \
  } else if constexpr (std::is_same_v<T, Half>) {                         \
    TESSERA_PRODUCT_16(N, R, "f16.f16", A, B, P, X, Y);                   \
  } else {                                                                \
    static_assert(!kMnA && !kMnB, "only 16-bit types can be transposed"); \
    TESSERA_PRODUCT(N, R, "k8", "tf32.tf32", A, B, P, "");                \
  }

// Computes d = a b, or d += a b if `add`, for 2 kCount columns. kMnA, kMnB: whether k goes across
// the rows of a and of b.
template <class T, bool kMnA, bool kMnB, int kCount>
__device__ void Product(float (&d)[kCount], std::uint64_t a, std::uint64_t b, bool add) {
  if constexpr (kCount == 128) {
    TESSERA_PRODUCT_ALL(256, 128, 128, 129, 130, 131, 132)
  } else if constexpr (kCount == 96) {
    TESSERA_PRODUCT_ALL(192, 96, 96, 97, 98, 99, 100)
  } else if constexpr (kCount == 64) {
    TESSERA_PRODUCT_ALL(128, 64, 64, 65, 66, 67, 68)
  } else {
    static_assert(kCount == 32);
    TESSERA_PRODUCT_ALL(64, 32, 32, 33, 34, 35, 36)
  }
}

#define TESSERA_PRODUCT_BYTES(N, R, TYPES, A, B, P)                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                        \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32." TYPES " {" TESSERA_NAMES_##R \
               "}, %" #A ", %" #B ", p;\n}"                                                   \
               : TESSERA_SUMS_##R("+r")                                                       \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define TESSERA_PRODUCT_ANY_BYTES(N, R, A, B, P)          \
  if constexpr (std::is_same_v<T, std::int8_t>) {         \
    TESSERA_PRODUCT_BYTES(N, R, "s8.s8", A, B, P);        \
  } else if constexpr (std::is_same_v<T, std::uint8_t>) { \
    TESSERA_PRODUCT_BYTES(N, R, "u8.u8", A, B, P);        \
  } else if constexpr (std::is_same_v<T, I8ByU8>) {       \
    TESSERA_PRODUCT_BYTES(N, R, "s8.u8", A, B, P);        \
  } else {                                                \
    static_assert(std::is_same_v<T, U8ByI8>);             \
    TESSERA_PRODUCT_BYTES(N, R, "u8.s8", A, B, P);        \
  }

// A byte of either operand if one of them is signed and the other is not.
struct I8ByU8 {
  std::uint8_t bits;
};
struct U8ByI8 {
  std::uint8_t bits;
};

// Like the first Product, but for bytes, signed or not. Sums wrap at 32 bits.
template <class T, bool kMnA, bool kMnB, int kCount>
__device__ void Product(std::int32_t (&d)[kCount], std::uint64_t a, std::uint64_t b, bool add) {
  static_assert(sizeof(T) == 1 && !kMnA && !kMnB, "bytes cannot be transposed");
  if constexpr (kCount == 128) {
    TESSERA_PRODUCT_ANY_BYTES(256, 128, 128, 129, 130)
  } else {
    static_assert(kCount == 64);
    TESSERA_PRODUCT_ANY_BYTES(128, 64, 64, 65, 66)
  }
}

#define TESSERA_PRODUCT_REGISTERS(N, R, A0, A1, A2, A3, B, P)                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P                                       \
               ", 0;\n"                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" TESSERA_NAMES_##R \
               "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1;\n}"           \
               : TESSERA_SUMS_##R("+f")                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))

// Like Product, but in TF32 and with 64 x 8 elements of a in registers. A thread holds two elements
// at k = l % 4, in row 16 w + l / 4 and 8 rows further down, followed by two at k = l % 4 + 4 in
// the same rows.
template <int kCount>
__device__ void ProductOfRegisters(float (&d)[kCount], const std::uint32_t* a, std::uint64_t b,
                                   bool add) {
  if constexpr (kCount == 128) {
    TESSERA_PRODUCT_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133);
  } else {
    static_assert(kCount == 64);
    TESSERA_PRODUCT_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69);
  }
}

}  // namespace tessera
