#include "server/device_call.h"

#include "kernels/base/error.h"

namespace tessera {
namespace {

// What fits the window of a connection that nobody reads cannot be told from what was read.
constexpr std::uint64_t kLargeAnswer = 64 << 10;

}  // namespace

absl::Status CallerLeft() {
  return MakeError(absl::StatusCode::kCancelled, "CANCELLED",
                   "the caller left, or its deadline passed, before the work was done");
}

void DeviceCall::Start(const google::protobuf::Message& request) {
  const absl::Status status = Guarded([&]() -> absl::Status {
    absl::StatusOr<Core::Accepted> accepted = core_.Accept(request);
    if (!accepted.ok()) return accepted.status();
    accepted_ = *std::move(accepted);
    absl::StatusOr<Device*> device = Prepare();
    if (!device.ok()) return device.status();
    executor_ = &core_.compute(**device);
    accept_time_ = SteadyNow();
    return executor_->Submit(*this);
  });
  if (!status.ok()) {
    executor_ = nullptr;
    End(status);
  }
}

void DeviceCall::Run(Stream& stream) {
  queue_us_ = absl::ToDoubleMicroseconds(SteadyNow() - accept_time_);
  absl::Status status = BeginRequest(stream);
  if (status.ok()) status = Guarded([&] { return RunOn(stream); });
  const absl::Status ended = EndRequest(stream);
  End(status.ok() ? ended : status);
}

absl::Status DeviceCall::ChargeAnswer(std::uint64_t bytes) {
  absl::StatusOr<Charge> memory =
      Charge::Take(core_.host_memory(), bytes, "HOST_MEMORY_EXHAUSTED",
                   "there is no memory for the answer beside the messages of other calls");
  if (!memory.ok()) return memory.status();
  answer_memory_ = *std::move(memory);
  return absl::OkStatus();
}

void DeviceCall::End(const absl::Status& status) {
  Release();
  if (answer_memory_.amount() >= kLargeAnswer) core_.answers().Add(context_);
  ended_ = true;
  tessera::Finish(method_, context_, *this, status);
}

void DeviceCall::OnDone() {
  if (answer_memory_.amount() >= kLargeAnswer) core_.answers().Remove(context_);
  delete this;
}

void DeviceCall::OnCancel() {
  if (executor_ != nullptr && executor_->Cancel(*this)) End(CallerLeft());
}

}  // namespace tessera
