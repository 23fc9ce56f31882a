// Sort along an axis, of an array or of an expression's result.

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/choose/map_range.h"
#include "kernels/compute.h"
#include "kernels/run/axes.h"
#include "kernels/run/execute.h"
#include "kernels/run/operation.h"
#include "kernels/run/reduce.h"
#include "kernels/run/stage.h"

namespace tessera {
namespace {

// Moves axis `from` of a view to place `to`. The axes in between move by one place.
View MoveAxis(View view, int from, int to) {
  const int step = from < to ? 1 : -1;
  for (int i = from; i != to; i += step) {
    std::swap(view.shape[i], view.shape[i + step]);
    std::swap(view.strides[static_cast<std::size_t>(i)],
              view.strides[static_cast<std::size_t>(i + step)]);
  }
  return view;
}

// Returns the map whose result is sorted, or null if x itself is sorted.
absl::StatusOr<std::unique_ptr<StagedMap>> MapOf(const SortSpec& spec, absl::Span<const View> x) {
  if (!spec.expression.has_value()) {
    if (IsComputed(x[0].dtype)) return nullptr;
    return StageReduce(x[0], nullptr);
  }
  const MapStage stage{*spec.expression, x.subspan(1)};
  return StageReduce(x[0], &stage);
}

// Strategies sort the rows of an array without gaps. This class makes the sorted axis the last one:
// it gathers x, or computes the expression in that order, and moves the axis of the results back.
// Elements of one byte are sorted as I32.
class SortRows final : public Work<SortProblem> {
 public:
  // `type` is that of the array of values, and `x` is sorted unless there is a map. The spec must
  // outlive this object.
  SortRows(const SortSpec& spec, const ArrayType& type, const View& x, const MapProblem* map,
           const Stream& stream)
      : spec_(spec),
        type_(type),
        last_(type.shape.rank - 1),
        at_(spec.axis < 0 ? spec.axis + type.shape.rank : spec.axis),
        rows_(map == nullptr ? MoveAxis(x, at_, last_) : View{}),
        stream_(stream) {
    if (map != nullptr) {
      map_ = *map;
      for (int i = 0; i < map_->program->operands; ++i) {
        View& operand = map_->operands[static_cast<std::size_t>(i)];
        operand = MoveAxis(operand, at_, last_);
      }
    }
    for (int i = at_ + 1; i <= last_; ++i) moves_ |= type.shape[i] != 1;
  }

  SortProblem problem() const {
    const std::int64_t n = type_.shape.elements() == 0 ? 0 : type_.shape[at_];
    return {.dtype = map_.has_value() ? map_->dtype : type_.dtype,
            .descending = spec_.descending,
            .wants_values = spec_.values,
            .wants_indices = spec_.indices,
            .rows = n == 0 ? 0 : type_.shape.elements() / n,
            .n = n,
            .x = InPlace() ? rows_.data : nullptr};
  }

  std::uint64_t CopyBytes(const Stream&, const Chosen&) const override {
    const auto n = static_cast<std::uint64_t>(type_.shape.elements());
    const std::uint64_t size = SizeOf(map_.has_value() ? map_->dtype : type_.dtype);
    std::uint64_t each = InPlace() ? 0 : size;
    if (MovesValues()) each += size;
    if (MovesIndices()) each += sizeof(std::int64_t);
    return n * each;
  }
  double GatherSeconds(const Pace& pace) const override {
    double seconds = 0;
    if (map_.has_value()) {
      seconds += MapSeconds(*map_, stream_, pace);
    } else if (HasGaps(rows_)) {
      seconds += pace.EstimateCopy(rows_, rows_.dtype);
    }
    if (CastsValues()) {
      seconds += MapSeconds(Cast(nullptr), stream_, pace);
    } else if (MovesValues()) {
      seconds += pace.EstimateCopy(Back(type_.dtype, nullptr), type_.dtype);
    }
    if (MovesIndices()) seconds += pace.EstimateCopy(Back(DType::kI64, nullptr), DType::kI64);
    return seconds;
  }
  Division Divide(const SortProblem& p, const Chosen& strategy, const Team& team) const override {
    return moves_ ? Division{} : DivisionOf(p, strategy, team);
  }
  void Account(const Chosen&, Stats& stats) const override {
    if (map_.has_value()) AccountMap(*map_, /*in_cache=*/false, stats);
  }
  void Launch(Stream& stream, SortProblem& problem, const Chosen& strategy) const override {
    const auto n = static_cast<std::size_t>(problem.elements());
    SortProblem rows = problem;
    if (map_.has_value()) {
      void* const mapped = stream.Scratch(n * SizeOf(map_->dtype));
      LaunchMapRange(*map_, 0, map_->n, mapped, stream);
      rows.x = mapped;
    } else if (!InPlace()) {
      rows.x = GatheredOn(stream, rows_);
    }
    if (MovesValues()) rows.values = stream.Scratch(n * SizeOf(rows.dtype));
    if (MovesIndices())
      rows.indices = static_cast<std::int64_t*>(stream.Scratch(n * sizeof(std::int64_t)));
    if (!stream.stopped()) LaunchOn(stream, rows, strategy);
    if (CastsValues() && !stream.stopped()) {
      LaunchMapRange(Cast(rows.values), 0, problem.elements(), problem.values, stream);
    } else if (MovesValues() && !stream.stopped()) {
      GatherOn(stream, Back(type_.dtype, rows.values), problem.values);
    }
    if (MovesIndices() && !stream.stopped())
      GatherOn(stream, Back(DType::kI64, rows.indices), problem.indices);
  }

 private:
  bool InPlace() const { return !map_.has_value() && !HasGaps(rows_); }
  // Whether values are sorted as I32, and converted back when they are moved.
  bool CastsValues() const {
    return spec_.values && map_.has_value() && map_->dtype != type_.dtype;
  }
  bool MovesValues() const { return CastsValues() || (spec_.values && moves_); }
  bool MovesIndices() const { return spec_.indices && moves_; }

  // Returns the rows as a view with the result's axes.
  View Back(DType dtype, const void* rows) const {
    View whole = MoveAxis(WholeView(type_, rows), at_, last_);
    whole = WholeView({dtype, whole.shape}, rows);
    return MoveAxis(whole, last_, at_);
  }
  // Returns the map that converts and moves the sorted values. REQUIRES: CastsValues().
  MapProblem Cast(const void* rows) const {
    MapProblem cast{.dtype = type_.dtype,
                    .n = type_.shape.elements(),
                    .program = *identity_.Compile({map_->dtype}, type_.dtype)};
    cast.operands[0] = Back(map_->dtype, rows);
    return cast;
  }

  const SortSpec& spec_;
  const ArrayType type_;
  const int last_, at_;
  const View rows_;  // x with the sorted axis last
  const Stream& stream_;
  std::optional<MapProblem> map_;
  const Expression identity_ = Identity();
  bool moves_ = false;  // whether the results' axes are moved back
};

}  // namespace

absl::StatusOr<ResultType> TypeOf(const SortSpec& spec, absl::Span<const View> x) {
  const std::optional<MapStage> in =
      spec.expression.has_value() ? std::make_optional(MapStage{*spec.expression, x.subspan(1)})
                                  : std::nullopt;
  ASSIGN_OR_RETURN(const ArrayType values, FoldedType(x[0], in.has_value() ? &*in : nullptr));
  RETURN_IF_ERROR(FoldedAxes(values.shape, {spec.axis}).status());
  ASSIGN_OR_RETURN(const ArrayType indices,
                   MakeArrayType(DType::kI64, {values.shape.dims.data(),
                                               static_cast<std::size_t>(values.shape.rank)}));
  return ResultType{.arrays = {values, indices}};
}

absl::StatusOr<ScalarResult> Run(const SortSpec& spec, const Arguments& with) {
  ASSIGN_OR_RETURN(const ResultType type, TypeOf(spec, with.x));
  ASSIGN_OR_RETURN(const std::unique_ptr<StagedMap> map, MapOf(spec, with.x));
  const SortRows work(spec, type.arrays[0], with.x[0], map == nullptr ? nullptr : &map->problem(),
                      with.stream);
  SortProblem problem = work.problem();
  const auto place = [&](SortProblem& p) -> absl::Status {
    if (spec.values) {
      ASSIGN_OR_RETURN(p.values, with.out[0].Get());
    }
    if (spec.indices) {
      ASSIGN_OR_RETURN(void* const indices, with.out[1].Get());
      p.indices = static_cast<std::int64_t*>(indices);
    }
    return absl::OkStatus();
  };
  return ArrayRun(Execute<SortProblem>(with.stream, problem, with.options, place, work));
}

}  // namespace tessera
