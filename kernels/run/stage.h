// Expressions on the way into operations and out of them, checked and broadcast.
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

// The shape that all operands are stretched to: of each axis, counted from the last, the one extent
// that is not 1. names: of an operand in an error.
absl::StatusOr<Shape> BroadcastShape(absl::Span<const View> operands,
                                     absl::FunctionRef<std::string(std::size_t)> names);
// The view stretched to the shape, with strides of 0 where it repeats.
View Broadcast(const View& view, const Shape& shape);

// The program of the expression over these operands, which lives as long as the expression.
absl::StatusOr<const MapProgram*> CompileFor(absl::Span<const View> operands,
                                             const Expression& expression,
                                             std::optional<DType> cast = std::nullopt);

// Returns an expression that takes the elements of its operand as they are.
Expression Identity();

// A MapStage that has been checked, as a problem.
class StagedMap {
 public:
  // first: operand 0, which errors call first_name. stage: null for the elements as they are; its
  // expression outlives this. numeric: elements of a byte become I32.
  static absl::StatusOr<std::unique_ptr<StagedMap>> Make(const View& first, const MapStage* stage,
                                                         std::string_view first_name, bool numeric);

  // Of what the expression makes, in which truth values are still such.
  const ArrayType& type() const { return type_; }
  MapProblem& problem() { return problem_; }

 private:
  ArrayType type_;
  Expression identity_;  // where there is no stage
  MapProblem problem_;
};

// What is folded: x itself, through an expression that changes nothing, where there is no other.
absl::StatusOr<std::unique_ptr<StagedMap>> StageReduce(const View& x, const MapStage* in);
// Whether elements are to be computed before they are folded.
bool IsMapped(const View& x, const MapStage* in);

// What a map costs beside the operation. in_cache: its result is in device memory neither when it
// is written nor when the operation, which counts that, reads it.
void AccountMap(const MapProblem& map, bool in_cache, Stats& stats);
double MapSeconds(const MapProblem& map, const Stream& stream, const Pace& pace);

}  // namespace tessera
