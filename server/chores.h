// Work that may block for a while, on threads of its own: memory of devices is taken and freed
// here, so that the threads of gRPC go on serving.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace tessera {

// Thread safe.
class Chores {
 public:
  // queue_length: how many may wait for Submit to take another.
  Chores(int threads, std::size_t queue_length);
  // Does what is queued, then stops.
  ~Chores();
  Chores(const Chores&) = delete;
  Chores& operator=(const Chores&) = delete;

  // Never waits; the work must not throw. RESOURCE_EXHAUSTED / QUEUE_FULL {limit}, and the work is
  // gone without having been called.
  absl::Status Submit(absl::AnyInvocable<void()> work);

  // Lets go of something whose end may free memory. Never refuses.
  void Release(std::shared_ptr<const void> doomed);

 private:
  void Work();

  const std::size_t queue_length_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<absl::AnyInvocable<void()>> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tessera
