// Work that may block for a while, on threads of its own: memory of devices is taken and freed
// here, so that the threads of gRPC go on serving.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace tessera {

// Thread safe.
class Chores {
 public:
  // queue_length: how many of a share may wait for Submit to take another.
  Chores(int threads, std::size_t queue_length);
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

  // To be called at intervals longer than most work takes: if something waits and nothing has begun
  // since the last time, all threads hang, with a device as likely as not, and another one joins
  // them, up to a limit.
  void Relieve();

 private:
  struct Chore {
    absl::AnyInvocable<void()> work;
    std::optional<std::size_t> share;  // that it counts against
  };
  void Add(absl::AnyInvocable<void()> work);
  void Work();

  const std::size_t queue_length_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Chore> queue_;
  std::vector<std::size_t> lengths_;  // of what waits, by share
  bool begun_ = false;                // something has, since Relieve was called
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace tessera
