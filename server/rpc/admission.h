// Counts the calls in progress, and rejects new ones once the server is draining.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tessera {

// Thread safe. It must outlive its tickets.
class Admission {
 public:
  // A call counts as in progress for as long as its ticket exists.
  class Ticket {
   public:
    Ticket() = default;
    Ticket(Ticket&& other) noexcept : admission_(std::move(other.admission_)) {}
    Ticket& operator=(Ticket&& other) noexcept = default;

   private:
    friend class Admission;
    struct Leave {
      void operator()(Admission* admission) const { admission->Exit(); }
    };
    explicit Ticket(Admission* admission) : admission_(admission) {}
    std::unique_ptr<Admission, Leave> admission_;
  };

  // Counts a call. Returns UNAVAILABLE / DRAINING after Close.
  absl::StatusOr<Ticket> Enter();
  void Close();
  bool closed() const { return closed_; }
  // Waits until no call is in progress. Returns false if the timeout passes first.
  bool WaitIdle(absl::Duration timeout);
  int in_progress() const { return calls_; }

 private:
  void Exit();

  // A call is counted before it checks closed_, so that WaitIdle misses no call that began before
  // Close.
  std::atomic<int> calls_{0};
  std::atomic<bool> closed_{false};
  std::mutex mutex_;  // only for WaitIdle
  std::condition_variable idle_;
};

}  // namespace tessera
