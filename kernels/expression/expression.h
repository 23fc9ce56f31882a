// Expressions as requests state them: lists of nodes, which are checked and compiled into the
// program that the strategies of Map run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/dtype.h"
#include "kernels/base/map_op.h"
#include "kernels/problem/map.h"

namespace tessera {

// One node. The last one of an expression is its value.
struct ExpressionNode {
  enum class Kind : std::uint8_t { kNone, kOperand, kReal, kInteger, kBoolean, kOperation };
  Kind kind = Kind::kNone;
  std::uint32_t operand = 0;
  double real = 0;
  std::int64_t integer = 0;
  bool boolean = false;
  MapOp op{};
  // For an operation: indices of earlier nodes.
  std::vector<std::uint32_t> args;
  // For a constant: its type; if absent, that of the other arguments. For CAST: the result's type.
  std::optional<DType> dtype;
};

// Compiles the expression over operands of these types into a program. INVALID_ARGUMENT /
// BAD_EXPRESSION {node, ...}, with the index of the invalid node if there is one. cast: the type
// that the result is cast to, if any.
absl::StatusOr<MapProgram> CompileExpression(absl::Span<const ExpressionNode> nodes,
                                             absl::Span<const DType> operands,
                                             std::optional<DType> cast = std::nullopt);

// Returns the common type of two arguments, as in NumPy: the larger of two types of the same kind;
// F32 for F16 and BF16; F64 for an integer and any floating-point type; the other type for BOOL and
// a number; the other type for U8 or I8 and a wider number; I32 for U8 and I8.
DType Promote(DType a, DType b);

}  // namespace tessera
