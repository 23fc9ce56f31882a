// A unary call that needs a stream of a device.
#pragma once

#include <atomic>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/message.h"
#include "server/core.h"

namespace tessera {

// From its acceptance to its end; deletes itself. A call whose client leaves, or whose deadline
// passes, leaves the queue at once, and tells the stream to stop when it runs.
class DeviceCall : public grpc::ServerUnaryReactor, private Task {
 public:
  // On the thread of gRPC that brought the call, once. The request lives until the call has ended.
  void Start(const google::protobuf::Message& request);

 protected:
  DeviceCall(Core& core, std::string_view method, grpc::CallbackServerContext& context)
      : core_(core), method_(method), context_(context) {}

  Core& core() { return core_; }
  // Time from acceptance to the begin on the stream, in microseconds.
  double queue_us() const { return queue_us_; }
  // Host memory for an answer of so many bytes, until it has been sent: RESOURCE_EXHAUSTED /
  // HOST_MEMORY_EXHAUSTED.
  absl::Status ChargeAnswer(std::uint64_t bytes);

 private:
  // Checks the request as far as that needs no stream: the device to run on.
  virtual absl::StatusOr<Device*> Prepare() = 0;
  // On a worker, inside a request of the stream.
  virtual absl::Status RunOn(Stream& stream) = 0;
  // Lets go of the operands: a client that has its answer may count on the memory of what it has
  // deleted.
  virtual void Release() = 0;

  void Run(Stream& stream) final;
  void Refuse(const absl::Status& status) final { End(status); }
  void End(const absl::Status& status);
  void OnCancel() final;
  void OnDone() final;
  // Whether gRPC may react on the thread that finds a reason to, rather than hand it to one of its
  // executor: once the call has its answer, what is left to do is short.
  bool InternalInlineable() final { return ended_; }

  Core& core_;
  const std::string_view method_;
  grpc::CallbackServerContext& context_;
  Core::Accepted accepted_;
  Charge answer_memory_;
  Executor* executor_ = nullptr;
  std::atomic<bool> ended_{false};
  absl::Time accept_time_;
  double queue_us_ = 0;
};

// What a call ends with whose client has left: CANCELLED.
absl::Status CallerLeft();

}  // namespace tessera
