#include "server/calls/device_call.h"

#include "absl/strings/str_format.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "kernels/device/profiler_range.h"

namespace tessera {
namespace {

// An operation that takes at most this long, including the transfer of its inline arrays, is tiny.
// If the device runs nothing but tiny operations, the operation runs on the thread that receives
// it, because waking a worker would take longer.
constexpr double kTinyMicroseconds = 10;
// A task is small if the lower bound on its time is at most this.
constexpr double kSmallMicroseconds = 500;

absl::Status TookTooLong(double expected, double spare) {
  const double limit = spare + Executor::kOverrun * expected;
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "OPERATION_TOO_LONG",
      absl::StrFormat("the operation was stopped after %.3g s; it was expected to take %.3g s",
                      limit, expected),
      {{"estimate_seconds", absl::StrFormat("%.3g", expected)},
       {"limit_seconds", absl::StrFormat("%.3g", limit)}});
}

}  // namespace

absl::Status CallerLeft() {
  return MakeError(absl::StatusCode::kCancelled, "CANCELLED",
                   "the caller left, or its deadline passed, before the work was done");
}

void DeviceCall::Start() {
  const absl::Status status = Guarded([&]() -> absl::Status {
    RETURN_IF_ERROR(Accept());
    ASSIGN_OR_RETURN(Device* const device, Prepare());
    if (awaited_.empty()) return Queue(*device);
    awaited_.Then([this, device](const absl::Status& arrived) {
      const absl::Status queued = arrived.ok() ? Guarded([&] { return Queue(*device); }) : arrived;
      if (!queued.ok()) Drop(queued);
    });
    return absl::OkStatus();
  });
  if (!status.ok()) Drop(status);
}

absl::Status DeviceCall::Queue(const Device& device) {
  if (left_) return CallerLeft();
  Executor& executor = devices_.compute(device);
  const TaskSize size = SizeOn(device);
  executor_ = &executor;
  if (size == TaskSize::kTiny) {
    const CallQueue::Leave leave;
    if (leave.granted()) return executor.RunOrSubmit(*this);
  }
  return executor.Submit(*this, size);
}

TaskSize DeviceCall::SizeOf(double least, bool may_be_tiny) {
  if (may_be_tiny && least <= kTinyMicroseconds) return TaskSize::kTiny;
  return least <= kSmallMicroseconds ? TaskSize::kSmall : TaskSize::kLarge;
}

void DeviceCall::Run(Stream& stream) {
  const ProfilerRange range(method());
  NoteBegin();
  absl::Status status = BeginRequest(stream);
  if (status.ok()) status = Guarded([&] { return RunOn(stream); });
  // The stream was told to stop, but not because the client has left.
  if (!status.ok() && stream.stopped() && !left_ && !stream.device().lost())
    status = TookTooLong(stream.expected_seconds(), devices_.max_operation_seconds());
  const absl::Status ended = EndRequest(stream);
  // The operands are released before the response is sent: once a client has its response, the
  // memory of buffers that it has deleted must be free.
  Release(nullptr);
  End(status.ok() ? ended : status);
}

void DeviceCall::Drop(const absl::Status& status) {
  executor_ = nullptr;
  Release(&parts().chores);
  End(status);
}

void DeviceCall::OnCancel() {
  left_ = true;
  if (awaited_.Cancel()) return Drop(CallerLeft());
  Executor* const executor = executor_;
  if (executor != nullptr && executor->Cancel(*this)) Drop(CallerLeft());
}

}  // namespace tessera
