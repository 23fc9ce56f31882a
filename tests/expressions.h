// Expressions for the Map tests: handwritten ones and random ones.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/expression/expression.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {

using Nodes = std::vector<ExpressionNode>;

inline ExpressionNode In(std::uint32_t operand) {
  return {.kind = ExpressionNode::Kind::kOperand, .operand = operand};
}
inline ExpressionNode Axis(std::int32_t axis) {
  return {.kind = ExpressionNode::Kind::kCoordinate, .axis = axis};
}
inline ExpressionNode Real(double value, std::optional<DType> dtype = std::nullopt) {
  return {.kind = ExpressionNode::Kind::kReal, .real = value, .dtype = dtype};
}
inline ExpressionNode Op(MapOp op, const std::vector<std::uint32_t>& args,
                         std::optional<DType> dtype = std::nullopt) {
  return {.kind = ExpressionNode::Kind::kOperation,
          .op = op,
          .args = {args.begin(), args.end()},
          .dtype = dtype};
}

inline std::uint32_t Below(Random& random, std::size_t n) {
  return static_cast<std::uint32_t>(random.Bits() % n);
}
inline DType AnyDType(Random& random) { return kArrayDTypes[Below(random, kArrayDTypes.size())]; }

// A random expression that compiles, over all of its operands, whose types are random as well.
struct DrawnExpression {
  std::vector<DType> dtypes;
  Nodes nodes;
  MapProgram program;
};
inline DrawnExpression AnyExpression(Random& random) {
  for (;;) {
    DrawnExpression e;
    const std::uint32_t operands = 1 + Below(random, 4), steps = 1 + Below(random, 8);
    for (std::uint32_t i = 0; i < operands; ++i) {
      e.dtypes.push_back(AnyDType(random));
      e.nodes.push_back(In(i));
    }
    for (std::uint32_t i = 0; i < steps; ++i) {
      if (Below(random, 9) == 0) e.nodes.push_back(Axis(-1));
      if (Below(random, 5) == 0) e.nodes.push_back(Real(0.25 * (1 + Below(random, 9))));
      const MapOpInfo& info = kMapOpInfos[Below(random, kMapOpInfos.size())];
      std::vector<std::uint32_t> args;
      for (int j = 0; j < info.arguments; ++j)
        args.push_back(Below(random, 2) == 0 ? static_cast<std::uint32_t>(e.nodes.size() - 1)
                                             : Below(random, e.nodes.size()));
      const bool casts = info.op == MapOp::kCast;
      e.nodes.push_back(Op(info.op, args, casts ? std::optional(AnyDType(random)) : std::nullopt));
    }
    absl::StatusOr<MapProgram> program = CompileExpression(e.nodes, e.dtypes);
    if (!program.ok()) continue;
    e.program = *std::move(program);
    return e;
  }
}

}  // namespace tessera::test
