#include "kernels/problem/product_top_k.h"

#include <array>
#include <cstring>

namespace tessera {
namespace {

// What is known about a register's value, as a possible part of a score.
struct Value {
  enum class Kind : std::uint8_t { kOther, kConstant, kVector, kScore };
  Kind kind = Kind::kOther;
  bool rounded = true;  // to the type of the scores
  float constant = 0;
  int operand = -1;
  // For kScore: the operations of the score that have been found.
  Score score;
  bool scaled = false, multiplied = false;
};

// The three operations of a score have a fixed order. -1 * x equals -x and a - b equals a + -b
// exactly, even after rounding.
Value Multiply(const Value& a, const Value& b) {
  if (b.kind == Value::Kind::kConstant && a.kind == Value::Kind::kScore) return Multiply(b, a);
  if (a.kind != Value::Kind::kConstant || b.kind != Value::Kind::kScore || b.multiplied) return {};
  Value result = b;
  if (b.score.vector < 0 && !b.scaled) {
    result.score.scale = a.constant;
    result.scaled = true;
  } else {
    result.score.outer = a.constant;
    result.multiplied = true;
  }
  return result;
}

Value Combine(const Value& a, const Value& b, bool subtract) {
  const bool score_first = a.kind == Value::Kind::kScore;
  const Value& score = score_first ? a : b;
  const Value& vector = score_first ? b : a;
  if (score.kind != Value::Kind::kScore || vector.kind != Value::Kind::kVector ||
      score.score.vector >= 0 || score.multiplied)
    return {};
  Value result = score;
  result.score.vector = vector.operand;
  if (subtract && score_first) result.score.negated = true;
  if (subtract && !score_first) result.score.scale = -result.score.scale;
  return result;
}

}  // namespace

std::optional<Score> FindScore(const MapProgram& program, int product) {
  const DType dtype = program.dtype;
  if (ValueTypeOf(dtype) != ValueType::kF32 ||
      program.operand_dtypes[static_cast<std::size_t>(product)] != dtype)
    return std::nullopt;
  const bool rounds = !IsStoredAsValue(dtype);
  std::array<Value, kMostRegisters> values{};
  Value last;
  for (const Instruction& in : program) {
    Value value;
    switch (in.kind) {
      case Instruction::Kind::kLoad:
        if (program.operand_dtypes[in.a] != dtype) break;
        value.kind = in.a == product ? Value::Kind::kScore : Value::Kind::kVector;
        value.operand = in.a;
        break;
      case Instruction::Kind::kCoordinate:
        break;
      case Instruction::Kind::kConstant:
        if (in.type != ValueType::kF32) break;
        value.kind = Value::Kind::kConstant;
        std::memcpy(&value.constant, &program.constants[in.a].bits, sizeof value.constant);
        break;
      case Instruction::Kind::kConvert:
        if (in.type != ValueType::kF32 || in.dtype != dtype) break;
        value = values[in.a];
        value.rounded = true;
        break;
      case Instruction::Kind::kApply:
        if (in.type != ValueType::kF32 || !values[in.a].rounded || !values[in.b].rounded) break;
        if (in.op == MapOp::kMultiply) value = Multiply(values[in.a], values[in.b]);
        if (in.op == MapOp::kAdd || in.op == MapOp::kSubtract)
          value = Combine(values[in.a], values[in.b], in.op == MapOp::kSubtract);
        value.rounded = !rounds;
        break;
    }
    values[in.out] = last = value;
  }
  if (last.kind != Value::Kind::kScore || !last.rounded) return std::nullopt;
  return last.score;
}

}  // namespace tessera
