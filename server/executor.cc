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

// An interval that nobody polls for.
constexpr std::int64_t kLongInterval = steady_clock::duration(std::chrono::seconds(1)).count();

std::int64_t Ticks() { return steady_clock::now().time_since_epoch().count(); }

}  // namespace

absl::Status DeviceLostError(const Device& device) {
  return MakeError(absl::StatusCode::kUnavailable, "DEVICE_LOST", "the device has failed for good",
                   {{"device", device.info().name}});
}

absl::StatusOr<std::unique_ptr<Executor>> Executor::Start(
    Device& device, const Settings& settings, absl::FunctionRef<absl::Status(Stream&)> prepare) {
  std::unique_ptr<Executor> executor(new Executor(device, settings));
  const int lanes = settings.workers + (settings.reserve ? 1 : 0);
  for (int i = 0; i < lanes; ++i) {
    absl::StatusOr<std::unique_ptr<Stream>> stream = MakeStream(device);
    if (!stream.ok()) return stream.status();
    (*stream)->SetScratchBudget(settings.scratch);
    if (absl::Status status = prepare(**stream); !status.ok()) return status;
    executor->lanes_.push_back(std::make_unique<Lane>());
    executor->lanes_.back()->stream = *std::move(stream);
    executor->idle_.push_back(executor->lanes_.back().get());
  }
  executor->interval_ = kLongInterval;
  for (int i = 0; i < lanes; ++i) executor->threads_.emplace_back(&Executor::Work, executor.get());
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

absl::Status Executor::Submit(Task& task, TaskSize size) {
  if (device_.lost()) return DeviceLostError(device_);
  task.size_ = size;
  bool wake = false;
  absl::Status status;
  {
    const std::lock_guard lock(mutex_);
    status = Enqueue(task, wake);
  }
  if (wake) wake_.notify_one();
  return status;
}

absl::Status Executor::RunOrSubmit(Task& task) {
  if (device_.lost()) return DeviceLostError(device_);
  task.size_ = TaskSize::kTiny;
  bool wake = false;
  absl::Status status;
  Lane* lane = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (active_.empty() && running_ == 0 && !idle_.empty()) {
      NoteArrival();
      task.stop_.store(false, std::memory_order_relaxed);
      least_used_ = std::max(least_used_, QueueOf(task.share_).used);
      lane = TakeLane(task);
    } else {
      status = Enqueue(task, wake);
    }
  }
  if (lane != nullptr) {
    const std::size_t share = task.share_;
    const std::int64_t took = Run(task, *lane);
    const std::lock_guard lock(mutex_);
    wake = GiveBack(*lane, TaskSize::kTiny, share, took);
  }
  if (wake) wake_.notify_one();
  return status;
}

absl::Status Executor::Enqueue(Task& task, bool& wake) {
  Queue& queue = QueueOf(task.share_);
  if (queue.length >= settings_.queue_length) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
        "the device has as much work waiting as the server accepts",
        {{"device", device_.info().name}, {"limit", absl::StrCat(settings_.queue_length)}});
  }
  NoteArrival();
  task.stop_.store(false, std::memory_order_relaxed);
  task.queued_ = true;
  task.number_ = ++arrivals_;
  List& list = ListOf(queue, task);
  task.before_ = list.last;
  task.behind_ = nullptr;
  if (queue.length == 0) {
    queue.used = std::max(queue.used, least_used_);
    active_.push_back(&queue);
  }
  (list.last == nullptr ? list.first : list.last->behind_) = &task;
  list.last = &task;
  ++queue.length;
  const std::size_t waiting = waiting_.load(std::memory_order_relaxed);
  waiting_.store(waiting + 1, std::memory_order_release);
  wake = !polling_ || waiting > 0;
  return absl::OkStatus();
}

Executor::Queue& Executor::QueueOf(std::size_t share) {
  while (queues_.size() <= share) queues_.emplace_back();
  return queues_[share];
}

Task* Executor::FirstOf(const Queue& queue) const {
  Task* const large = large_running_ < settings_.workers ? queue.large.first : nullptr;
  Task* const other = queue.others.first;
  if (large == nullptr || other == nullptr) return large == nullptr ? other : large;
  return large->number_ < other->number_ ? large : other;
}

bool Executor::MayRunSome() const {
  return !idle_.empty() && std::any_of(active_.begin(), active_.end(), [this](const Queue* queue) {
    return FirstOf(*queue) != nullptr;
  });
}

Task* Executor::First() {
  auto next = active_.end();
  for (auto it = active_.begin(); it != active_.end(); ++it) {
    if (FirstOf(**it) != nullptr && (next == active_.end() || (*it)->used < (*next)->used))
      next = it;
  }
  if (next == active_.end()) return nullptr;
  std::rotate(next, next + 1, active_.end());  // among equals it is the last from now on
  least_used_ = std::max(least_used_, active_.back()->used);
  return FirstOf(*active_.back());
}

void Executor::NoteArrival() {
  if (settings_.spin.count() == 0) return;
  const std::int64_t now = Ticks();
  const std::int64_t interval = std::min(now - last_arrival_, kLongInterval);
  last_arrival_ = now;
  interval_ += (interval - interval_) / 8;
}

Executor::Lane* Executor::TakeLane(const Task& task) {
  Lane* lane = idle_.back();
  idle_.pop_back();
  if (task.size_ != TaskSize::kTiny) ++running_;
  if (task.size_ == TaskSize::kLarge) ++large_running_;
  return lane;
}

bool Executor::GiveBack(Lane& lane, TaskSize size, std::size_t share, std::int64_t took) {
  if (size != TaskSize::kTiny) --running_;
  if (size == TaskSize::kLarge) --large_running_;
  QueueOf(share).used += took;
  idle_.push_back(&lane);
  return !active_.empty();
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
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    const std::int64_t since = lane->busy_since.load(std::memory_order_relaxed);
    if (since != 0) longest = std::max(longest, now - since);
  }
  return steady_clock::duration(longest);
}

void Executor::Unlink(Task& task) {
  Queue& queue = QueueOf(task.share_);
  List& list = ListOf(queue, task);
  (task.before_ == nullptr ? list.first : task.before_->behind_) = task.behind_;
  (task.behind_ == nullptr ? list.last : task.behind_->before_) = task.before_;
  if (--queue.length == 0) std::erase(active_, &queue);
  task.before_ = task.behind_ = nullptr;
  task.queued_ = false;
  waiting_.store(waiting_.load(std::memory_order_relaxed) - 1, std::memory_order_release);
}

std::int64_t Executor::Run(Task& task, Lane& lane) {
  const std::int64_t begin = Ticks();
  lane.busy_since.store(begin, std::memory_order_relaxed);
  lane.stream->WatchStop(&task.stop_);
  task.Run(*lane.stream);
  lane.stream->WatchStop(nullptr);
  lane.busy_since.store(0, std::memory_order_relaxed);
  return Ticks() - begin;
}

void Executor::Work() {
  Lane* lane = nullptr;
  std::unique_lock lock(mutex_);
  while (Task* task = Next(lock, lane)) {
    const TaskSize size = task->size_;
    const std::size_t share = task->share_;
    std::int64_t took = 0;
    lock.unlock();
    if (device_.lost()) {
      task->Refuse(DeviceLostError(device_));
    } else {
      took = Run(*task, *lane);
    }
    lock.lock();
    GiveBack(*lane, size, share, took);  // and looks for what waits
  }
}

Task* Executor::Next(std::unique_lock<std::mutex>& lock, Lane*& lane) {
  if (active_.empty() && !stopping_ && !polling_) Poll(lock);
  wake_.wait(lock, [this] { return active_.empty() ? stopping_ : MayRunSome(); });
  if (active_.empty()) {
    wake_.notify_all();  // whoever waits for what has been cancelled
    return nullptr;
  }
  Task* const task = First();
  Unlink(*task);
  lane = TakeLane(*task);
  if (stopping_) wake_.notify_all();  // whoever waits for a lane may have nothing left to do
  return task;
}

void Executor::Poll(std::unique_lock<std::mutex>& lock) {
  const steady_clock::duration most = settings_.spin;
  const steady_clock::duration likely(2 * interval_);
  if (likely > most) return;  // polling would end before the next task comes
  polling_ = true;
  lock.unlock();
  const steady_clock::time_point end = steady_clock::now() + likely;
  while (waiting_.load(std::memory_order_acquire) == 0 && steady_clock::now() < end) Pause();
  lock.lock();
  polling_ = false;
}

}  // namespace tessera
