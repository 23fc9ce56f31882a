// A unary call that needs a stream of a device.
#pragma once

#include <atomic>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/buffers/arrival.h"
#include "server/calls/unary_call.h"
#include "server/devices/devices.h"

namespace tessera {

// If the client leaves or the deadline passes, a waiting call leaves the queue immediately, and a
// running call tells its stream to stop.
class DeviceCall : public UnaryCall, private Task {
 public:
  DeviceCall(const CallParts& parts, const Devices& devices, std::string_view method,
             UnaryExchange& exchange)
      : UnaryCall(parts, method, exchange),
        Task(exchange.caller().tenant->number()),
        devices_(devices) {}
  // Called once, on the thread on which the call arrived. The request must exist until the call has
  // ended.
  void Start();

 protected:
  const Devices& devices() const { return devices_; }
  // The arrivals of the operands' bytes. Prepare adds the arrivals that the call needs.
  Awaited& awaited() { return awaited_; }
  // Returns the size of a task that takes a device at least `least` microseconds.
  TaskSize SizeOf(double least, bool may_be_tiny);

 private:
  // Checks what can be checked without a stream, and returns the device to run on.
  virtual absl::StatusOr<Device*> Prepare() = 0;
  // Called after Prepare. A tiny task may run on the thread that calls this.
  virtual TaskSize SizeOn(const Device&) { return TaskSize::kLarge; }
  // Called within a request of the stream, on a worker or, for a tiny task, on the thread of Start.
  virtual absl::Status RunOn(Stream& stream) = 0;
  // Releases the operands. Their memory is freed by a thread of `chores`, or by the calling thread
  // if `chores` is null.
  virtual void Release(Chores* chores) = 0;

  // Queues the call for the device once the bytes of its operands have arrived.
  absl::Status Queue(const Device& device);
  void Run(Stream& stream) final;
  void Refuse(const absl::Status& status) final { Drop(status); }
  // Ends a call that has not run.
  void Drop(const absl::Status& status);
  void OnCancel() final;

  const Devices& devices_;
  Awaited awaited_;
  std::atomic<Executor*> executor_{nullptr};
  std::atomic<bool> left_{false};  // whether the client has left
};

// Returns the status of a call whose client has left: CANCELLED.
absl::Status CallerLeft();

}  // namespace tessera
