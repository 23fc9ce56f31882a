// The bytes of restored buffers, which arrive after the buffers have become READY, and the calls
// that wait for them.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace tessera {

// The state of a call that waits for one or more arrays. The call and the arrivals share it.
struct ArrivalWait;

// The arrival of one array's bytes. Thread safe.
class Arrival {
 public:
  // ask: called when a call begins to wait, so that the array is loaded before those for which no
  // call waits. It must not take a lock that is held while a buffer is looked up.
  explicit Arrival(std::function<void()> ask) : ask_(std::move(ask)) {}

  // Whether the bytes are in the buffer or will never arrive.
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  // OK if the bytes are in the buffer. REQUIRES: ended().
  const absl::Status& status() const { return status_; }
  // Called once. Calls that wait for nothing else continue on this thread.
  void End(absl::Status status);

 private:
  friend class Awaited;
  void Add(std::shared_ptr<ArrivalWait> wait);

  const std::function<void()> ask_;
  std::atomic<bool> ended_{false};
  std::mutex mutex_;
  absl::Status status_;  // does not change once ended_ is true
  std::vector<std::shared_ptr<ArrivalWait>> waits_;
};

// The arrivals that one call waits for before it uses the buffers that it has found.
class Awaited {
 public:
  using Next = absl::AnyInvocable<void(const absl::Status&)>;

  Awaited() = default;
  Awaited(const Awaited&) = delete;
  Awaited& operator=(const Awaited&) = delete;

  // Called by the store for a buffer that a call has found, before Then.
  void Add(std::shared_ptr<Arrival> arrival);
  bool empty() const { return wait_ == nullptr; }
  // Calls next(status) once everything has arrived, on this thread or on the one that loads arrays;
  // the status is the first error. This object may be destroyed before Then returns. If Then
  // throws, `next` is never called. Called at most once. REQUIRES: !empty().
  void Then(Next next);
  // Returns true if Then has been called but `next` has not; `next` is then never called. Thread
  // safe.
  bool Cancel();

 private:
  std::shared_ptr<ArrivalWait> wait_;
  std::atomic<bool> waits_{false};  // whether other threads may use wait_
};

}  // namespace tessera
