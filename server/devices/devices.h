// The server's devices, and what their work needs: workers, streams, scratch budgets, estimates and
// probes.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/choose/pace.h"
#include "server/buffers/buffer_store.h"
#include "server/buffers/slots.h"
#include "server/devices/device_probe.h"
#include "server/devices/executor.h"
#include "server/options.h"

namespace tessera {

// Thread safe. Its destructor ends the work on the devices.
class Devices {
 public:
  using List = std::vector<std::unique_ptr<Device>>;
  // list: at least one device, the most preferred first. limits: how much memory the buffers of
  // each may take. The options and the list must outlive the result. Returns INVALID_ARGUMENT /
  // BAD_DEVICE if two devices have the same name, or the errors of the devices.
  static absl::StatusOr<std::unique_ptr<Devices>> Start(
      const Options& options, const List& list,
      const std::vector<BufferStore::DeviceLimit>& limits);

  const List& list() const { return list_; }
  // Returns the first device that is not lost, or the first device if all are lost.
  Device& First() const;
  // Returns the device that a BufferSpec names, or First() for an empty name. Errors:
  // INVALID_ARGUMENT / BAD_DEVICE {field, value, valid}; UNAVAILABLE / DEVICE_LOST.
  absl::StatusOr<Device*> Find(std::string_view name) const;

  // The executor for operations on a device of the list.
  Executor& compute(const Device& device) const { return *states_.at(&device)->compute; }
  // The executor for copies to and from a device. Every upload and download has at most one task
  // here, so the limit on their number bounds the queue. No operation waits behind an upload.
  Executor& transfers(const Device& device) const { return *states_.at(&device)->transfers; }

  // The slots from which a device's downloads are sent.
  SlotPool& slots(const Device& device) const { return *states_.at(&device)->slots; }
  // Frees slots that have not been used recently. May wait for the devices' work.
  void TrimSlots();

  // Returns a stream for copies between the device and the one on which a call runs. No other call
  // uses the stream until the pointer is destroyed. Returns the errors of MakeStream.
  using Bridge = std::unique_ptr<Stream, std::function<void(Stream*)>>;
  absl::StatusOr<Bridge> BridgeTo(Device& device) const;
  // A device's stream for operations on sharded operands. The caller owns it while it holds the
  // lock, and may have to wait for the lock. There is no deadlock, because a call takes several of
  // these streams in the order of the list. Their scratch memory counts toward the scratch memory
  // of operations.
  struct Member {
    std::unique_lock<std::mutex> lock;
    Stream& stream;
  };
  Member TeamStream(const Device& device) const;

  // The budget for the device memory that operations need while they run, in addition to buffers.
  const Budget& scratch(const Device& device) const { return states_.at(&device)->scratch; }
  // Sets the limits on the time that an operation may take on the device, and the rates from which
  // that time is estimated.
  void SetLimits(const Device& device, RunOptions& options) const;
  // The longest time that an operation may be expected to take.
  double max_operation_seconds() const { return options_.max_operation_seconds; }

  // Returns the longest time that an operation, a transfer or a probe has been waiting for the
  // device, or zero once the device is lost. An operation on the CPU is told to stop once it takes
  // far longer than expected (Executor::StopOverdue); only its time after that counts as a wait.
  // counts: takes the length of a period that ends now and returns how much of it is waiting.
  absl::Duration LongestWait(const Device& device, Executor::Counts counts) const;
  // Whether the device responds, that is, whether its probe is not overdue.
  bool IsAnswering(const Device& device) const;

 private:
  struct State {
    State(std::uint64_t scratch_limit, const Device& device)
        : scratch(scratch_limit), pace(device.info()) {}
    Budget scratch;
    Pace pace;
    std::mutex bridges_mutex;
    std::vector<std::unique_ptr<Stream>> bridges;  // those that no call uses
    std::mutex team_mutex;
    std::unique_ptr<Stream> team;
    std::shared_ptr<SlotPool> slots;
    std::unique_ptr<Executor> compute;
    std::unique_ptr<Executor> transfers;
    std::unique_ptr<DeviceProbe> probe;
  };
  Devices(const Options& options, const List& list) : options_(options), list_(list) {}
  absl::Status Add(Device& device, std::uint64_t buffer_limit);
  absl::StatusOr<std::unique_ptr<Executor>> StartCompute(Device& device, State& state) const;

  const Options& options_;
  const List& list_;
  std::map<const Device*, std::unique_ptr<State>> states_;
};

}  // namespace tessera
