// Work that may block for a while, on separate threads. Device memory is allocated and freed here,
// so that gRPC's threads keep serving.
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

// Thread safe. Each share has its own queue, and there is one for releases. The queues take turns,
// and each leaves one of several threads to the others.
class Chores {
 public:
  // queue_length: how many chores of a share may wait. patience: if chores wait and none begins for
  // this long, another thread joins.
  Chores(int threads, std::size_t queue_length,
         std::chrono::steady_clock::duration patience = std::chrono::seconds(1));
  // Does the queued work, then stops.
  ~Chores();
  Chores(const Chores&) = delete;
  Chores& operator=(const Chores&) = delete;

  // Never waits; the work must not throw. share: whose work it is, a small number.
  // RESOURCE_EXHAUSTED / QUEUE_FULL {limit}; the work is then destroyed without having been called.
  absl::Status Submit(absl::AnyInvocable<void()> work, std::size_t share = 0);

  // Drop references that may free memory, several of them one after another. They are never
  // refused.
  void Release(std::shared_ptr<const void> doomed);
  void Release(std::vector<std::shared_ptr<const void>> doomed);

  // To be called regularly. If all threads are busy for long, probably with a device that hangs,
  // another thread joins them, up to a limit. It ends when nothing waits.
  void Relieve();

  // Returns how long the oldest running chore has been running, or zero if there is none.
  std::chrono::steady_clock::duration LongestRun() const;

 private:
  using Work = absl::AnyInvocable<void()>;

  // The caller holds the mutex.
  void Add(std::size_t queue, Work work);
  // Returns the queue whose turn it is among those that a thread may take work from. The caller
  // holds the mutex.
  std::optional<std::size_t> Next(bool stays) const;
  void Run(bool stays);

  struct Queue {
    std::deque<Work> waiting;
    std::size_t running = 0;  // how many of its chores run
  };

  const std::size_t queue_length_;
  const std::size_t most_running_;  // for one queue, on threads that stay
  const std::chrono::steady_clock::duration patience_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Queue> queues_;                                  // first the releases, then by share
  std::size_t turn_ = 0;                                      // the queue that was served last
  std::size_t waiting_ = 0;                                   // in all queues
  std::list<std::chrono::steady_clock::time_point> running_;  // when each began, in that order
  std::chrono::steady_clock::time_point last_begin_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  std::vector<std::thread::id> left_;  // those of threads_ that have ended
};

}  // namespace tessera
