// Runs work on one device: a bounded queue and a few threads, each with a lane of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/compute.h"

namespace tessera {

// One piece of work for a device.
struct Task {
  // Called exactly once, on a thread of the executor: with a lane, or with the reason why the work
  // will never reach the device (DEADLINE_EXCEEDED, CANCELLED, UNAVAILABLE / DEVICE_LOST). Must not
  // throw.
  absl::AnyInvocable<void(absl::StatusOr<Lane*>)> run;
  std::chrono::system_clock::time_point deadline = std::chrono::system_clock::time_point::max();
  // Whether the caller has gone; may be empty. Asked just before the work would start.
  std::function<bool()> cancelled;
};

// What every call is told once the device has failed for good: UNAVAILABLE / DEVICE_LOST {device}.
absl::Status DeviceLostError(const Device& device);

// Thread safe. The device outlives it.
class Executor {
 public:
  // Makes the lanes. queue_length: how many tasks may wait, besides the ones that run. spin: how
  // long a thread without work polls before it sleeps; waking a sleeping thread costs more than a
  // small operation.
  static absl::StatusOr<std::unique_ptr<Executor>> Start(Device& device, int workers,
                                                         std::size_t queue_length,
                                                         std::chrono::microseconds spin);

  // Runs what is queued, then stops.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Never waits. Unless OK the task is gone without having been called: RESOURCE_EXHAUSTED /
  // QUEUE_FULL {limit}, UNAVAILABLE / DEVICE_LOST.
  absl::Status Submit(Task task);

  int workers() const { return static_cast<int>(threads_.size()); }
  // How many tasks wait for a thread now.
  std::size_t waiting() const { return waiting_.load(std::memory_order_relaxed); }

 private:
  Executor(Device& device, std::size_t queue_length, std::chrono::microseconds spin)
      : device_(device), queue_length_(queue_length), spin_(spin) {}

  void Work(Lane& lane);
  // Waits for a task; false when there are none left and the executor stops.
  bool Next(Task& task);

  Device& device_;
  const std::size_t queue_length_;
  const std::chrono::microseconds spin_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> queue_;
  bool stopping_ = false;
  // At most one thread polls at a time: it takes the next task without being woken.
  bool polling_ = false;
  // queue_.size(), to read without the mutex: for the polling thread, and for waiting().
  std::atomic<std::size_t> waiting_{0};

  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<std::thread> threads_;
};

}  // namespace tessera
