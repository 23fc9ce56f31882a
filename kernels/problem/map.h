// An expression as the strategies of Map run it: typed instructions on registers, each of which
// holds one value per element. kernels/expression/expression.h creates it from a request. Uses only
// the standard library.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/base/element.h"
#include "kernels/base/map_op.h"

namespace tessera {

inline constexpr int kMostOperands = 8;
inline constexpr int kMostNodes = 64;

// The type of the values in a register. Registers hold 16-bit elements as F32 and 8-bit integers as
// I32, both rounded to the element's type.
enum class ValueType : std::uint8_t { kF32, kF64, kI32, kI64, kBool };

constexpr ValueType ValueTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return ValueType::kF64;
    case DType::kI32:
    case DType::kU8:
    case DType::kI8:
      return ValueType::kI32;
    case DType::kI64:
      return ValueType::kI64;
    case DType::kBool:
      return ValueType::kBool;
    default:
      return ValueType::kF32;
  }
}

// Whether elements have the same type in memory as in registers.
constexpr bool IsStoredAsValue(DType dtype) {
  return dtype != DType::kF16 && dtype != DType::kBF16 && !IsByteInteger(dtype);
}

// Calls f(T{}), where T is the C++ type of the values.
template <class F>
constexpr decltype(auto) DispatchValue(ValueType type, F&& f) {
  switch (type) {
    case ValueType::kF32:
      return f(float{});
    case ValueType::kF64:
      return f(double{});
    case ValueType::kI32:
      return f(std::int32_t{});
    case ValueType::kI64:
      return f(std::int64_t{});
    case ValueType::kBool:
      break;
  }
  return f(bool{});
}

// One instruction. Registers are named by their numbers.
struct Instruction {
  enum class Kind : std::uint8_t {
    kLoad,        // out = operand a
    kCoordinate,  // out = operand a, which is a coordinate
    kConstant,    // out = constant a
    kConvert,     // out = a, of `type`, rounded to the element type `dtype`
    kApply,       // out = op(a, b, c) on values of `type`; the condition of WHERE is BOOL
  };
  Kind kind = Kind::kLoad;
  MapOp op{};
  ValueType type{};
  DType dtype{};
  std::uint8_t out = 0, a = 0, b = 0, c = 0;
};

// The bits of a constant as a register holds it, starting at the first byte.
struct MapConstant {
  std::uint64_t bits = 0;
};

// A node needs its own instruction, one conversion per argument and one conversion of its result.
inline constexpr int kMostInstructions = (kMostArguments + 2) * kMostNodes;
// A program needs a register for the value of each node, and for the temporaries of one node.
inline constexpr int kMostRegisters = kMostNodes + kMostArguments + 1;

// A coordinate along an axis is an operand without memory: a view of single bytes with stride 1
// along the axis and stride 0 along the others. Its value is the distance of an element's address
// from this address. Code that cuts problems into parts moves the addresses of all operands, so
// each part has the coordinates that its elements have in the whole problem.
inline const void* FirstCoordinate() {
  return reinterpret_cast<const void*>(std::uintptr_t{1});  // NOLINT: null would be missing memory
}
TESSERA_HD inline std::int64_t CoordinateAt(const void* address) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address)) - 1;
}

// The last instruction leaves the result in its register, of type ValueTypeOf(dtype).
struct MapProgram {
  DType dtype = DType::kF32;  // of the result
  int inputs = 0;             // operands in memory
  int operands = 0;           // in total: the inputs, then the coordinates
  std::array<DType, kMostOperands> operand_dtypes{};
  std::array<int, kMostOperands> axes{};  // of the coordinates, as in the request
  int instructions = 0;
  int registers = 0;
  int flops = 0;      // per element, in the cost model
  bool wide = false;  // whether any value has 64 bits
  std::array<Instruction, kMostInstructions> code{};
  std::array<MapConstant, kMostInstructions> constants{};

  const Instruction* begin() const { return code.data(); }
  const Instruction* end() const { return code.data() + instructions; }
};

}  // namespace tessera
