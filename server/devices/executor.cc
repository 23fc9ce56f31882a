#include "server/devices/executor.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"
#include "server/clock.h"

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

// An interval that is too long to poll for.
constexpr std::int64_t kLongInterval = steady_clock::duration(std::chrono::seconds(1)).count();

// The amount that threads for large tasks add to their nice value. With this nice value, they get a
// tenth of the CPU time while threads for other tasks need CPU time, and all of it otherwise.
constexpr int kGiveWay = 10;

std::int64_t Ticks() { return absl::ToInt64Nanoseconds(SteadyNow() - absl::UnixEpoch()); }

}  // namespace

absl::Status DeviceLostError(const Device& device) {
  return MakeError(absl::StatusCode::kUnavailable, "DEVICE_LOST", "the device has failed for good",
                   {{"device", device.info().name}});
}

absl::StatusOr<std::unique_ptr<Executor>> Executor::Start(
    Device& device, const Settings& settings, absl::FunctionRef<absl::Status(Stream&)> prepare) {
  std::unique_ptr<Executor> executor(new Executor(device, settings));
  const int streams = settings.reserve ? 2 * settings.workers : settings.workers;
  for (int i = 0; i < streams; ++i) {
    const bool large = settings.reserve && i < settings.workers;
    ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream,
                     large ? MakeLargeStream(device) : MakeStream(device));
    stream->SetScratchBudget(settings.scratch);
    RETURN_IF_ERROR(prepare(*stream));
    executor->streams_.push_back(std::make_unique<WorkerStream>());
    executor->streams_.back()->stream = std::move(stream);
    executor->groups_[i / settings.workers].idle.push_back(executor->streams_.back().get());
  }
  executor->interval_ = kLongInterval;
  for (int i = 0; i < streams; ++i) {
    Group& group = executor->groups_[i / settings.workers];
    executor->threads_.emplace_back(&Executor::Work, executor.get(), std::ref(group));
  }
  std::unique_lock lock(executor->mutex_);
  executor->thread_prepared_.wait(lock, [&] { return executor->prepared_ == streams; });
  return executor;
}

Executor::~Executor() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (Group& group : groups_) group.wake.notify_all();
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
  if (wake) GroupOf(size).wake.notify_one();
  return status;
}

absl::Status Executor::RunOrSubmit(Task& task) {
  if (device_.lost()) return DeviceLostError(device_);
  task.size_ = TaskSize::kTiny;
  Group& group = GroupOf(TaskSize::kTiny);
  bool wake = false;
  absl::Status status;
  WorkerStream* worker = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (waiting() == 0 && running_ == 0 && !group.idle.empty()) {
      NoteArrival();
      group.least_used = std::max(group.least_used, QueueOf(group, task.share_).used);
      worker = TakeStream(task);
    } else {
      status = Enqueue(task, wake);
    }
  }
  if (worker != nullptr) {
    PrepareThread(device_, /*shares_loops=*/false);  // cheaper than waking a thread
    const std::size_t share = task.share_;
    const std::int64_t took = Run(task, *worker);
    const std::lock_guard lock(mutex_);
    wake = GiveBack(*worker, TaskSize::kTiny, share, took);
  }
  if (wake) group.wake.notify_one();
  return status;
}

absl::Status Executor::Enqueue(Task& task, bool& wake) {
  if (lengths_.size() <= task.share_) lengths_.resize(task.share_ + 1);
  if (lengths_[task.share_] >= settings_.queue_length) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
        "the maximum number of tasks are already waiting for the device",
        {{"device", device_.info().name}, {"limit", absl::StrCat(settings_.queue_length)}});
  }
  // Memory is allocated first, so that the task is in no list if that fails.
  Group& group = GroupOf(task.size_);
  Queue& queue = QueueOf(group, task.share_);
  group.active.reserve(group.queues.size());
  NoteArrival();
  task.run_ = 0;
  task.queued_ = true;
  task.before_ = queue.last;
  task.behind_ = nullptr;
  if (queue.first == nullptr) {
    queue.used = std::max(queue.used, group.least_used);
    group.active.push_back(&queue);
  }
  (queue.last == nullptr ? queue.first : queue.last->behind_) = &task;
  queue.last = &task;
  ++lengths_[task.share_];
  const std::size_t waiting = group.waiting.load(std::memory_order_relaxed);
  group.waiting.store(waiting + 1, std::memory_order_release);
  wake = !group.polling || waiting > 0;
  return absl::OkStatus();
}

Executor::Queue& Executor::QueueOf(Group& group, std::size_t share) {
  while (group.queues.size() <= share) group.queues.emplace_back();
  return group.queues[share];
}

Task* Executor::First(Group& group) {
  const auto next =
      std::min_element(group.active.begin(), group.active.end(),
                       [](const Queue* a, const Queue* b) { return a->used < b->used; });
  std::rotate(next, next + 1, group.active.end());  // it is now the last among equals
  group.least_used = std::max(group.least_used, group.active.back()->used);
  return group.active.back()->first;
}

void Executor::NoteArrival() {
  if (settings_.spin.count() == 0) return;
  const std::int64_t now = Ticks();
  const std::int64_t interval = std::min(now - last_arrival_, kLongInterval);
  last_arrival_ = now;
  interval_ += (interval - interval_) / 8;
}

Executor::WorkerStream* Executor::TakeStream(Task& task) {
  std::vector<WorkerStream*>& idle = GroupOf(task.size_).idle;
  WorkerStream* worker = idle.back();
  idle.pop_back();
  task.run_ = worker->run = ++runs_;
  worker->stop.store(false, std::memory_order_relaxed);
  if (task.size_ != TaskSize::kTiny) ++running_;
  return worker;
}

bool Executor::GiveBack(WorkerStream& worker, TaskSize size, std::size_t share, std::int64_t took) {
  if (size != TaskSize::kTiny) --running_;
  worker.run = 0;
  Group& group = GroupOf(size);
  QueueOf(group, share).used += took;
  group.idle.push_back(&worker);
  return !group.active.empty();
}

bool Executor::Cancel(Task& task) {
  const std::lock_guard lock(mutex_);
  if (task.queued_) {
    Unlink(task);
    return true;
  }
  for (const std::unique_ptr<WorkerStream>& worker : streams_)
    if (task.run_ != 0 && worker->run == task.run_)
      worker->stop.store(true, std::memory_order_relaxed);
  return false;
}

void Executor::RefuseWaiting() {
  std::unique_lock lock(mutex_);
  for (Group& group : groups_) {
    while (!group.active.empty()) {
      Task* const task = First(group);
      Unlink(*task);
      lock.unlock();
      task->Refuse(DeviceLostError(device_));
      lock.lock();
    }
  }
}

std::chrono::steady_clock::duration Executor::LongestRun() const {
  const std::int64_t now = Ticks();
  std::int64_t longest = 0;
  for (const std::unique_ptr<WorkerStream>& worker : streams_) {
    const std::int64_t since = worker->busy_since.load(std::memory_order_relaxed);
    if (since != 0) longest = std::max(longest, now - since);
  }
  return steady_clock::duration(longest);
}

absl::Duration Executor::StopOverdue(Counts counts) {
  if (settings_.overrun == absl::InfiniteDuration()) return counts(absl::FromChrono(LongestRun()));
  const std::int64_t now = Ticks();
  absl::Duration longest;
  const std::lock_guard lock(mutex_);
  for (const std::unique_ptr<WorkerStream>& worker : streams_) {
    const std::int64_t since = worker->busy_since.load(std::memory_order_relaxed);
    if (worker->run == 0 || since == 0) continue;
    const absl::Duration over = counts(absl::Nanoseconds(now - since)) - settings_.overrun -
                                absl::Seconds(kOverrun * worker->stream->expected_seconds());
    if (over <= absl::ZeroDuration()) continue;
    worker->stop.store(true, std::memory_order_relaxed);
    longest = std::max(longest, over);
  }
  return longest;
}

void Executor::Unlink(Task& task) {
  Group& group = GroupOf(task.size_);
  Queue& queue = QueueOf(group, task.share_);
  (task.before_ == nullptr ? queue.first : task.before_->behind_) = task.behind_;
  (task.behind_ == nullptr ? queue.last : task.behind_->before_) = task.before_;
  if (queue.first == nullptr) std::erase(group.active, &queue);
  --lengths_[task.share_];
  task.before_ = task.behind_ = nullptr;
  task.queued_ = false;
  const std::size_t waiting = group.waiting.load(std::memory_order_relaxed);
  group.waiting.store(waiting - 1, std::memory_order_release);
}

std::int64_t Executor::Run(Task& task, WorkerStream& worker) {
  const std::int64_t begin = Ticks();
  worker.stream->ExpectNothing();
  worker.busy_since.store(begin, std::memory_order_relaxed);
  worker.stream->WatchStop(&worker.stop);
  task.Run(*worker.stream);
  worker.stream->WatchStop(nullptr);
  worker.busy_since.store(0, std::memory_order_relaxed);
  return Ticks() - begin;
}

void Executor::Work(Group& group) {
  if (settings_.reserve && &group == &GroupOf(TaskSize::kLarge) &&
      device_.info().backend == Backend::kCpu) {
    // This applies to this thread and to the threads that it creates. If it fails, all threads keep
    // the same priority.
    setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), getpriority(PRIO_PROCESS, 0) + kGiveWay);
  }
  PrepareThread(device_, settings_.shares_loops);
  WorkerStream* worker = nullptr;
  std::unique_lock lock(mutex_);
  ++prepared_;
  thread_prepared_.notify_one();
  while (Task* task = Next(lock, group, worker)) {
    const TaskSize size = task->size_;
    const std::size_t share = task->share_;
    std::int64_t took = 0;
    lock.unlock();
    if (device_.lost()) {
      task->Refuse(DeviceLostError(device_));
    } else {
      took = Run(*task, *worker);
    }
    lock.lock();
    GiveBack(*worker, size, share, took);  // the loop then looks for the next task
  }
}

Task* Executor::Next(std::unique_lock<std::mutex>& lock, Group& group, WorkerStream*& worker) {
  if (group.active.empty() && !stopping_ && !group.polling) Poll(lock, group);
  group.wake.wait(lock, [&] { return group.active.empty() ? stopping_ : !group.idle.empty(); });
  if (group.active.empty()) return nullptr;
  Task* const task = First(group);
  Unlink(*task);
  worker = TakeStream(*task);
  return task;
}

void Executor::Poll(std::unique_lock<std::mutex>& lock, Group& group) {
  const steady_clock::duration most = settings_.spin;
  const steady_clock::duration likely(2 * interval_);
  if (likely > most) return;  // polling would end before the next task is likely to arrive
  group.polling = true;
  lock.unlock();
  const steady_clock::time_point end = steady_clock::now() + likely;
  while (group.waiting.load(std::memory_order_acquire) == 0 && steady_clock::now() < end) Pause();
  lock.lock();
  group.polling = false;
}

}  // namespace tessera
