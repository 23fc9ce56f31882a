// Operations along one axis that keep it: WindowSum and TopK.

#include <algorithm>
#include <array>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/compute.h"
#include "kernels/run/axes.h"
#include "kernels/run/execute.h"
#include "kernels/run/operation.h"

namespace tessera {

absl::StatusOr<ResultType> TypeOf(const WindowSumSpec& spec, absl::Span<const View> operands) {
  const View& x = operands[0];
  if (x.shape.rank != 1) {
    return Invalid(
        "BAD_SHAPE",
        absl::StrCat("the operand has shape ", ToString(x.shape), "; a window sum needs rank 1"),
        {{"x", ToString(x.shape)}});
  }
  if (spec.radius < 0) {
    return Invalid("BAD_RADIUS", absl::StrCat("radius is ", spec.radius, "; allowed: 0 and above"),
                   {{"field", "radius"}, {"value", absl::StrCat(spec.radius)}, {"limit", "0"}});
  }
  return ResultType{.arrays = {ArrayType{ResultDType(ReduceOp::kSum, x.dtype), x.shape}}};
}

absl::StatusOr<ScalarResult> Run(const WindowSumSpec& spec, const Arguments& with) {
  const View& x = with.x[0];
  const std::int64_t n = x.elements();
  WindowSumProblem problem{
      .dtype = x.dtype, .n = n, .radius = std::min(spec.radius, std::max<std::int64_t>(0, n - 1))};
  const OperandSlot operands[] = {{x, HasGaps(x), &problem.x}};
  return ArrayRun(ExecuteTo(with.out[0], &problem.out, with.stream, problem, with.options,
                            WholeLaunch<WindowSumProblem>(operands)));
}

absl::StatusOr<ArrayType> TopKType(const View& x, std::int64_t k, int axis) {
  absl::StatusOr<std::array<bool, kMaxRank>> chosen = FoldedAxes(x.shape, {axis});
  if (!chosen.ok()) return chosen.status();
  const int at = axis < 0 ? axis + x.shape.rank : axis;
  const std::int64_t most = std::min(x.shape[at], kMostTopK);
  if (k < 1 || k > most) {
    return Invalid(
        "BAD_K",
        absl::StrCat("k is ", k, ", and the axis has ", x.shape[at], " elements; allowed: 1 to ",
                     kMostTopK, ", and no more than the axis has"),
        {{"field", "k"}, {"value", absl::StrCat(k)}, {"limit", absl::StrCat(most)}});
  }
  ArrayType type{x.dtype, x.shape};
  type.shape[at] = k;
  return type;
}

absl::StatusOr<Stats> RunTopK(Stream& stream, const View& x, std::int64_t k, int axis,
                              bool smallest, const Output& values, const Output& indices,
                              const RunOptions& options) {
  ASSIGN_OR_RETURN(const ArrayType type, TopKType(x, k, axis));
  // Strategies see the axis as the last one.
  const int rank = x.shape.rank, at = axis < 0 ? axis + rank : axis, last = rank - 1;
  View rows = x;
  TopKProblem problem{.dtype = x.dtype, .smallest = smallest, .n = x.shape[at], .k = k};
  for (int i = at; i < last; ++i) {
    rows.shape[i] = x.shape[i + 1];
    rows.strides[static_cast<std::size_t>(i)] = x.strides[static_cast<std::size_t>(i) + 1];
    problem.inner *= x.shape[i + 1];
  }
  rows.shape[last] = problem.n;
  rows.strides[static_cast<std::size_t>(last)] = x.strides[static_cast<std::size_t>(at)];
  problem.rows = type.shape.elements() / k;
  const OperandSlot operands[] = {{rows, HasGaps(rows), &problem.x}};
  const auto place = [&](TopKProblem& p) -> absl::Status {
    ASSIGN_OR_RETURN(p.values, values.Get());
    ASSIGN_OR_RETURN(void* const second, indices.Get());
    p.indices = static_cast<std::int64_t*>(second);
    return absl::OkStatus();
  };
  return Execute<TopKProblem>(stream, problem, options, place, WholeLaunch<TopKProblem>(operands));
}

}  // namespace tessera
