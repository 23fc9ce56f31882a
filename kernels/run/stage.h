// Expressions applied to an operation's input or result, checked and broadcast.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"

namespace tessera {

// Returns the shape that all operands are broadcast to: for each axis, counted from the last, the
// one extent that is not 1. `names` returns the name of an operand, for errors.
absl::StatusOr<Shape> BroadcastShape(absl::Span<const View> operands,
                                     absl::FunctionRef<std::string(std::size_t)> names);
// Returns the view broadcast to the shape, with stride 0 where it repeats.
View Broadcast(const View& view, const Shape& shape);

// Returns the expression compiled for these operands. The program lives as long as the expression.
absl::StatusOr<const MapProgram*> CompileFor(absl::Span<const View> operands,
                                             const Expression& expression,
                                             std::optional<DType> cast = std::nullopt);

// Sets the operands of a problem whose program is set: these views and the program's coordinates,
// broadcast to the shape. Returns INVALID_ARGUMENT / BAD_AXES for a coordinate along an axis that
// the shape does not have.
absl::Status SetOperands(absl::Span<const View> operands, const Shape& shape, MapProblem& problem);

// Returns the expression that leaves elements unchanged.
Expression Identity();

// A checked MapStage as a problem. The program belongs to the stage's expression.
class StagedMap {
 public:
  // Creates the map for operand 0, which error messages call first_name. Without a stage, elements
  // stay unchanged. The stage's expression must outlive the result. If `numeric` is set, one-byte
  // elements become I32.
  static absl::StatusOr<std::unique_ptr<StagedMap>> Make(const View& first, const MapStage* stage,
                                                         std::string_view first_name, bool numeric);

  // The type of the expression's result. A bool is BOOL here, even if problem() converts it to I32.
  const ArrayType& type() const { return type_; }
  MapProblem& problem() { return problem_; }

 private:
  ArrayType type_;
  Expression identity_;  // used if there is no stage
  MapProblem problem_;
};

// Returns the map whose result is folded. Without an expression, this is the identity map of x.
absl::StatusOr<std::unique_ptr<StagedMap>> StageReduce(const View& x, const MapStage* in);
// Whether elements must be computed before they are folded.
bool IsMapped(const View& x, const MapStage* in);

// Adds the cost of a map to the operation's cost. If `in_cache` is set, the map's result is neither
// written to nor read from device memory, although the operation's cost counts reading it.
void AccountMap(const MapProblem& map, bool in_cache, Stats& stats);
double MapSeconds(const MapProblem& map, const Stream& stream, const Pace& pace);

}  // namespace tessera
