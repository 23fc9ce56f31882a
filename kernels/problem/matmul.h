// Definitions that the Matmul strategies share on every device: the pairs of operand and result
// types, the arithmetic on one element, and the cost models. Standard library only.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/base/element.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Whether a product of operands of dtype may have results of out_dtype. Floating-point results have
// the operands' type. Products of 16-bit operands may also be f32, the type in which they are
// accumulated anyway. Products of 8-bit integers are i32. Integers wrap at the result's width.
constexpr bool IsMatmulPair(DType dtype, DType out_dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kF64:
      return out_dtype == dtype;
    case DType::kF16:
    case DType::kBF16:
      return out_dtype == dtype || out_dtype == DType::kF32;
    case DType::kI32:
      return out_dtype == DType::kI32 || out_dtype == DType::kI64;
    case DType::kU8:
    case DType::kI8:
      return out_dtype == DType::kI32;
    default:
      return false;
  }
}

// The type of b.
constexpr DType TypeOfB(const MatmulProblem& p) {
  return !p.mixed ? p.dtype : p.dtype == DType::kU8 ? DType::kI8 : DType::kU8;
}

// Whether a product's operands may have these types: the same type, or two 8-bit types.
constexpr bool MayMultiply(DType a, DType b) {
  return a == b || (IsByteInteger(a) && IsByteInteger(b));
}

// The type of a product whose request names none.
constexpr DType MatmulDefaultType(DType dtype) {
  return IsByteInteger(dtype) ? DType::kI32 : dtype;
}

inline constexpr DTypes kMatmulDTypes = DTypesOf(DType::kF32, DType::kF64, DType::kF16,
                                                 DType::kBF16, DType::kI32, DType::kU8, DType::kI8);

// Calls f(T{}, O{}), where T and O are the C++ types of the operands and of the result. REQUIRES:
// IsMatmulPair, and the operands have the same type.
template <class F>
decltype(auto) DispatchMatmul(const MatmulProblem& p, F&& f) {
  switch (p.dtype) {
    case DType::kF32:
      return f(float{}, float{});
    case DType::kF64:
      return f(double{}, double{});
    case DType::kF16:
      if (p.out_dtype == DType::kF32) return f(Half{}, float{});
      return f(Half{}, Half{});
    case DType::kBF16:
      if (p.out_dtype == DType::kF32) return f(BFloat16{}, float{});
      return f(BFloat16{}, BFloat16{});
    case DType::kU8:
      return f(std::uint8_t{}, std::int32_t{});
    case DType::kI8:
      return f(std::int8_t{}, std::int32_t{});
    default:
      if (p.out_dtype == DType::kI64) return f(std::int32_t{}, std::int64_t{});
      return f(std::int32_t{}, std::int32_t{});
  }
}

// Calls f(A{}, B{}, O{}), where A and B are the C++ types of a and b. REQUIRES: IsMatmulPair.
template <class F>
decltype(auto) DispatchMixedMatmul(const MatmulProblem& p, F&& f) {
  if (!p.mixed) return DispatchMatmul(p, [&](auto t, auto o) { return f(t, t, o); });
  if (p.dtype == DType::kU8) return f(std::uint8_t{}, std::int8_t{}, std::int32_t{});
  return f(std::int8_t{}, std::uint8_t{}, std::int32_t{});
}

// The type in which an element of the result is accumulated. It is f32 for 16-bit types. For
// integers it is the result's own type, because wrapping at every step gives the same result as
// wrapping at the end.
template <class T, class O>
using MatmulAcc = std::conditional_t<std::is_integral_v<T>, O, ValueOf<T>>;

// Returns sum + a * b, fused on devices where that is free. Integers wrap.
template <class V, class A>
TESSERA_HD A MultiplyAdd(V a, V b, A sum) {
  if constexpr (std::is_integral_v<A>) {
    return WrapAdd(sum, WrapMultiply(static_cast<A>(a), static_cast<A>(b)));
  } else {
#ifdef __CUDA_ARCH__
    return fma(a, b, sum);
#else
    return a * b + sum;
#endif
  }
}

// --- Stacks ---

// The distances from a and b to the operands of one product of a stack, in elements.
struct StackOffsets {
  std::int64_t a = 0;
  std::int64_t b = 0;
};

// Returns the offsets of product i, which is from 0 to p.stack - 1. Axes of extent 1 are allowed.
TESSERA_HD inline StackOffsets ProductOffsets(const MatmulProblem& p, std::int64_t i) {
  StackOffsets at;
  for (int axis = p.stack_rank - 1; axis >= 0; --axis) {
    const StackAxis& along = p.stack_axes[axis];
    // The outermost index needs no division.
    const std::int64_t outer = axis == 0 ? 0 : i / along.extent;
    const std::int64_t index = i - outer * along.extent;
    at.a += index * along.stride_a;
    at.b += index * along.stride_b;
    i = outer;
  }
  return at;
}

// Returns product i of a stack as a problem with one product.
inline MatmulProblem ProductOf(const MatmulProblem& p, std::int64_t i) {
  const StackOffsets at = ProductOffsets(p, i);
  MatmulProblem product = p;
  product.stack = 1;
  product.stack_rank = 0;
  const auto size = static_cast<std::int64_t>(SizeOf(p.dtype));
  product.a = static_cast<const char*>(p.a) + at.a * size;
  product.b = static_cast<const char*>(p.b) + at.b * size;
  product.c =
      static_cast<char*>(p.c) + i * p.m * p.n * static_cast<std::int64_t>(SizeOf(p.out_dtype));
  return product;
}

// --- Cost models ---

// The unit roundoff of MatmulAcc.
constexpr double MatmulRoundoffUnit(DType dtype) {
  return IsInteger(dtype) ? 0 : dtype == DType::kF64 ? kRoundoffF64 : kRoundoffF32;
}

// Returns the roundoff of elements that are each computed as one chain of k fused multiply-adds.
inline double MatmulChainRoundoff(const MatmulProblem& p) {
  return static_cast<double>(p.k) * MatmulRoundoffUnit(p.dtype);
}

// Returns a bound on the error of the tensor cores' sums of k products, relative to the sum of
// magnitudes. The tensor cores add 16-bit products in groups of 4 (compute capability 7) to 16 (9).
// They align the products and the running sum to the largest of them and cut off the lower bits.
// Each term of a group, and the result, adds an error of up to 2 u times the largest term (Fasi,
// Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021). In the worst
// case, there are 6 such errors for every 4 products.
inline double TensorRoundoff(const MatmulProblem& p) {
  return 3 * (static_cast<double>(p.k) + 16) * kRoundoffF32;
}

// Returns the cost of a strategy that loads `loads` elements of its operands from memory.
constexpr Cost MatmulCost(const MatmulProblem& p, std::uint64_t loads) {
  const auto m = static_cast<std::uint64_t>(p.m), n = static_cast<std::uint64_t>(p.n);
  const auto k = static_cast<std::uint64_t>(p.k);
  return {.bytes = loads * SizeOf(p.dtype) + m * n * SizeOf(p.out_dtype),
          .flops = 2 * m * n * k,
          .atomics = 0,
          .depth = k};
}

// Returns the number of elements loaded when every rows x columns tile of c loads its rows of a and
// its columns of b.
constexpr std::uint64_t MatmulTileLoads(const MatmulProblem& p, std::int64_t rows,
                                        std::int64_t columns) {
  const auto row_tiles = static_cast<std::uint64_t>((p.m + rows - 1) / rows);
  const auto column_tiles = static_cast<std::uint64_t>((p.n + columns - 1) / columns);
  const auto k = static_cast<std::uint64_t>(p.k);
  return column_tiles * static_cast<std::uint64_t>(p.m) * k +
         row_tiles * static_cast<std::uint64_t>(p.n) * k;
}

// Returns the cost of a CPU strategy in which one core computes all multiply-adds of a block of c,
// in tiles that are `columns` wide. A tile is computed in full even if it extends beyond the edge
// of c on the right.
constexpr Cost MatmulCoreCost(const MatmulProblem& p, std::uint64_t loads, std::int64_t block_rows,
                              std::int64_t block_columns, std::int64_t columns) {
  const std::int64_t height = p.m < block_rows ? p.m : block_rows;
  const std::int64_t width = p.n < block_columns ? p.n : block_columns;
  Cost cost = MatmulCost(p, loads);
  cost.depth *= static_cast<std::uint64_t>(height) *
                static_cast<std::uint64_t>((width + columns - 1) / columns * columns);
  return cost;
}

}  // namespace tessera
