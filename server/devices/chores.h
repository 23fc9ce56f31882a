// Separate threads for work that may block for a while. They allocate and free device memory, so
// that gRPC's threads can continue to serve.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace tessera {

// Thread safe. Each share has its own queue, and releases have another one. The queues are served
// round robin. If there are several threads, no queue may use all of them: one is left for the
// other queues.
class Chores {
 public:
  // `queue_length` is the maximum number of waiting chores per share. If chores are waiting and
  // none has begun for as long as `patience`, Relieve adds a thread.
  Chores(int threads, std::size_t queue_length,
         std::chrono::steady_clock::duration patience = std::chrono::seconds(1));
  // Finishes the queued work, then stops.
  ~Chores();
  Chores(const Chores&) = delete;
  Chores& operator=(const Chores&) = delete;

  // Queues work without waiting. The work must not throw. `share` is a small number that identifies
  // the work's queue. If the share's queue is full, returns RESOURCE_EXHAUSTED / QUEUE_FULL {limit}
  // and destroys the work without having called it.
  absl::Status Submit(absl::AnyInvocable<void()> work, std::size_t share = 0);

  // These functions drop references, which may free memory. Several references are dropped one
  // after another. Releases are never refused.
  void Release(std::shared_ptr<const void> doomed);
  void Release(std::vector<std::shared_ptr<const void>> doomed);

  // To be called regularly. If all threads have been busy for too long, probably because a device
  // hangs, adds another thread, up to a limit. An added thread ends when no chores are waiting.
  void Relieve();

  // Returns how long the oldest running chore has been running, or zero if there is none.
  std::chrono::steady_clock::duration LongestRun() const;

 private:
  using Work = absl::AnyInvocable<void()>;

  // The caller holds the mutex.
  void Add(std::size_t queue, Work work);
  // Returns the next queue from which a thread may take work, if there is one. `stays` says whether
  // the thread is permanent, not one that Relieve has added. The caller holds the mutex.
  std::optional<std::size_t> Next(bool stays) const;
  void Run(bool stays);

  struct Queue {
    std::deque<Work> waiting;
    std::size_t running = 0;  // number of its chores that are running
  };

  const std::size_t queue_length_;
  const std::size_t most_running_;  // maximum for one queue, on threads that stay
  const std::chrono::steady_clock::duration patience_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Queue> queues_;                                  // the releases first, then by share
  std::size_t turn_ = 0;                                      // the queue that was served last
  std::size_t waiting_ = 0;                                   // chores in all queues
  std::list<std::chrono::steady_clock::time_point> running_;  // when each began, in that order
  std::chrono::steady_clock::time_point last_begin_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  std::vector<std::thread::id> left_;  // the threads in threads_ that have ended
};

}  // namespace tessera
