// Dot and Reduce of whole arrays, alone and in batches.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "kernels/choose/map_range.h"
#include "kernels/compute.h"
#include "kernels/run/execute.h"
#include "kernels/run/reduce.h"
#include "kernels/run/stage.h"
#include "kernels/same_bits/batch.h"

namespace tessera {

absl::Status EmptyInput(ReduceOp op) {
  return Invalid("EMPTY_INPUT", absl::StrCat(Absl(Name(op)), " of an empty input has no value"),
                 {{"op", std::string(Name(op))}});
}

absl::Status CheckFolds(ReduceOp op, DType dtype, std::int64_t n) {
  if (!Folds(op, dtype)) {
    return Invalid(
        "BAD_DTYPE",
        absl::StrCat(Absl(Name(op)), " does not fold truth values; only sum, mean, all and any do"),
        {{"op", std::string(Name(op))}, {"dtype", std::string(Name(dtype))}});
  }
  return n == 0 && NeedsElements(op) ? EmptyInput(op) : absl::OkStatus();
}

absl::StatusOr<ArrayType> FoldedType(const View& x, const MapStage* in) {
  if (!IsMapped(x, in)) return ArrayType{x.dtype, x.shape};
  ASSIGN_OR_RETURN(std::unique_ptr<StagedMap> staged, StageReduce(x, in));
  return staged->type();
}

namespace {

// Reduces an expression's result. Either the strategy computes elements as it folds them, or a Map
// writes them to scratch memory first.
class FoldMap final : public Work<ReduceProblem> {
 public:
  FoldMap(const MapProblem& map, const Stream& stream) : map_(map), stream_(stream) {}

  std::uint64_t CopyBytes(const Stream&, const Chosen& strategy) const override {
    return strategy.reads_views ? 0 : static_cast<std::uint64_t>(map_.n) * SizeOf(map_.dtype);
  }
  double GatherSeconds(const Pace& pace) const override { return MapSeconds(map_, stream_, pace); }
  Division Divide(const ReduceProblem& problem, const Chosen& strategy,
                  const Team& team) const override {
    return strategy.reads_views ? DivisionOf(problem, strategy, team) : Division();
  }
  void Account(const Chosen& strategy, Stats& stats) const override {
    AccountMap(map_, /*in_cache=*/strategy.reads_views, stats);
  }
  void Launch(Stream& on, ReduceProblem& problem, const Chosen& strategy) const override {
    if (!strategy.reads_views) {
      problem.map = nullptr;
      void* const copy = on.Scratch(static_cast<std::size_t>(CopyBytes(on, strategy)));
      LaunchMapRange(map_, 0, map_.n, copy, on);
      problem.x = copy;
    }
    if (!on.stopped()) LaunchOn(on, problem, strategy);
  }

 private:
  const MapProblem& map_;
  const Stream& stream_;
};

// Runs a batch and fills in its results. launch(scalars) enqueues it, and problem_of(i, result)
// returns its problem i. `integer` is whether results are integers.
template <class Launch, class ProblemOf>
absl::Status ExecuteBatch(Stream& stream, bool integer, absl::Span<ScalarResult> results,
                          const Launch& launch, const ProblemOf& problem_of) {
  if (results.empty()) return absl::OkStatus();
  const auto& strategy = *Choose(problem_of(0, nullptr), stream.device());
  Scalar* scalars = nullptr;
  absl::Status status = Finished(stream, [&] {
    scalars = static_cast<Scalar*>(stream.HostScratch(results.size() * sizeof(Scalar)));
    std::fill_n(scalars, results.size(), Scalar{});
    launch(scalars);
    stream.Synchronize();
    if (strategy.wide.left_range == nullptr) return;
    for (std::size_t i = 0; i < results.size() && !stream.stopped(); ++i) {
      const auto problem = problem_of(i, scalars + i);
      if (strategy.wide.left_range(problem, stream)) strategy.wide.launch(problem, stream);
    }
  });
  if (!status.ok()) return status;
  for (std::size_t i = 0; i < results.size(); ++i)
    results[i] = {scalars[i], integer, StatsOf(strategy, problem_of(i, scalars + i))};
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ScalarResult> RunDot(Stream& stream, const View& a, const View& b,
                                    const RunOptions& options) {
  RETURN_IF_ERROR(CheckSame(a, b));
  DotProblem problem{.dtype = a.dtype, .n = a.elements()};
  const OperandSlot operands[] = {{a, HasGaps(a), &problem.a, &problem.a_view},
                                  {b, HasGaps(b), &problem.b, &problem.b_view}};
  return ExecuteScalar(stream, problem, IsInteger(a.dtype), options,
                       WholeLaunch<DotProblem>(operands));
}

absl::StatusOr<ScalarResult> RunReduce(Stream& stream, const View& x, ReduceOp op,
                                       const RunOptions& options, const MapStage* in) {
  if (IsMapped(x, in)) {
    ASSIGN_OR_RETURN(std::unique_ptr<StagedMap> staged, StageReduce(x, in));
    const MapProblem& map = staged->problem();
    const DType dtype = staged->type().dtype;
    RETURN_IF_ERROR(CheckFolds(op, dtype, map.n));
    ReduceProblem problem{.dtype = map.dtype, .op = op, .n = map.n, .map = &map};
    return ExecuteScalar(stream, problem, IsInteger(ScalarDType(op, dtype)), options,
                         FoldMap(map, stream));
  }
  RETURN_IF_ERROR(CheckFolds(op, x.dtype, x.elements()));
  ReduceProblem problem{.dtype = x.dtype, .op = op, .n = x.elements()};
  const OperandSlot operands[] = {{x, HasGaps(x), &problem.x, &problem.x_view}};
  return ExecuteScalar(stream, problem, IsInteger(ScalarDType(op, x.dtype)), options,
                       WholeLaunch<ReduceProblem>(operands));
}

absl::StatusOr<ArrayType> ReduceType(const View& x, ReduceOp op, const MapStage* in) {
  ASSIGN_OR_RETURN(const ArrayType folded, FoldedType(x, in));
  RETURN_IF_ERROR(CheckFolds(op, folded.dtype, folded.shape.elements()));
  return ArrayType{ResultDType(op, folded.dtype), {}};
}

void LaunchBatch(DType dtype, std::span<const DotItem> items, Scalar* results, Stream& stream) {
  const ProfilerRange range("batch");
#ifdef TESSERA_WITH_CUDA
  if (stream.device().info().backend == Backend::kCuda)
    return LaunchBatchCuda(dtype, items, results, stream);
#endif
  LaunchBatchCpu(dtype, items, results, stream);
}

void LaunchBatch(DType dtype, ReduceOp op, std::span<const ReduceItem> items, Scalar* results,
                 Stream& stream) {
  const ProfilerRange range("batch");
#ifdef TESSERA_WITH_CUDA
  if (stream.device().info().backend == Backend::kCuda)
    return LaunchBatchCuda(dtype, op, items, results, stream);
#endif
  LaunchBatchCpu(dtype, op, items, results, stream);
}

bool FitsBatch(const View& operand) {
  return IsComputed(operand.dtype) && operand.contiguous() &&
         operand.elements() <= kBatchBytes / static_cast<std::int64_t>(SizeOf(operand.dtype));
}

absl::Status RunDotBatch(Stream& stream, BatchOperand operand, absl::Span<ScalarResult> results) {
  if (results.empty()) return absl::OkStatus();
  const DType dtype = operand(0, 0).dtype;
  std::vector<DotItem> items(results.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const View &a = operand(i, 0), &b = operand(i, 1);
    RETURN_IF_ERROR(CheckSame(a, b));
    items[i] = {{a.data, b.data}, a.elements()};
  }
  return ExecuteBatch(
      stream, IsInteger(dtype), results,
      [&](Scalar* scalars) { LaunchBatch(dtype, items, scalars, stream); },
      [&](std::size_t i, Scalar* result) { return ProblemOf(dtype, items[i], result); });
}

absl::Status RunReduceBatch(Stream& stream, ReduceOp op, BatchOperand operand,
                            absl::Span<ScalarResult> results) {
  if (results.empty()) return absl::OkStatus();
  const DType dtype = operand(0, 0).dtype;
  std::vector<ReduceItem> items(results.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const View& x = operand(i, 0);
    if (x.elements() == 0 && NeedsElements(op)) return EmptyInput(op);
    items[i] = {{x.data}, x.elements()};
  }
  return ExecuteBatch(
      stream, IsInteger(ScalarDType(op, dtype)), results,
      [&](Scalar* scalars) { LaunchBatch(dtype, op, items, scalars, stream); },
      [&](std::size_t i, Scalar* result) { return ProblemOf(dtype, op, items[i], result); });
}

}  // namespace tessera
