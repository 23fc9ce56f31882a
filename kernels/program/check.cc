#include "absl/strings/str_format.h"
#include "kernels/base/error.h"
#include "kernels/program/program.h"

namespace tessera {

bool PlannedStep::IsPlain() const {
  return options.strategy.empty() && options.launch.block_size == 0 &&
         options.launch.grid_size == 0 && options.launch.items_per_thread == 0;
}

absl::Status CheckSteps(ProgramPlan& program, Stream& stream, double max_seconds) {
  double seconds = 0;
  for (PlannedStep& step : program.steps) {
    InheritFailure(program, step);
    if (!step.status.ok()) continue;
    MakeViews(program, step);
    step.batched =
        step.IsPlain() && !step.options.timing && FitsBatch(step.spec, step.result, step.views);
    if (step.batched) continue;
    RunOptions options = step.options;
    options.check_only = true;
    const absl::StatusOr<ScalarResult> checked = RunStep(program, step, stream, options);
    step.status = checked.status();
    if (!checked.ok()) continue;
    seconds += checked->stats.estimate_seconds;
    step.outcome.stats = checked->stats;
    step.options.expected = true;
  }
  stream.Expect(seconds);
  if (seconds <= max_seconds) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "OPERATION_TOO_LONG",
      absl::StrFormat("the steps together are expected to take %.3g s; at most %.3g s are allowed",
                      seconds, max_seconds),
      {{"estimate_seconds", absl::StrFormat("%.3g", seconds)},
       {"limit_seconds", absl::StrFormat("%.3g", max_seconds)}});
}

}  // namespace tessera
