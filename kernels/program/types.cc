#include <optional>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "kernels/program/program.h"

namespace tessera {
namespace {

absl::Status StepFailed(std::uint32_t step) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "STEP_FAILED",
                   absl::StrCat("the step needs the result of step ", step, ", which failed"),
                   {{"failed_step", absl::StrCat(step)}});
}

absl::Status Uncounted(std::uint32_t step) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPERAND",
                   absl::StrCat("the length of the result of step ", step,
                                " is not known before the program runs, so no other step can use"
                                " it; store it in a buffer for the next call"),
                   {{"field", "step"}, {"value", absl::StrCat(step)}});
}

absl::Status FindTypes(const ProgramPlan& program, PlannedStep& step) {
  step.views.clear();
  for (PlannedOperand& operand : step.operands) {
    if (operand.kind == PlannedOperand::Kind::kResult) {
      const PlannedStep& earlier = program.steps[operand.step];
      if (!earlier.status.ok()) return StepFailed(operand.step);
      if (earlier.result.uncounted) return OfOperand(operand.name, Uncounted(operand.step));
      if (operand.output >= earlier.result.arrays.size() ||
          (operand.output < earlier.destinations.size() &&
           earlier.destinations[operand.output] == Destination::kNone))
        return OfOperand(operand.name, BadOutput(operand.output));
      operand.type = earlier.result.arrays[operand.output];
    }
    const std::optional<Window>& window = operand.window;
    const absl::StatusOr<View> view =
        window.has_value()
            ? MakeView(operand.type, nullptr, window->offset, window->shape, window->strides)
            : WholeView(operand.type, nullptr);
    if (!view.ok()) return OfOperand(operand.name, view.status());
    operand.view = *view;
    step.views.push_back(*view);
  }
  ASSIGN_OR_RETURN(step.result, TypeOf(step.spec, step.views));
  return absl::OkStatus();
}

}  // namespace

void InheritFailure(const ProgramPlan& program, PlannedStep& step) {
  for (const PlannedOperand& operand : step.operands) {
    if (!step.status.ok()) return;
    if (operand.kind == PlannedOperand::Kind::kResult && !program.steps[operand.step].status.ok())
      step.status = StepFailed(operand.step);
  }
}

void FindTypes(ProgramPlan& program) {
  for (PlannedStep& step : program.steps) {
    for (const PlannedOperand& operand : step.operands)
      if (operand.kind == PlannedOperand::Kind::kResult) ++program.steps[operand.step].readers;
    if (step.status.ok()) step.status = FindTypes(program, step);
  }
}

}  // namespace tessera
