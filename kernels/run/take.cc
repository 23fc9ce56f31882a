// Take: rows or elements at indices.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/compute.h"
#include "kernels/run/axes.h"
#include "kernels/run/execute.h"
#include "kernels/run/indices.h"
#include "kernels/run/operation.h"

namespace tessera {
namespace {

// The axes [first, end) of a view, traversed as one axis.
struct Joined {
  std::int64_t extent = 1;
  std::optional<std::int64_t> stride = 1;  // none if no single stride covers the axes
};

Joined Join(const View& view, int first, int end) {
  Joined joined;
  for (int i = end - 1; i >= first; --i) {
    const std::int64_t extent = view.shape[i], stride = view.strides[static_cast<std::size_t>(i)];
    if (extent == 1) continue;
    if (joined.extent == 1) {
      joined.stride = stride;
    } else if (joined.stride.has_value() && stride != *joined.stride * joined.extent) {
      joined.stride.reset();
    }
    joined.extent *= extent;
  }
  return joined;
}

// Returns the axis in [0, rank), or none if x is read as a vector. REQUIRES: the axis exists.
std::optional<int> AxisOf(const TakeSpec& spec, const View& x) {
  if (!spec.axis.has_value()) return std::nullopt;
  return *spec.axis < 0 ? *spec.axis + x.shape.rank : *spec.axis;
}

// Returns the problem without the addresses of the operands. Sets *gathers to whether strategies
// cannot walk x in place. REQUIRES: TypeOf is OK.
TakeProblem ProblemOf(const TakeSpec& spec, const View& x, const View& indices, bool* gathers) {
  const std::optional<int> axis = AxisOf(spec, x);
  const int first = axis.value_or(0), end = axis.has_value() ? *axis + 1 : x.shape.rank;
  const std::array<Joined, 3> parts = {Join(x, 0, first), Join(x, first, end),
                                       Join(x, end, x.shape.rank)};
  TakeProblem problem{.dtype = x.dtype,
                      .index_dtype = indices.dtype,
                      .mode = spec.mode,
                      .along = spec.along,
                      .outer = parts[0].extent,
                      .length = parts[1].extent,
                      .inner = parts[2].extent};
  problem.count = spec.along ? indices.shape[first] : indices.elements();
  *gathers = false;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    problem.strides[i] = parts[i].stride.value_or(0);
    *gathers |= !parts[i].stride.has_value() && x.elements() > 0;
  }
  if (*gathers) problem.strides = {problem.length * problem.inner, problem.inner, 1};
  return problem;
}

absl::Status CheckAlong(const View& x, const View& indices, std::optional<int> axis) {
  const int rank = axis.has_value() ? x.shape.rank : 1;
  bool same = indices.shape.rank == rank;
  for (int i = 0; same && axis.has_value() && i < rank; ++i)
    same = i == *axis || indices.shape[i] == x.shape[i];
  if (same) return absl::OkStatus();
  return Invalid(
      "BAD_SHAPE",
      absl::StrCat("x has shape ", ToString(x.shape), " and indices ", ToString(indices.shape),
                   axis.has_value() ? ": if `along` is set, only the axis may differ"
                                    : ": if `along` is set without an axis, indices need rank 1"),
      {{"x", ToString(x.shape)}, {"indices", ToString(indices.shape)}});
}

}  // namespace

absl::StatusOr<ResultType> TypeOf(const TakeSpec& spec, absl::Span<const View> operands) {
  const View &x = operands[0], &indices = operands[1];
  RETURN_IF_ERROR(CheckIndexType("indices", indices));
  if (spec.axis.has_value()) RETURN_IF_ERROR(FoldedAxes(x.shape, {*spec.axis}).status());
  const std::optional<int> axis = AxisOf(spec, x);
  if (spec.along) RETURN_IF_ERROR(CheckAlong(x, indices, axis));
  std::vector<std::int64_t> shape;
  const auto append = [&shape](const Shape& of, int first, int end) {
    for (int i = first; i < end; ++i) shape.push_back(of[i]);
  };
  if (axis.has_value() && !spec.along) append(x.shape, 0, *axis);
  append(indices.shape, 0, indices.shape.rank);
  if (axis.has_value() && !spec.along) append(x.shape, *axis + 1, x.shape.rank);
  ASSIGN_OR_RETURN(const ArrayType type, MakeArrayType(x.dtype, shape));
  const std::int64_t length = axis.has_value() ? x.shape[*axis] : x.elements();
  if (length == 0 && type.shape.elements() > 0) return EmptyAxis("indices");
  return ResultType{.arrays = {type}};
}

absl::StatusOr<ScalarResult> Run(const TakeSpec& spec, const Arguments& with) {
  const View &x = with.x[0], &indices = with.x[1];
  Stream& stream = with.stream;
  bool gathers = false;
  TakeProblem problem = ProblemOf(spec, x, indices, &gathers);
  const OperandSlot operands[] = {{x, gathers, &problem.x},
                                  {indices, HasGaps(indices), &problem.indices}};
  RunOptions options = with.options;
  const bool checks = spec.mode == TakeMode::kError && problem.elements() > 0;
  options.enqueue_only &= !checks;  // the position of a bad index is read immediately
  const auto place = [&](TakeProblem& p) -> absl::Status {
    ASSIGN_OR_RETURN(p.out, with.out[0].Get());
    p.result = stream.result();
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(const Stats stats, Execute<TakeProblem>(stream, problem, options, place,
                                                           WholeLaunch<TakeProblem>(operands)));
  if (checks && !options.check_only && problem.result->index >= 0)
    return BadIndex("indices", stream, indices, problem.result->index, problem.length);
  return ScalarResult{.stats = stats};
}

}  // namespace tessera
