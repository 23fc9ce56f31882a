// Reduce along axes, applied to the result of an expression. That result is computed in pieces, and
// each piece is folded before the next one is computed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/choose/map_range.h"
#include "kernels/run/execute.h"
#include "kernels/run/pieces.h"
#include "kernels/run/stage.h"

namespace tessera {

// The map's result has the shape [outer, length, inner], and pieces are ranges of outer. If the
// outermost axis is folded and the map's result exceeds the scratch memory, pieces are ranges of
// the first axis of inner instead. A single column is never divided.
class FoldMapAxes final : public Work<ReduceAxesProblem> {
 public:
  // `first_inner` is the index of inner's first axis among the map's axes.
  FoldMapAxes(const MapProblem& map, const Stream& stream, const ReduceAxesProblem& problem,
              int first_inner)
      : map_(map), stream_(stream), problem_(problem), first_inner_(first_inner) {}

  std::int64_t row() const { return problem_.length * problem_.inner; }
  // Returns the number of rows in a piece. A piece fits in the second-level cache (on a CPU, in the
  // second-level caches of all cores).
  std::int64_t rows() const {
    const DeviceInfo& info = stream_.device().info();
    const int cores = info.backend == Backend::kCpu ? std::max(1, info.multiprocessors) : 1;
    const std::int64_t elements = PieceElements(stream_, SizeOf(map_.dtype), /*copies=*/1, cores);
    return std::clamp<std::int64_t>(elements / std::max<std::int64_t>(1, row()), 1,
                                    std::max<std::int64_t>(1, problem_.outer));
  }
  std::int64_t inner_extent() const { return map_.operands[0].shape[first_inner_]; }
  // Returns the number of indices of the first inner axis in a piece, or 0 if pieces are whole
  // rows.
  std::int64_t steps(const Chosen& strategy) const {
    const Budget* budget = stream_.scratch_budget();
    const std::int64_t outer = std::max(problem_.outer, problem_.outer_of_all);
    if (budget == nullptr || outer != 1 || problem_.inner == 1) return 0;
    const std::uint64_t whole = static_cast<std::uint64_t>(row()) * SizeOf(map_.dtype);
    const std::uint64_t more = strategy.scratch == nullptr ? 0 : strategy.scratch(problem_);
    if (SaturatingAdd(whole, more) <= budget->limit()) return 0;
    const std::int64_t elements = PieceElements(stream_, SizeOf(map_.dtype), /*copies=*/1);
    return std::clamp<std::int64_t>(elements / (row() / inner_extent()), 1, inner_extent());
  }
  // Returns the problem restricted to `count` indices of the first inner axis.
  ReduceAxesProblem Columns(std::int64_t count) const {
    ReduceAxesProblem part = problem_;
    part.inner = problem_.inner / inner_extent() * count;
    return part;
  }
  // Returns the scratch memory of the largest launch, in addition to the piece that it folds.
  std::uint64_t LaunchBytes(const ReduceAxesProblem&, const Chosen& strategy) const override {
    if (strategy.scratch == nullptr) return 0;
    const std::int64_t columns = steps(strategy);
    return strategy.scratch(columns > 0 ? Columns(columns) : problem_);
  }
  std::uint64_t CopyBytes(const Stream&, const Chosen& strategy) const override {
    const std::int64_t columns = steps(strategy);
    const std::int64_t elements = columns > 0 ? row() / inner_extent() * columns : rows() * row();
    return static_cast<std::uint64_t>(elements) * SizeOf(map_.dtype);
  }
  // Returns the scratch memory that the work needs on each device with a share.
  std::uint64_t ShareBytes(const ReduceAxesProblem& part, const Chosen& strategy) const override {
    return SaturatingAdd(CopyBytes(stream_, strategy), LaunchBytes(part, strategy));
  }
  double GatherSeconds(const Pace& pace) const override { return MapSeconds(map_, stream_, pace); }
  // Divides along the outermost axis, unless that axis is folded.
  Division Divide(const ReduceAxesProblem& whole, const Chosen&, const Team& team) const override {
    return whole.outer > 1 ? InParts(MapDivision(map_, team), whole.outer) : Division();
  }
  void Account(const Chosen& strategy, Stats& stats) const override {
    const std::int64_t columns = steps(strategy);
    if (columns > 0) AccountColumns(strategy, columns, stats);
    AccountMap(map_, /*in_cache=*/rows() < problem_.outer || columns > 0, stats);
  }
  // Sets the statistics of a problem that is folded in parts. The strategy may fold a part
  // differently from the whole, and the last part differently from the other parts.
  void AccountColumns(const Chosen& strategy, std::int64_t columns, Stats& stats) const {
    const ReduceAxesProblem part = Columns(columns);
    const std::int64_t parts = inner_extent() / columns, left = inner_extent() % columns;
    stats.roundoff = strategy.roundoff(part);
    stats.bytes = static_cast<std::uint64_t>(parts) * strategy.cost(part).bytes;
    if (left == 0) return;
    const ReduceAxesProblem last = Columns(left);
    stats.roundoff = std::max(stats.roundoff, strategy.roundoff(last));
    stats.bytes += strategy.cost(last).bytes;
  }
  // `first_row` is the row of the map with which `whole` begins.
  void Fold(Stream& on, ReduceAxesProblem& whole, const Chosen& strategy, bool wide,
            std::int64_t first_row = 0) const {
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
      LaunchMapRange(map_, (first_row + first) * row(), (end - first) * row(), piece, on);
      ReduceAxesProblem part = RowsOf(whole, {&on, first, end});
      part.x = piece;
      part.continues = first > 0;
      LaunchPart(on, part, strategy, wide);
      first = end;
    }
  }
  void FoldColumns(Stream& on, const ReduceAxesProblem& whole, const Chosen& strategy, bool wide,
                   std::int64_t columns, void* piece) const {
    const std::int64_t extent = inner_extent(), of_each = whole.inner / extent;
    for (std::int64_t first = 0; first < extent && !on.stopped(); first += columns) {
      MapProblem box = map_;
      const std::int64_t count = std::min(columns, extent - first);
      for (int i = 0; i < map_.program->operands; ++i) {
        View& view = box.operands[static_cast<std::size_t>(i)];
        const std::int64_t stride = view.strides[static_cast<std::size_t>(first_inner_)];
        view.data =
            Advanced(view.data, first * stride * static_cast<std::int64_t>(SizeOf(view.dtype)));
        view.shape[first_inner_] = count;
      }
      box.n = map_.n / extent * count;
      LaunchMapRange(box, 0, box.n, piece, on);
      ReduceAxesProblem part = whole;
      part.inner = of_each * count;
      part.x = piece;
      part.out = At(whole.out, first * of_each, ResultDType(whole.op, whole.dtype));
      part.continues = first > 0;
      LaunchPart(on, part, strategy, wide);
    }
  }
  // Each launch uses the same scratch memory as the one before it.
  static void LaunchPart(Stream& on, const ReduceAxesProblem& part, const Chosen& strategy,
                         bool wide) {
    const ScratchMark before = on.MarkScratch();
    if (wide) {
      strategy.wide.launch(part, on);
    } else {
      LaunchOn(on, part, strategy);
    }
    on.RewindScratch(before);
  }
  void Launch(Stream& on, ReduceAxesProblem& whole, const Chosen& strategy) const override {
    Fold(on, whole, strategy, /*wide=*/false);
  }
  void LaunchWide(Stream& on, ReduceAxesProblem& whole, const Chosen& strategy) const override {
    Fold(on, whole, strategy, /*wide=*/true);
  }
  void LaunchShare(const ReduceAxesProblem& whole, const ReduceAxesProblem&, const Chosen& strategy,
                   const TeamShare& share, bool wide) const override {
    ReduceAxesProblem part = RowsOf(whole, share);
    const auto has_piece = [&](const auto& piece) { return piece.first == share.stream; };
    const auto found = std::find_if(pieces_.begin(), pieces_.end(), has_piece);
    if (found != pieces_.end()) part.x = found->second;
    Fold(*share.stream, part, strategy, wide, share.first);
    if (found == pieces_.end()) pieces_.emplace_back(share.stream, part.x);
  }

  const MapProblem& map_;
  const Stream& stream_;
  const ReduceAxesProblem& problem_;
  const int first_inner_;
  // The memory into which the stream of each share computes its pieces, in both launches.
  mutable std::vector<std::pair<Stream*, const void*>> pieces_;
};

}  // namespace tessera
