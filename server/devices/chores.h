// Work that may block for a while, on threads of its own: memory of devices is taken and freed
// here, so that the threads of gRPC go on serving.
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

// Thread safe. Each share has a queue of its own, and so has what is released: they take turns, and
// each leaves one of several threads to the others.
class Chores {
 public:
  // queue_length: how many of a share may wait for Submit to take another. patience: for how long
  // no work begins, while some waits, before another thread joins.
  Chores(int threads, std::size_t queue_length,
         std::chrono::steady_clock::duration patience = std::chrono::seconds(1));
  // Does what is queued, then stops.
  ~Chores();
  Chores(const Chores&) = delete;
  Chores& operator=(const Chores&) = delete;

  // Never waits; the work must not throw. share: whose work it is, a small number.
  // RESOURCE_EXHAUSTED / QUEUE_FULL {limit}, and the work is gone without having been called.
  absl::Status Submit(absl::AnyInvocable<void()> work, std::size_t share = 0);

  // Let go of what may free memory when it ends, several things one after the other. Never refuse.
  void Release(std::shared_ptr<const void> doomed);
  void Release(std::vector<std::shared_ptr<const void>> doomed);

  // To be called now and then: where all threads are busy for long, with a device that hangs as
  // likely as not, another one joins them, up to a limit; it leaves when nothing waits.
  void Relieve();

  // For how long the work has been running that began first of what runs; zero: none does.
  std::chrono::steady_clock::duration LongestRun() const;

 private:
  using Work = absl::AnyInvocable<void()>;

  // With the mutex.
  void Add(std::size_t queue, Work work);
  // With the mutex: the queue whose turn it is among those from which a thread may take.
  std::optional<std::size_t> Next(bool stays) const;
  void Run(bool stays);

  struct Queue {
    std::deque<Work> waiting;
    std::size_t running = 0;  // of its work, now
  };

  const std::size_t queue_length_;
  const std::size_t most_running_;  // of a queue, on threads that stay
  const std::chrono::steady_clock::duration patience_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Queue> queues_;                                  // of what is released, then by share
  std::size_t turn_ = 0;                                      // the queue that was served last
  std::size_t waiting_ = 0;                                   // in all queues
  std::list<std::chrono::steady_clock::time_point> running_;  // when each began, in that order
  std::chrono::steady_clock::time_point last_begin_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  std::vector<std::thread::id> left_;  // of threads_: those that have ended
};

}  // namespace tessera
