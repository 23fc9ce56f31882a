// Reduce along some axes.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/compute.h"
#include "kernels/map_range.h"
#include "kernels/run/axes.h"
#include "kernels/run/execute.h"
#include "kernels/run/pieces.h"
#include "kernels/run/reduce.h"
#include "kernels/run/stage.h"

namespace tessera {

namespace {

// The axes of an array so ordered that folded ones are neighbours, and the three extents that result.
// Axes that are neighbours already stay where they are, which saves a gather.
struct Folding {
  std::vector<int> order;
  std::int64_t outer = 1, length = 1, inner = 1;
  int first_inner = 0;  // of the axes in order; their number: there is none

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

// The same along axes, in pieces of the outermost one: the map's result is [outer, length, inner]. Where
// that is folded and the map's result is more than scratch memory may hold, in pieces of the first axis
// of inner; a column of it has no pieces.
struct FoldMapAxes {
  const MapProblem& map;
  const Stream& stream;
  const ReduceAxesProblem& problem;
  int first_inner;  // of the map's axes
  // Of shares: what a stream computes into, in both launches.
  mutable std::vector<std::pair<Stream*, const void*>> pieces = {};

  std::int64_t row() const { return problem.length * problem.inner; }
  // Rows of a piece: what stays in a cache of the second level, of each core's on a CPU.
  std::int64_t rows() const {
    const DeviceInfo& info = stream.device().info();
    const int cores = info.backend == Backend::kCpu ? std::max(1, info.multiprocessors) : 1;
    const std::int64_t elements = PieceElements(stream, SizeOf(map.dtype), /*copies=*/1, cores);
    return std::clamp<std::int64_t>(elements / std::max<std::int64_t>(1, row()), 1,
                                    std::max<std::int64_t>(1, problem.outer));
  }
  std::int64_t inner_extent() const { return map.operands[0].shape[first_inner]; }
  // Steps of the first inner axis in a piece; 0: pieces are of whole rows.
  std::int64_t steps(const Strategy<ReduceAxesProblem>& strategy) const {
    const Budget* budget = stream.scratch_budget();
    if (budget == nullptr || problem.outer != 1 || problem.inner == 1) return 0;
    const std::uint64_t whole = static_cast<std::uint64_t>(row()) * SizeOf(map.dtype);
    const std::uint64_t more = strategy.scratch == nullptr ? 0 : strategy.scratch(problem);
    if (SaturatingAdd(whole, more) <= budget->limit()) return 0;
    const std::int64_t elements = PieceElements(stream, SizeOf(map.dtype), /*copies=*/1);
    return std::clamp<std::int64_t>(elements / (row() / inner_extent()), 1, inner_extent());
  }
  std::uint64_t CopyBytes(const Stream&, const Strategy<ReduceAxesProblem>& strategy) const {
    const std::int64_t columns = steps(strategy);
    const std::int64_t elements = columns > 0 ? row() / inner_extent() * columns : rows() * row();
    return static_cast<std::uint64_t>(elements) * SizeOf(map.dtype);
  }
  // Of scratch memory, on each device that has a share.
  std::uint64_t ShareBytes(const ReduceAxesProblem&,
                           const Strategy<ReduceAxesProblem>& strategy) const {
    return CopyBytes(stream, strategy);
  }
  double GatherSeconds(const Pace& pace) const { return MapSeconds(map, stream, pace); }
  // By the outermost axis, where that is not folded.
  Division Divide(const ReduceAxesProblem& whole, const Strategy<ReduceAxesProblem>&,
                  const Team& team) const {
    return whole.outer > 1 ? InParts(MapDivision(map, team), whole.outer) : Division();
  }
  void Account(const Strategy<ReduceAxesProblem>& strategy, Stats& stats) const {
    AccountMap(map, /*in_cache=*/rows() < problem.outer || steps(strategy) > 0, stats);
  }
  // first_row: of the map's, which `whole` begins with.
  void Fold(Stream& on, ReduceAxesProblem& whole, const Strategy<ReduceAxesProblem>& strategy,
            bool wide, std::int64_t first_row = 0) const {
    if (whole.x == nullptr) {
      const std::uint64_t bytes = std::max<std::uint64_t>(1, CopyBytes(on, strategy));
      whole.x = on.Scratch(static_cast<std::size_t>(bytes));
    }
    void* const piece = const_cast<void*>(whole.x);
    if (const std::int64_t columns = steps(strategy); columns > 0) {
      FoldColumns(on, whole, strategy, wide, columns, piece);
      return;
    }
    for (std::int64_t first = 0; first < whole.outer && !on.stopped();) {
      const std::int64_t end = std::min(whole.outer, first + rows());
      LaunchMapRange(map, (first_row + first) * row(), (end - first) * row(), piece, on);
      ReduceAxesProblem part = RowsOf(whole, {&on, first, end});
      part.x = piece;
      part.continues = first > 0;
      Launch(on, part, strategy, wide);
      first = end;
    }
  }
  void FoldColumns(Stream& on, const ReduceAxesProblem& whole,
                   const Strategy<ReduceAxesProblem>& strategy, bool wide, std::int64_t columns,
                   void* piece) const {
    const std::int64_t extent = inner_extent(), of_each = whole.inner / extent;
    for (std::int64_t first = 0; first < extent && !on.stopped(); first += columns) {
      MapProblem box = map;
      const std::int64_t count = std::min(columns, extent - first);
      for (int i = 0; i < map.program->operands; ++i) {
        View& view = box.operands[static_cast<std::size_t>(i)];
        const std::int64_t stride = view.strides[static_cast<std::size_t>(first_inner)];
        view.data =
            Advanced(view.data, first * stride * static_cast<std::int64_t>(SizeOf(view.dtype)));
        view.shape[first_inner] = count;
      }
      box.n = map.n / extent * count;
      LaunchMapRange(box, 0, box.n, piece, on);
      ReduceAxesProblem part = whole;
      part.inner = of_each * count;
      part.x = piece;
      part.out = At(whole.out, first * of_each, ResultDType(whole.op, whole.dtype));
      part.continues = first > 0;
      Launch(on, part, strategy, wide);
    }
  }
  static void Launch(Stream& on, const ReduceAxesProblem& part,
                     const Strategy<ReduceAxesProblem>& strategy, bool wide) {
    if (wide) {
      strategy.launch_wide(part, on);
    } else {
      LaunchOn(on, part, strategy);
    }
  }
  void operator()(Stream& on, ReduceAxesProblem& whole,
                  const Strategy<ReduceAxesProblem>& strategy) const {
    Fold(on, whole, strategy, /*wide=*/false);
  }
  void LaunchWide(Stream& on, ReduceAxesProblem& whole,
                  const Strategy<ReduceAxesProblem>& strategy) const {
    Fold(on, whole, strategy, /*wide=*/true);
  }
  void LaunchShare(const ReduceAxesProblem& whole, const Strategy<ReduceAxesProblem>& strategy,
                   const TeamShare& share, bool wide) const {
    ReduceAxesProblem part = RowsOf(whole, share);
    const auto has_piece = [&](const auto& piece) { return piece.first == share.stream; };
    const auto found = std::find_if(pieces.begin(), pieces.end(), has_piece);
    if (found != pieces.end()) part.x = found->second;
    Fold(*share.stream, part, strategy, wide, share.first);
    if (found == pieces.end()) pieces.emplace_back(share.stream, part.x);
  }
};

}  // namespace

absl::StatusOr<ArrayType> ReduceAxesType(const View& x, ReduceOp op, absl::Span<const int> axes,
                                         bool keep_dims, const MapStage* in) {
  const absl::StatusOr<ArrayType> of = FoldedType(x, in);
  if (!of.ok()) return of.status();
  absl::StatusOr<std::array<bool, kMaxRank>> folded = FoldedAxes(of->shape, axes);
  if (!folded.ok()) return folded.status();
  std::vector<std::int64_t> shape;
  bool nothing_to_fold = false;
  for (int i = 0; i < of->shape.rank; ++i) {
    if (!(*folded)[static_cast<std::size_t>(i)]) {
      shape.push_back(of->shape[i]);
    } else {
      nothing_to_fold |= of->shape[i] == 0;
      if (keep_dims) shape.push_back(1);
    }
  }
  absl::StatusOr<ArrayType> type = MakeArrayType(ResultDType(op, of->dtype), shape);
  if (!type.ok()) return type;
  const bool empty = nothing_to_fold && type->shape.elements() > 0;
  absl::Status status = CheckFolds(op, of->dtype, empty ? 0 : 1);
  if (!status.ok()) return status;
  return type;
}

absl::StatusOr<Stats> RunReduceAxes(Stream& stream, const View& x, ReduceOp op,
                                    absl::Span<const int> axes, const Output& out,
                                    const RunOptions& options, const MapStage* in) {
  if (absl::Status status = ReduceAxesType(x, op, axes, false, in).status(); !status.ok())
    return status;
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
    absl::StatusOr<std::unique_ptr<StagedMap>> staged = StageReduce(x, in);
    if (!staged.ok()) return staged.status();
    MapProblem& map = (*staged)->problem();
    const Shape& shape = (*staged)->type().shape;
    const Folding folding = MakeFolding(shape, *FoldedAxes(shape, axes));
    for (int i = 0; i < map.program->operands; ++i) {
      View& view = map.operands[static_cast<std::size_t>(i)];
      view = folding.Of(view);
    }
    ReduceAxesProblem problem = problem_of(folding, map.dtype);
    return Execute(stream, problem, options, PlaceAt(out, &problem.out),
                   FoldMapAxes{map, stream, problem, folding.first_inner});
  }
  const Folding folding = MakeFolding(x.shape, *FoldedAxes(x.shape, axes));
  const View ordered = folding.Of(x);
  ReduceAxesProblem problem = problem_of(folding, x.dtype);
  const Operand operands[] = {{ordered, HasGaps(ordered), &problem.x}};
  return Execute(stream, problem, options, PlaceAt(out, &problem.out),
                 WholeLaunch<ReduceAxesProblem>{operands});
}

}  // namespace tessera
