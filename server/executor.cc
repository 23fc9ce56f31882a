#include "server/executor.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/error.h"

namespace tessera {
namespace {

using std::chrono::steady_clock;

// Tells the core that this is a wait loop, so that its sibling hyperthread gets the execution
// units.
void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

absl::Status StillWanted(const Task& task, const Device& device) {
  if (std::chrono::system_clock::now() >= task.deadline) {
    return MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                     "the deadline passed before the work reached the device");
  }
  if (task.cancelled && task.cancelled()) {
    return MakeError(absl::StatusCode::kCancelled, "CANCELLED",
                     "the caller left before the work reached the device");
  }
  if (device.lost()) return DeviceLostError(device);
  return absl::OkStatus();
}

}  // namespace

absl::Status DeviceLostError(const Device& device) {
  return MakeError(absl::StatusCode::kUnavailable, "DEVICE_LOST",
                   "the device has failed and the server is about to exit",
                   {{"device", device.info().name}});
}

absl::StatusOr<std::unique_ptr<Executor>> Executor::Start(Device& device, int workers,
                                                          std::size_t queue_length,
                                                          std::chrono::microseconds spin) {
  std::unique_ptr<Executor> executor(new Executor(device, queue_length, spin));
  for (int i = 0; i < workers; ++i) {
    absl::StatusOr<std::unique_ptr<Lane>> lane = MakeLane(device);
    if (!lane.ok()) return lane.status();
    executor->lanes_.push_back(*std::move(lane));
  }
  for (const std::unique_ptr<Lane>& lane : executor->lanes_) {
    executor->threads_.emplace_back(&Executor::Work, executor.get(), std::ref(*lane));
  }
  return executor;
}

Executor::~Executor() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status Executor::Submit(Task task) {
  if (device_.lost()) return DeviceLostError(device_);
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    if (queue_.size() >= queue_length_) {
      return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                       "the device has as much work waiting as the server accepts",
                       {{"device", device_.info().name}, {"limit", absl::StrCat(queue_length_)}});
    }
    queue_.push_back(std::move(task));
    waiting_.store(queue_.size(), std::memory_order_release);
    wake = !polling_ || queue_.size() > 1;
  }
  if (wake) wake_.notify_one();
  return absl::OkStatus();
}

void Executor::Work(Lane& lane) {
  Task task;
  while (Next(task)) {
    const absl::Status wanted = StillWanted(task, device_);
    if (wanted.ok()) {
      task.run(&lane);
    } else {
      task.run(wanted);
    }
    task = Task();  // what it captured must not live until the next one comes
  }
}

bool Executor::Next(Task& task) {
  std::unique_lock lock(mutex_);
  if (queue_.empty() && !stopping_ && !polling_ && spin_.count() > 0) {
    polling_ = true;
    lock.unlock();
    const steady_clock::time_point end = steady_clock::now() + spin_;
    while (waiting_.load(std::memory_order_acquire) == 0 && steady_clock::now() < end) Pause();
    lock.lock();
    polling_ = false;
  }
  wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
  if (queue_.empty()) return false;
  task = std::move(queue_.front());
  queue_.pop_front();
  waiting_.store(queue_.size(), std::memory_order_release);
  return true;
}

}  // namespace tessera
