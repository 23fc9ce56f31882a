#include "server/device_call.h"

#include "kernels/base/error.h"

namespace tessera {

absl::Status CallerLeft() {
  return MakeError(absl::StatusCode::kCancelled, "CANCELLED",
                   "the caller left, or its deadline passed, before the work was done");
}

void DeviceCall::Start(std::size_t bytes) {
  const absl::Status status = Guarded([&]() -> absl::Status {
    if (absl::Status accepted = Accept(bytes); !accepted.ok()) return accepted;
    absl::StatusOr<Device*> device = Prepare();
    if (!device.ok()) return device.status();
    executor_ = &core().compute(**device);
    accept_time_ = SteadyNow();
    return IsShort(**device) ? executor_->RunOrSubmit(*this) : executor_->Submit(*this);
  });
  if (!status.ok()) {
    executor_ = nullptr;
    Conclude(status);
  }
}

void DeviceCall::Run(Stream& stream) {
  queue_us_ = absl::ToDoubleMicroseconds(SteadyNow() - accept_time_);
  absl::Status status = BeginRequest(stream);
  if (status.ok()) status = Guarded([&] { return RunOn(stream); });
  const absl::Status ended = EndRequest(stream);
  Conclude(status.ok() ? ended : status);
}

void DeviceCall::Conclude(const absl::Status& status) {
  Release();
  End(status);
}

void DeviceCall::OnCancel() {
  if (executor_ != nullptr && executor_->Cancel(*this)) Conclude(CallerLeft());
}

}  // namespace tessera
