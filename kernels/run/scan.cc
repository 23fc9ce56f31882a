// Scan along an axis, of an array or of an expression's result.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/choose/map_range.h"
#include "kernels/compute.h"
#include "kernels/run/axes.h"
#include "kernels/run/execute.h"
#include "kernels/run/operation.h"
#include "kernels/run/reduce.h"
#include "kernels/run/stage.h"

namespace tessera {
namespace {

// The array that is scanned, if it is not x itself.
struct ScannedMap {
  Expression tests;  // for ALL and ANY
  std::unique_ptr<StagedMap> staged;
};

// ALL and ANY fold truth values: whether each element is not 0. StageReduce converts BOOL to I32.
Expression Tests(const std::optional<Expression>& expression) {
  using Kind = ExpressionNode::Kind;
  const Expression identity = Identity();
  const absl::Span<const ExpressionNode> all =
      expression.has_value() ? expression->nodes() : identity.nodes();
  std::vector<ExpressionNode> nodes(all.begin(), all.end());
  nodes.push_back({.kind = Kind::kOperation,
                   .op = MapOp::kCast,
                   .args = {static_cast<std::uint32_t>(nodes.size() - 1)},
                   .dtype = DType::kBool});
  return nodes;
}

// Returns null if x itself is scanned.
absl::StatusOr<std::unique_ptr<ScannedMap>> MapOf(const ScanSpec& spec, absl::Span<const View> x) {
  auto map = std::make_unique<ScannedMap>();
  std::optional<MapStage> stage;
  if (IsLogical(spec.op)) {
    constexpr int kMost = kMostNodes - 1;  // Tests adds a node
    if (spec.expression.has_value() && spec.expression->nodes().size() > kMost) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "BAD_EXPRESSION",
          absl::StrCat("for ALL and ANY, an expression must have from 1 to ", kMost, " nodes"),
          {{"field", "expression.nodes"}, {"limit", absl::StrCat(kMost)}});
    }
    map->tests = Tests(spec.expression);
    stage.emplace(MapStage{map->tests, x.subspan(1)});
  } else if (spec.expression.has_value()) {
    stage.emplace(MapStage{*spec.expression, x.subspan(1)});
  } else if (IsComputed(x[0].dtype)) {
    return nullptr;
  }
  absl::StatusOr<std::unique_ptr<StagedMap>> staged =
      StageReduce(x[0], stage.has_value() ? &*stage : nullptr);
  if (!staged.ok()) return staged.status();
  map->staged = *std::move(staged);
  return map;
}

// Computes the expression's result and scans it. If the scan's result has the same type, the scan
// is in place.
class ScanOfMap final : public Work<ScanProblem> {
 public:
  ScanOfMap(const MapProblem& map, const Stream& stream, const ScanProblem& problem)
      : map_(map),
        stream_(stream),
        in_place_(map.dtype == ResultDType(problem.op, problem.dtype)) {}

  std::uint64_t CopyBytes(const Stream&, const Chosen&) const override {
    return in_place_ ? 0 : static_cast<std::uint64_t>(map_.n) * SizeOf(map_.dtype);
  }
  double GatherSeconds(const Pace& pace) const override { return MapSeconds(map_, stream_, pace); }
  Division Divide(const ScanProblem&, const Chosen&, const Team&) const override { return {}; }
  void Account(const Chosen&, Stats& stats) const override {
    AccountMap(map_, /*in_cache=*/false, stats);
  }
  void Launch(Stream& on, ScanProblem& problem, const Chosen& strategy) const override {
    void* const mapped =
        in_place_ ? problem.out : on.Scratch(static_cast<std::size_t>(CopyBytes(on, strategy)));
    LaunchMapRange(map_, 0, map_.n, mapped, on);
    problem.x = mapped;
    if (!on.stopped()) LaunchOn(on, problem, strategy);
  }

 private:
  const MapProblem& map_;
  const Stream& stream_;
  const bool in_place_;
};

// Returns the problem without its data. REQUIRES: the axis exists.
ScanProblem ProblemOf(const ScanSpec& spec, DType dtype, const Shape& shape) {
  const int at = spec.axis < 0 ? spec.axis + shape.rank : spec.axis;
  ScanProblem problem{.dtype = dtype,
                      .op = spec.op,
                      .outer = 1,
                      .length = shape[at],
                      .exclusive = spec.exclusive,
                      .reverse = spec.reverse};
  for (int i = 0; i < at; ++i) problem.outer *= shape[i];
  for (int i = at + 1; i < shape.rank; ++i) problem.inner *= shape[i];
  return problem;
}

}  // namespace

absl::StatusOr<ResultType> TypeOf(const ScanSpec& spec, absl::Span<const View> x) {
  if (!Scans(spec.op)) {
    return Invalid("BAD_OPERATION",
                   absl::StrCat("a scan cannot compute ", Absl(Name(spec.op)),
                                "; a scan computes sum, product, min, max, all or any"),
                   {{"field", "op"}, {"value", std::string(Name(spec.op))}});
  }
  const std::optional<MapStage> in =
      spec.expression.has_value() ? std::make_optional(MapStage{*spec.expression, x.subspan(1)})
                                  : std::nullopt;
  absl::StatusOr<ArrayType> of = FoldedType(x[0], in.has_value() ? &*in : nullptr);
  if (!of.ok()) return of.status();
  if (absl::Status status = CheckFolds(spec.op, of->dtype, 1); !status.ok()) return status;
  absl::Status status = FoldedAxes(of->shape, {spec.axis}).status();
  if (!status.ok()) return status;
  if (IsLogical(spec.op)) status = MapOf(spec, x).status();
  if (!status.ok()) return status;
  const absl::StatusOr<ArrayType> type =
      MakeArrayType(ResultDType(spec.op, of->dtype),
                    {of->shape.dims.data(), static_cast<std::size_t>(of->shape.rank)});
  if (!type.ok()) return type.status();
  return ResultType{.arrays = {*type}};
}

absl::StatusOr<ScalarResult> Run(const ScanSpec& spec, const Arguments& with) {
  const absl::StatusOr<std::unique_ptr<ScannedMap>> map = MapOf(spec, with.x);
  if (!map.ok()) return map.status();
  if (*map != nullptr) {
    const MapProblem& mapped = (*map)->staged->problem();
    ScanProblem problem = ProblemOf(spec, mapped.dtype, (*map)->staged->type().shape);
    return ArrayRun(ExecuteTo(with.out[0], &problem.out, with.stream, problem, with.options,
                              ScanOfMap(mapped, with.stream, problem)));
  }
  const View& x = with.x[0];
  ScanProblem problem = ProblemOf(spec, x.dtype, x.shape);
  const OperandSlot operands[] = {{x, HasGaps(x), &problem.x}};
  return ArrayRun(ExecuteTo(with.out[0], &problem.out, with.stream, problem, with.options,
                            WholeLaunch<ScanProblem>(operands)));
}

}  // namespace tessera
