// Reduce along axes.

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/compute.h"
#include "kernels/run/axes.h"
#include "kernels/run/execute.h"
#include "kernels/run/fold_map_axes.h"
#include "kernels/run/reduce.h"
#include "kernels/run/stage.h"

namespace tessera {

namespace {

// The axes of an array, ordered so that the folded axes are adjacent, and the resulting three
// extents. If the folded axes are adjacent already, no axis moves, which saves a gather.
struct Folding {
  std::vector<int> order;
  std::int64_t outer = 1, length = 1, inner = 1;
  int first_inner = 0;  // among the ordered axes; if none, the number of axes

  View Of(const View& x) const {
    View ordered = x;
    for (int i = 0; i < x.shape.rank; ++i) {
      const int from = order[static_cast<std::size_t>(i)];
      ordered.shape[i] = x.shape[from];
      ordered.strides[static_cast<std::size_t>(i)] = x.strides[static_cast<std::size_t>(from)];
    }
    return ordered;
  }
};

Folding MakeFolding(const Shape& shape, const std::array<bool, kMaxRank>& folded) {
  const int rank = shape.rank;
  const auto is_folded = [&](int i) { return folded[static_cast<std::size_t>(i)]; };
  int first = 0;
  while (first < rank && !is_folded(first)) ++first;
  int last = rank;
  while (last > first && !is_folded(last - 1)) --last;
  bool neighbours = true;
  for (int i = first; i < last; ++i) neighbours &= is_folded(i);

  Folding folding;
  for (int i = 0; i < rank; ++i)
    if (neighbours || !is_folded(i)) folding.order.push_back(i);
  if (!neighbours)
    for (int i = 0; i < rank; ++i)
      if (is_folded(i)) folding.order.push_back(i);
  for (int from : folding.order) {
    (is_folded(from)              ? folding.length
     : neighbours && from >= last ? folding.inner
                                  : folding.outer) *= shape[from];
  }
  folding.first_inner = neighbours ? last : rank;
  while (folding.first_inner < rank && shape[folding.first_inner] == 1) ++folding.first_inner;
  return folding;
}

}  // namespace

absl::StatusOr<ArrayType> ReduceAxesType(const View& x, ReduceOp op, absl::Span<const int> axes,
                                         bool keep_dims, const MapStage* in) {
  ASSIGN_OR_RETURN(const ArrayType of, FoldedType(x, in));
  ASSIGN_OR_RETURN(auto folded, FoldedAxes(of.shape, axes));
  std::vector<std::int64_t> shape;
  bool nothing_to_fold = false;
  for (int i = 0; i < of.shape.rank; ++i) {
    if (!folded[static_cast<std::size_t>(i)]) {
      shape.push_back(of.shape[i]);
    } else {
      nothing_to_fold |= of.shape[i] == 0;
      if (keep_dims) shape.push_back(1);
    }
  }
  absl::StatusOr<ArrayType> type = MakeArrayType(ResultDType(op, of.dtype), shape);
  if (!type.ok()) return type;
  const bool empty = nothing_to_fold && type->shape.elements() > 0;
  RETURN_IF_ERROR(CheckFolds(op, of.dtype, empty ? 0 : 1));
  return type;
}

absl::StatusOr<Stats> RunReduceAxes(Stream& stream, const View& x, ReduceOp op,
                                    absl::Span<const int> axes, const Output& out,
                                    const RunOptions& options, const MapStage* in) {
  RETURN_IF_ERROR(ReduceAxesType(x, op, axes, false, in).status());
  const auto problem_of = [&](const Folding& folding, DType dtype) {
    return ReduceAxesProblem{.dtype = dtype,
                             .op = op,
                             .outer = folding.outer,
                             .length = folding.length,
                             .inner = folding.inner,
                             .x = nullptr,
                             .out = nullptr};
  };
  if (IsMapped(x, in)) {
    ASSIGN_OR_RETURN(std::unique_ptr<StagedMap> staged, StageReduce(x, in));
    MapProblem& map = staged->problem();
    const Shape& shape = staged->type().shape;
    const Folding folding = MakeFolding(shape, *FoldedAxes(shape, axes));
    for (int i = 0; i < map.program->operands; ++i) {
      View& view = map.operands[static_cast<std::size_t>(i)];
      view = folding.Of(view);
    }
    ReduceAxesProblem problem = problem_of(folding, map.dtype);
    return ExecuteTo(out, &problem.out, stream, problem, options,
                     FoldMapAxes(map, stream, problem, folding.first_inner));
  }
  const Folding folding = MakeFolding(x.shape, *FoldedAxes(x.shape, axes));
  const View ordered = folding.Of(x);
  ReduceAxesProblem problem = problem_of(folding, x.dtype);
  const OperandSlot operands[] = {{ordered, HasGaps(ordered), &problem.x}};
  return ExecuteTo(out, &problem.out, stream, problem, options,
                   WholeLaunch<ReduceAxesProblem>(operands));
}

}  // namespace tessera
