#include "server/compute/execute_call.h"

namespace tessera {
namespace {

// The maximum numbers of steps in a tiny and in a small program. More steps take longer, even if
// each does little, because steps are launched one after another.
constexpr std::size_t kMostTinySteps = 16;
constexpr std::size_t kMostSmallSteps = 64;

}  // namespace

absl::StatusOr<Device*> ExecuteCall::Prepare() {
  if (program_.Stores())
    if (absl::Status status = RequireWrite(); !status.ok()) return status;
  absl::Status charged = ChargeAnswer(
      program_.memory(), "other calls leave too little memory for planning the program");
  if (!charged.ok()) return charged;
  return program_.Prepare(awaited());
}

TaskSize ExecuteCall::SizeOn(const Device& device) {
  if (program_.steps() > kMostSmallSteps) return TaskSize::kLarge;
  return SizeOf(program_.LeastMicroseconds(device),
                program_.steps() <= kMostTinySteps && !program_.timed());
}

absl::Status ExecuteCall::RunOn(Stream& stream) {
  absl::Status status = program_.Plan(stream);
  if (status.ok()) status = ChargeAnswer(program_.answer_memory());
  if (status.ok()) status = program_.Run(stream);
  if (!status.ok()) return status;
  response_.set_queue_us(queue_us());
  status = program_.Answer(stream, response_);
  response_.set_total_us(total_us());
  return status;
}

void ExecuteCall::Release(Chores* chores) { program_.Release(chores); }

}  // namespace tessera
