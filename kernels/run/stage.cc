#include "kernels/run/stage.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/expression/map_cost.h"
#include "kernels/run/axes.h"
#include "kernels/run/execute.h"

namespace tessera {

absl::StatusOr<Shape> BroadcastShape(absl::Span<const View> operands,
                                     absl::FunctionRef<std::string(std::size_t)> names) {
  Shape shape;
  for (const View& view : operands) shape.rank = std::max(shape.rank, view.shape.rank);
  for (int i = 0; i < shape.rank; ++i) shape[i] = 1;
  for (std::size_t operand = 0; operand < operands.size(); ++operand) {
    const Shape& own = operands[operand].shape;
    for (int i = 0; i < own.rank; ++i) {
      std::int64_t& extent = shape[shape.rank - own.rank + i];
      if (own[i] == extent || own[i] == 1) continue;
      if (extent != 1) {
        return Invalid(
            "BAD_SHAPE",
            absl::StrCat("operand ", names(operand), " has shape ", ToString(own),
                         ", which cannot be broadcast with ", ToString(shape)),
            {{"operand", names(operand)}, {"shape", ToString(own)}, {"others", ToString(shape)}});
      }
      extent = own[i];
    }
  }
  return shape;
}

View Broadcast(const View& view, const Shape& shape) {
  View wide{.data = view.data, .dtype = view.dtype, .shape = shape, .strides = {}};
  const auto rank = static_cast<std::size_t>(view.shape.rank);
  const std::size_t before = static_cast<std::size_t>(shape.rank) - rank;
  for (std::size_t i = 0; i < rank; ++i) {
    if (view.shape[static_cast<int>(i)] != 1) wide.strides[before + i] = view.strides[i];
  }
  return wide;
}

absl::StatusOr<const MapProgram*> CompileFor(absl::Span<const View> operands,
                                             const Expression& expression,
                                             std::optional<DType> cast) {
  absl::InlinedVector<DType, kMostOperands> dtypes;
  for (const View& view : operands) dtypes.push_back(view.dtype);
  return expression.Compile(dtypes, cast);
}

absl::Status SetOperands(absl::Span<const View> operands, const Shape& shape, MapProblem& problem) {
  const MapProgram& program = *problem.program;
  for (std::size_t i = 0; i < operands.size(); ++i)
    problem.operands[i] = Broadcast(operands[i], shape);
  for (auto i = operands.size(); i < static_cast<std::size_t>(program.operands); ++i) {
    const int axis = program.axes[i];
    RETURN_IF_ERROR(FoldedAxes(shape, {&axis, 1}).status());
    View& view = problem.operands[i];
    view = {.data = FirstCoordinate(),
            .dtype = program.operand_dtypes[i],
            .shape = shape,
            .strides = {}};
    view.strides[static_cast<std::size_t>(axis < 0 ? axis + shape.rank : axis)] = 1;
  }
  return absl::OkStatus();
}

Expression Identity() { return {ExpressionNode{.kind = ExpressionNode::Kind::kOperand}}; }

absl::StatusOr<std::unique_ptr<StagedMap>> StagedMap::Make(const View& first, const MapStage* stage,
                                                           std::string_view first_name,
                                                           bool numeric) {
  auto staged = std::make_unique<StagedMap>();
  std::vector<View> operands = {first};
  if (stage == nullptr) {
    staged->identity_ = Identity();
  } else {
    operands.insert(operands.end(), stage->with.begin(), stage->with.end());
  }
  const Expression& expression = stage == nullptr ? staged->identity_ : stage->expression;
  absl::StatusOr<const MapProgram*> program = CompileFor(operands, expression);
  if (!program.ok()) return program.status();
  staged->type_.dtype = (*program)->dtype;
  if (numeric && !IsComputed((*program)->dtype)) {
    program = CompileFor(operands, expression, DType::kI32);
    if (!program.ok()) return program.status();
  }
  const absl::StatusOr<Shape> shape = BroadcastShape(operands, [&](std::size_t i) {
    return i == 0 ? std::string(first_name) : absl::StrCat("with[", i - 1, "]");
  });
  if (!shape.ok()) return shape.status();
  ASSIGN_OR_RETURN(const ArrayType type,
                   MakeArrayType((*program)->dtype,
                                 {shape->dims.data(), static_cast<std::size_t>(shape->rank)}));
  staged->type_.shape = *shape;
  MapProblem& problem = staged->problem_;
  problem.dtype = type.dtype;
  problem.n = shape->elements();
  problem.program = *program;
  RETURN_IF_ERROR(SetOperands(operands, *shape, problem));
  return staged;
}

absl::StatusOr<std::unique_ptr<StagedMap>> StageReduce(const View& x, const MapStage* in) {
  return StagedMap::Make(x, in, "x", /*numeric=*/true);
}

bool IsMapped(const View& x, const MapStage* in) { return in != nullptr || !IsComputed(x.dtype); }

void AccountMap(const MapProblem& map, bool in_cache, Stats& stats) {
  const Cost cost = OnePassCost(map);
  stats.bytes += cost.bytes;
  if (in_cache) stats.bytes -= 2 * static_cast<std::uint64_t>(map.n) * SizeOf(map.dtype);
  stats.flops += cost.flops;
}

double MapSeconds(const MapProblem& map, const Stream& stream, const Pace& pace) {
  return pace.Estimate(*Choose(map, stream.device()), map);
}

}  // namespace tessera
