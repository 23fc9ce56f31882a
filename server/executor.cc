#include "server/executor.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

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

std::int64_t Ticks() { return steady_clock::now().time_since_epoch().count(); }

}  // namespace

absl::Status DeviceLostError(const Device& device) {
  return MakeError(absl::StatusCode::kUnavailable, "DEVICE_LOST",
                   "the device has failed and the server is about to exit",
                   {{"device", device.info().name}});
}

absl::StatusOr<std::unique_ptr<Executor>> Executor::Start(
    Device& device, const Settings& settings, absl::FunctionRef<absl::Status(Stream&)> prepare) {
  std::unique_ptr<Executor> executor(new Executor(device, settings));
  for (int i = 0; i < settings.workers; ++i) {
    absl::StatusOr<std::unique_ptr<Stream>> stream = MakeStream(device);
    if (!stream.ok()) return stream.status();
    (*stream)->SetScratchBudget(settings.scratch);
    if (absl::Status status = prepare(**stream); !status.ok()) return status;
    executor->workers_.push_back(std::make_unique<Worker>());
    executor->workers_.back()->stream = *std::move(stream);
  }
  for (const std::unique_ptr<Worker>& worker : executor->workers_) {
    executor->threads_.emplace_back(&Executor::Work, executor.get(), std::ref(*worker));
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

absl::Status Executor::Submit(Task& task) {
  if (device_.lost()) return DeviceLostError(device_);
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    const std::size_t length = waiting_.load(std::memory_order_relaxed);
    if (length >= settings_.queue_length) {
      return MakeError(
          absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
          "the device has as much work waiting as the server accepts",
          {{"device", device_.info().name}, {"limit", absl::StrCat(settings_.queue_length)}});
    }
    task.stop_.store(false, std::memory_order_relaxed);
    task.queued_ = true;
    task.before_ = last_;
    task.behind_ = nullptr;
    (last_ == nullptr ? first_ : last_->behind_) = &task;
    last_ = &task;
    waiting_.store(length + 1, std::memory_order_release);
    wake = !polling_ || length > 0;
  }
  if (wake) wake_.notify_one();
  return absl::OkStatus();
}

bool Executor::Cancel(Task& task) {
  const std::lock_guard lock(mutex_);
  task.stop_.store(true, std::memory_order_relaxed);
  if (!task.queued_) return false;
  Unlink(task);
  return true;
}

std::chrono::steady_clock::duration Executor::LongestRun() const {
  const std::int64_t now = Ticks();
  std::int64_t longest = 0;
  for (const std::unique_ptr<Worker>& worker : workers_) {
    const std::int64_t since = worker->busy_since.load(std::memory_order_relaxed);
    if (since != 0) longest = std::max(longest, now - since);
  }
  return steady_clock::duration(longest);
}

void Executor::Unlink(Task& task) {
  (task.before_ == nullptr ? first_ : task.before_->behind_) = task.behind_;
  (task.behind_ == nullptr ? last_ : task.behind_->before_) = task.before_;
  task.before_ = task.behind_ = nullptr;
  task.queued_ = false;
  waiting_.store(waiting_.load(std::memory_order_relaxed) - 1, std::memory_order_release);
}

void Executor::Work(Worker& worker) {
  Stream& stream = *worker.stream;
  while (Task* task = Next()) {
    if (device_.lost()) {
      task->Refuse(DeviceLostError(device_));
      continue;
    }
    worker.busy_since.store(Ticks(), std::memory_order_relaxed);
    stream.WatchStop(&task->stop_);
    task->Run(stream);
    stream.WatchStop(nullptr);
    worker.busy_since.store(0, std::memory_order_relaxed);
  }
}

Task* Executor::Next() {
  std::unique_lock lock(mutex_);
  if (first_ == nullptr && !stopping_ && !polling_ && settings_.spin.count() > 0) {
    polling_ = true;
    lock.unlock();
    const steady_clock::time_point end = steady_clock::now() + settings_.spin;
    while (waiting_.load(std::memory_order_acquire) == 0 && steady_clock::now() < end) Pause();
    lock.lock();
    polling_ = false;
  }
  wake_.wait(lock, [this] { return stopping_ || first_ != nullptr; });
  Task* task = first_;
  if (task != nullptr) Unlink(*task);
  return task;
}

}  // namespace tessera
