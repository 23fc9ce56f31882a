// A unary call that needs a stream of a device.
#pragma once

#include <atomic>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/calls/unary_call.h"
#include "server/core.h"

namespace tessera {

// A call whose client leaves, or whose deadline passes, leaves the queue at once, and tells the
// stream to stop when it runs.
class DeviceCall : public UnaryCall, private Task {
 public:
  DeviceCall(Core& core, std::string_view method, UnaryExchange& exchange)
      : UnaryCall(core, method, exchange), Task(exchange.caller().tenant->number()) {}
  // On the thread that brought the call, once. The request lives until the call has ended.
  void Start();

 protected:
  // The size of what takes a device at least so many microseconds.
  TaskSize SizeOf(double least, bool may_be_tiny);

 private:
  // Checks the request as far as that needs no stream: the device to run on.
  virtual absl::StatusOr<Device*> Prepare() = 0;
  // After Prepare. What is tiny this thread may as well do.
  virtual TaskSize SizeOn(const Device&) { return TaskSize::kLarge; }
  // On a worker or, if it is tiny, on this thread; inside a request of the stream.
  virtual absl::Status RunOn(Stream& stream) = 0;
  // Releases the operands. chores: they free the memory, since this thread must not; null: this
  // thread frees it.
  virtual void Release(Chores* chores) = 0;

  void Run(Stream& stream) final;
  void Refuse(const absl::Status& status) final { Drop(status); }
  // Ends a call that has not run.
  void Drop(const absl::Status& status);
  void OnCancel() final;

  std::atomic<Executor*> executor_{nullptr};
  std::atomic<bool> left_{false};  // whether its client has left
};

// What a call ends with whose client has left: CANCELLED.
absl::Status CallerLeft();

}  // namespace tessera
