// Runs the steps. Adjacent steps that fit together run as a batch.

#include <cstdint>
#include <vector>

#include "kernels/base/status_macros.h"
#include "kernels/program/program.h"

namespace tessera {
namespace {

// Whether the error ends the whole program, because no later step can succeed.
bool EndsProgram(const absl::Status& status, const Stream& stream) {
  return !status.ok() && (stream.stopped() || stream.device().lost());
}

// Whether the step can share a launch with the steps from `first` to the previous step.
bool Joins(const ProgramPlan& program, std::size_t first, PlannedStep& step) {
  const PlannedStep& like = program.steps[first];
  if (!step.batched || !SharesBatch(step.spec, step.views[0], like.spec, like.views[0]))
    return false;
  for (const PlannedOperand& operand : step.operands)
    if (operand.kind == PlannedOperand::Kind::kResult && operand.step >= first) return false;
  InheritFailure(program, step);
  if (step.status.ok()) MakeViews(program, step);
  return step.status.ok();
}

absl::Status RunTogether(absl::Span<PlannedStep> steps, Stream& stream) {
  std::vector<ScalarResult> results(steps.size());
  const auto operand = [&](std::size_t i, int o) -> const View& {
    return steps[i].views[static_cast<std::size_t>(o)];
  };
  const absl::Status status = RunBatch(steps[0].spec, stream, operand, absl::MakeSpan(results));
  if (EndsProgram(status, stream)) return status;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    steps[i].status = status;
    steps[i].outcome = results[i];
  }
  return absl::OkStatus();
}

// Stores a scalar where later steps read it.
absl::Status StoreScalar(const PlannedStep& step, Stream& stream) {
  const Scalar& value = step.outcome.value;
  const DType dtype = step.result.arrays[0].dtype;
  void* const memory = step.memory[0];
  if (IsInteger(dtype)) {
    const std::int64_t integer = step.result.is_index ? value.index : value.integer;
    // The host is little endian, so these are the low bytes of a value that fits in them.
    return CopyToDevice(stream, memory, &integer, SizeOf(dtype));
  }
  char* const unrounded = static_cast<char*>(memory) + kUnrounded;
  RETURN_IF_ERROR(CopyToDevice(stream, unrounded, &value.real, sizeof value.real));
  return RunCopy(stream, WholeView({DType::kF64, {}}, unrounded), dtype, memory);
}

}  // namespace

absl::StatusOr<ScalarResult> RunStep(const ProgramPlan& program, const PlannedStep& step,
                                     Stream& stream, const RunOptions& options) {
  const Output outputs[kMostResults] = {step.memory[0], step.memory[1]};
  if (step.selection == nullptr) return Run(step.spec, stream, step.views, outputs, options);
  ASSIGN_OR_RETURN(const Stats stats,
                   RunProductTopK(stream, SelectionOf(program, step), *step.selection, outputs[0],
                                  outputs[1], options));
  return ScalarResult{.stats = stats};
}

absl::Status RunSteps(ProgramPlan& program, Stream& stream, StepRunner run) {
  std::vector<PlannedStep>& steps = program.steps;
  for (std::size_t i = 0; i < steps.size();) {
    PlannedStep& step = steps[i];
    InheritFailure(program, step);
    if (step.status.ok()) MakeViews(program, step);
    if (!step.status.ok() || step.folded) {
      ++i;
      continue;
    }
    std::size_t end = i + 1;
    while (step.batched && end < steps.size() && Joins(program, i, steps[end])) ++end;
    if (end - i > 1) {
      RETURN_IF_ERROR(RunTogether(absl::MakeSpan(steps).subspan(i, end - i), stream));
    } else {
      const ScratchMark before = stream.MarkScratch();
      absl::StatusOr<ScalarResult> outcome = run(step);
      stream.RewindScratch(before);  // the next step runs after this one
      step.status = outcome.status();
      if (outcome.ok()) step.outcome = *outcome;
      if (EndsProgram(step.status, stream)) return step.status;
    }
    for (; i < end; ++i) {
      if (steps[i].status.ok() && steps[i].result.scalar && steps[i].readers > 0)
        steps[i].status = StoreScalar(steps[i], stream);
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
