// Expressions as requests state them: lists of nodes, which are checked and compiled into the
// program that the strategies of Map run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/dtype.h"
#include "kernels/base/map_op.h"
#include "kernels/problem/map.h"

namespace tessera {

// One node. The last one of an expression is its value.
struct ExpressionNode {
  enum class Kind : std::uint8_t {
    kNone,
    kOperand,
    kCoordinate,
    kReal,
    kInteger,
    kBoolean,
    kOperation
  };
  Kind kind = Kind::kNone;
  std::uint32_t operand = 0;
  std::int32_t axis = 0;  // of a coordinate
  double real = 0;
  std::int64_t integer = 0;
  bool boolean = false;
  MapOp op{};
  // For an operation: indices of earlier nodes.
  absl::InlinedVector<std::uint32_t, kMostArguments> args;
  // For a constant: its type, or nullopt for the type of the other arguments. For CAST: the
  // result's type.
  std::optional<DType> dtype;
};

// Compiles the expression over operands of these types into a program. Returns INVALID_ARGUMENT /
// BAD_EXPRESSION if the expression is invalid; metadata "node" is the index of the invalid node, if
// a single node is invalid. `cast` is the type to which the result is cast, if any.
absl::StatusOr<MapProgram> CompileExpression(absl::Span<const ExpressionNode> nodes,
                                             absl::Span<const DType> operands,
                                             std::optional<DType> cast = std::nullopt);

// An expression, and the program that it was compiled to. Because the program is kept, the
// expression is compiled only once for both the check and the run of an operation. Only one thread
// at a time may use it.
class Expression {
 public:
  Expression() = default;
  // A list of nodes is an expression. NOLINTBEGIN(google-explicit-constructor)
  Expression(std::vector<ExpressionNode> nodes) : nodes_(std::move(nodes)) {}
  Expression(absl::Span<const ExpressionNode> nodes) : nodes_(nodes.begin(), nodes.end()) {}
  Expression(std::initializer_list<ExpressionNode> nodes) : nodes_(nodes) {}
  // NOLINTEND(google-explicit-constructor)

  absl::Span<const ExpressionNode> nodes() const { return nodes_; }
  // Compiles the nodes as CompileExpression does. The program lives until the expression is
  // destroyed or is compiled for operands of other types.
  absl::StatusOr<const MapProgram*> Compile(absl::Span<const DType> operands,
                                            std::optional<DType> cast = std::nullopt) const;

 private:
  std::vector<ExpressionNode> nodes_;
  // The programs without a cast and with one.
  mutable std::array<std::unique_ptr<const MapProgram>, 2> compiled_;
};

// Returns the common type of two arguments, as in NumPy: the larger of two types of the same kind;
// F32 for F16 and BF16; F64 for an integer and any floating-point type; the number's type for BOOL
// and a number; the wider type for U8 or I8 and a wider number; I32 for U8 and I8.
DType Promote(DType a, DType b);

}  // namespace tessera
