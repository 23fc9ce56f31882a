// Expressions as requests bring them: a list of nodes, checked and made into the program that the
// strategies of Map run.
#pragma once

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
  enum class Kind : std::uint8_t { kNone, kOperand, kReal, kInteger, kBoolean, kOperation };
  Kind kind = Kind::kNone;
  std::uint32_t operand = 0;
  double real = 0;
  std::int64_t integer = 0;
  bool boolean = false;
  MapOp op{};
  // The arguments of an operation: nodes before this one.
  absl::InlinedVector<std::uint32_t, kMostArguments> args;
  // Of a constant: its type; absent: that of the arguments beside it. Of CAST: the result's.
  std::optional<DType> dtype;
};

// The expression over operands of these types as a program. INVALID_ARGUMENT / BAD_EXPRESSION
// {node, ...}, with the index of the node at fault, as far as there is one. cast: what the result
// is cast to, if to anything.
absl::StatusOr<MapProgram> CompileExpression(absl::Span<const ExpressionNode> nodes,
                                             absl::Span<const DType> operands,
                                             std::optional<DType> cast = std::nullopt);

// An expression that is compiled once for an operation: checks and launches that follow each other
// share the program. One thread at a time.
class Expression {
 public:
  Expression() = default;
  // NOLINTBEGIN(google-explicit-constructor): a list of nodes is an expression.
  Expression(std::vector<ExpressionNode> nodes) : nodes_(std::move(nodes)) {}
  Expression(absl::Span<const ExpressionNode> nodes) : nodes_(nodes.begin(), nodes.end()) {}
  Expression(std::initializer_list<ExpressionNode> nodes) : nodes_(nodes) {}
  // NOLINTEND(google-explicit-constructor)

  absl::Span<const ExpressionNode> nodes() const { return nodes_; }
  // CompileExpression of the nodes. The program lives until the expression is compiled for other
  // operands, or ends.
  absl::StatusOr<const MapProgram*> Compile(absl::Span<const DType> operands,
                                            std::optional<DType> cast = std::nullopt) const;

 private:
  std::vector<ExpressionNode> nodes_;
  // Without a cast, and with one.
  mutable std::unique_ptr<const MapProgram> compiled_[2];
};

// The type that both become where they meet, as in NumPy: the larger of two of a kind, F32 for F16
// and BF16, F64 for an integer beside any floating-point type, any number beside BOOL and any but
// those of a byte beside U8 and I8, I32 for these two.
DType Promote(DType a, DType b);

}  // namespace tessera
