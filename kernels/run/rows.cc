// Operations along one axis that keep it: WindowSum and TopK.

#include <algorithm>
#include <array>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "kernels/compute.h"
#include "kernels/run/axes.h"
#include "kernels/run/execute.h"

namespace tessera {

absl::StatusOr<ArrayType> WindowSumType(const View& x, std::int64_t radius) {
  if (x.shape.rank != 1) {
    return Invalid(
        "BAD_SHAPE",
        absl::StrCat("the operand has shape ", ToString(x.shape), "; a window sum needs rank 1"),
        {{"x", ToString(x.shape)}});
  }
  if (radius < 0) {
    return Invalid("BAD_RADIUS", absl::StrCat("radius is ", radius, "; allowed: 0 and above"),
                   {{"field", "radius"}, {"value", absl::StrCat(radius)}, {"limit", "0"}});
  }
  return ArrayType{ResultDType(ReduceOp::kSum, x.dtype), x.shape};
}

absl::StatusOr<Stats> RunWindowSum(Stream& stream, const View& x, std::int64_t radius,
                                   const Output& out, const RunOptions& options) {
  absl::StatusOr<ArrayType> type = WindowSumType(x, radius);
  if (!type.ok()) return type.status();
  const std::int64_t n = x.elements();
  WindowSumProblem problem{
      .dtype = x.dtype, .n = n, .radius = std::min(radius, std::max<std::int64_t>(0, n - 1))};
  const OperandSlot operands[] = {{x, HasGaps(x), &problem.x}};
  return ExecuteTo(out, &problem.out, stream, problem, options,
                   WholeLaunch<WindowSumProblem>(operands));
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
  const absl::StatusOr<ArrayType> type = TopKType(x, k, axis);
  if (!type.ok()) return type.status();
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
  problem.rows = type->shape.elements() / k;
  const OperandSlot operands[] = {{rows, HasGaps(rows), &problem.x}};
  const auto place = [&](TopKProblem& p) -> absl::Status {
    const absl::StatusOr<void*> first = values.Get();
    if (!first.ok()) return first.status();
    const absl::StatusOr<void*> second = indices.Get();
    if (!second.ok()) return second.status();
    p.values = *first;
    p.indices = static_cast<std::int64_t*>(*second);
    return absl::OkStatus();
  };
  return Execute<TopKProblem>(stream, problem, options, place, WholeLaunch<TopKProblem>(operands));
}

}  // namespace tessera
