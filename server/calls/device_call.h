// A unary call that needs a stream of a device.
#pragma once

#include <atomic>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/calls/unary_call.h"
#include "server/core.h"

namespace tessera {

// If its client leaves or its deadline passes, the call leaves the queue immediately, or tells the
// stream to stop if it is running.
class DeviceCall : public UnaryCall, private Task {
 public:
  DeviceCall(Core& core, std::string_view method, UnaryExchange& exchange)
      : UnaryCall(core, method, exchange), Task(exchange.caller().tenant->number()) {}
  // Called once, on the thread on which the call arrived. The request exists until the call has
  // ended.
  void Start();

 protected:
  // Returns the size of a task that takes a device at least `least` microseconds.
  TaskSize SizeOf(double least, bool may_be_tiny);

 private:
  // Checks what can be checked without a stream, and returns the device to run on.
  virtual absl::StatusOr<Device*> Prepare() = 0;
  // Called after Prepare. This thread may run a tiny task itself.
  virtual TaskSize SizeOn(const Device&) { return TaskSize::kLarge; }
  // Called on a worker or, for a tiny task, on this thread, inside a request of the stream.
  virtual absl::Status RunOn(Stream& stream) = 0;
  // Releases the operands. chores: frees the memory, because this thread must not; null: this
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

// Returns the status of a call whose client has left: CANCELLED.
absl::Status CallerLeft();

}  // namespace tessera
