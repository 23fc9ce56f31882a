// How a kernel runs the instructions of an expression. Several strategies of Map share this code.
// All threads of a launch run the same instruction, so decoding it never diverges.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/expression/map_math.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// The axes of a problem and the strides of its operands. Adjacent axes that every operand can
// traverse with a single stride are merged, and axes of extent 1 are dropped.
struct MapLayout {
  int rank = 0;
  std::int64_t extents[kMaxRank]{};
  struct Operand {
    const void* data;
    bool whole;  // element i has offset i
    std::int64_t strides[kMaxRank];
  } operands[kMostOperands]{};
};

inline MapLayout LayoutOf(const MapProblem& p) {
  MapLayout layout;
  const int operands = p.program->operands;
  const auto stride = [&](int operand, int axis) {
    return p.operands[static_cast<std::size_t>(operand)].strides[static_cast<std::size_t>(axis)];
  };
  const Shape& shape = p.operands[0].shape;
  for (int axis = 0; axis < shape.rank; ++axis) {
    if (shape[axis] == 1) continue;
    bool joins = layout.rank > 0;
    for (int i = 0; i < operands && joins; ++i)
      joins = layout.operands[i].strides[layout.rank - 1] == shape[axis] * stride(i, axis);
    if (!joins) layout.extents[layout.rank++] = 1;
    layout.extents[layout.rank - 1] *= shape[axis];
    for (int i = 0; i < operands; ++i)
      layout.operands[i].strides[layout.rank - 1] = stride(i, axis);
  }
  for (int i = 0; i < operands; ++i) {
    const View& view = p.operands[static_cast<std::size_t>(i)];
    layout.operands[i].data = view.data;
    layout.operands[i].whole = view.contiguous();
  }
  return layout;
}

// Returns the offset of element i of an operand. Divides in 32 bits where possible, at a quarter of
// the cost of a 64-bit division.
__device__ inline std::int64_t OffsetOf(const MapLayout& layout, const MapLayout::Operand& operand,
                                        std::int64_t i) {
  if (operand.whole) return i;
  std::int64_t offset = 0;
#pragma unroll 1
  for (int axis = layout.rank - 1; axis >= 0; --axis) {
    const std::int64_t extent = layout.extents[axis];
    const bool narrow = ((i | extent) >> 32) == 0;
    const std::int64_t quotient =
        narrow ? static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(extent) : i / extent;
    offset += (i - quotient * extent) * operand.strides[axis];
    i = quotient;
  }
  return offset;
}

// Call f(T{}), where T is the C++ type of `type` or `dtype`, unless T exceeds kBytes bytes.
template <int kBytes, class F>
__device__ void DispatchFitting(ValueType type, F f) {
  DispatchValue(type, [&](auto t) {
    if constexpr (sizeof(t) <= kBytes) f(t);
  });
}
template <int kBytes, class F>
__device__ void DispatchFittingElement(DType dtype, F f) {
  DispatchElement(dtype, [&](auto t) {
    if constexpr (sizeof(t) <= kBytes) f(t);
  });
}

// Runs one instruction for the kEach elements of a thread. Registers has Get<T>(register, j) and
// Set(register, j, value) for element j, and no value takes more than kBytes bytes. at(j) returns
// the element's index in the result, and inside(j) returns whether there is such an element.
template <int kEach, int kBytes, class Registers, class At, class In>
__device__ void RunInstruction(const Instruction& in, const MapLayout& layout,
                               const MapConstant* constants, Registers& r, At at, In inside) {
  switch (in.kind) {
    case Instruction::Kind::kLoad:
      DispatchFittingElement<kBytes>(in.dtype, [&](auto t) {
        using T = decltype(t);
        const MapLayout::Operand& operand = layout.operands[in.a];
        const auto* data = static_cast<const StoredOf<T>*>(operand.data);
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          if (inside(j))
            r.Set(in.out, j, static_cast<ValueOf<T>>(data[OffsetOf(layout, operand, at(j))]));
        }
      });
      break;
    case Instruction::Kind::kCoordinate:
      DispatchFitting<kBytes>(ValueType::kI64, [&](auto) {
        const MapLayout::Operand& operand = layout.operands[in.a];
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          if (inside(j))
            r.Set(in.out, j, CoordinateAt(operand.data) + OffsetOf(layout, operand, at(j)));
        }
      });
      break;
    case Instruction::Kind::kConstant:
      DispatchFitting<kBytes>(in.type, [&](auto value) {
        std::memcpy(&value, &constants[in.a].bits, sizeof value);
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (inside(j)) r.Set(in.out, j, value);
      });
      break;
    case Instruction::Kind::kConvert:
      DispatchFitting<kBytes>(in.type, [&](auto from) {
        using From = decltype(from);
        DispatchFittingElement<kBytes>(in.dtype, [&](auto to) {
          using To = decltype(to);
#pragma unroll
          for (int j = 0; j < kEach; ++j)
            if (inside(j)) r.Set(in.out, j, RoundTo<To>(r.template Get<From>(in.a, j)));
        });
      });
      break;
    case Instruction::Kind::kApply:
      DispatchFitting<kBytes>(in.type, [&](auto t) {
        using T = decltype(t);
        if (in.op == MapOp::kWhere) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) {
            if (inside(j))
              r.Set(in.out, j, r.template Get<T>(r.template Get<bool>(in.a, j) ? in.b : in.c, j));
          }
          return;
        }
        DispatchMapOp(in.op, [&](auto o) {
          constexpr MapOp kOp = decltype(o)::value;
          if constexpr (kHasMapOp<kOp, T>) {
            constexpr int kArguments = InfoOf(kOp)->arguments;
            // The code of a long function exists once, in a loop; a short function is unrolled.
            constexpr int kUnrolled = InfoOf(kOp)->flops > 8 ? 1 : kEach;
#pragma unroll kUnrolled
            for (int j = 0; j < kEach; ++j) {
              if (!inside(j)) continue;
              const T a = r.template Get<T>(in.a, j);
              const T b = kArguments > 1 ? r.template Get<T>(in.b, j) : a;
              const T c = kArguments > 2 ? r.template Get<T>(in.c, j) : a;
              r.Set(in.out, j, Apply<kOp>(a, b, c));
            }
          }
        });
      });
      break;
  }
}

}  // namespace tessera
