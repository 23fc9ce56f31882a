// Runs work on one device. It has a bounded queue for each share, a few streams, and one thread per
// stream. Tasks that are not large may have a reserve of streams and threads. A tiny task may also
// run on the thread that submits it.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/compute.h"

namespace tessera {

// How much of the device's time a task takes. For a tiny task, the cost of waking a thread would be
// noticeable. Large tasks do not use the reserve.
enum class TaskSize { kTiny, kSmall, kLarge };

// One piece of work for a device. It may be submitted again once it has run.
class Task {
 public:
  // `share` is a small number that identifies the task's queue. If tasks of several shares are
  // waiting, the share that has used the least stream time goes first.
  explicit Task(std::size_t share = 0) : share_(share) {}
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

 protected:
  ~Task() = default;

 private:
  friend class Executor;
  // Called on a thread of the executor, or by RunOrSubmit, with exclusive use of the stream. The
  // task may be destroyed before Run returns. Must not throw.
  virtual void Run(Stream& stream) = 0;
  // Called instead of Run if the device is lost, on a thread of the executor or in RefuseWaiting.
  virtual void Refuse(const absl::Status& status) = 0;

  const std::size_t share_;
  // These are guarded by the executor's mutex. A queue is a linked list of the tasks themselves, so
  // that a task can leave from its middle.
  Task* before_ = nullptr;
  Task* behind_ = nullptr;
  bool queued_ = false;
  TaskSize size_ = TaskSize::kLarge;
  std::uint64_t run_ = 0;  // identifies its current run; 0 until it begins to run
};

// Returns the error that calls get once the device has failed for good: UNAVAILABLE / DEVICE_LOST
// {device}.
absl::Status DeviceLostError(const Device& device);

// Thread safe. The device must outlive it.
class Executor {
 public:
  struct Settings {
    // How many tasks run at the same time. With a reserve, this is the number of large tasks and
    // also the number of other tasks, which have separate streams. On a device that computes on the
    // executor's threads, the threads for large tasks then have a lower priority.
    int workers = 1;
    bool reserve = false;
    // How many tasks of a share may wait, in addition to those that are running.
    std::size_t queue_length = 1;
    // Before a thread without work sleeps, it polls for twice the mean interval between recent
    // tasks, provided that this is not longer than `spin`. Waking a sleeping thread costs more than
    // a small operation.
    std::chrono::microseconds spin{0};
    // The scratch budget for all streams together; null means no limit.
    Budget* scratch = nullptr;
    // Whether each thread divides loops on the host among as many threads as the device's work may
    // use. These threads are created at the start.
    bool shares_loops = false;
    // For a device whose work can be stopped: a task is told to stop once it has run for longer
    // than `overrun` plus kOverrun times the time that its stream expects. Infinite means never.
    absl::Duration overrun = absl::InfiniteDuration();
  };
  static constexpr double kOverrun = 8;
  // Makes the streams, and calls `prepare` for each of them before the threads start.
  static absl::StatusOr<std::unique_ptr<Executor>> Start(
      Device& device, const Settings& settings,
      absl::FunctionRef<absl::Status(Stream&)> prepare = [](Stream&) { return absl::OkStatus(); });

  // Runs the queued tasks, then stops. REQUIRES: no thread is in any other function of this object.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Queues a task without waiting. The task must exist until it has run. If this returns an error,
  // the task is not queued: RESOURCE_EXHAUSTED / QUEUE_FULL {limit} or UNAVAILABLE / DEVICE_LOST.
  absl::Status Submit(Task& task, TaskSize size = TaskSize::kLarge);
  // Runs a tiny task on the calling thread if no task is waiting, a stream is idle, and all running
  // tasks are tiny (otherwise the device might make it wait for a longer task). Otherwise does the
  // same as Submit. Running the task here avoids waking a thread, but occupies the caller for as
  // long as the task takes.
  absl::Status RunOrSubmit(Task& task);

  // Returns true if the task was waiting; it will then not run. Returns false if it has run, or if
  // it is running, in which case its stream is told to stop. REQUIRES: the task has been submitted
  // and still exists.
  bool Cancel(Task& task);

  // Refuses the waiting tasks. Idle threads of a lost device do the same, but all threads may be
  // hanging.
  void RefuseWaiting();

  int workers() const { return settings_.workers; }
  // How many tasks are waiting for a thread.
  std::size_t waiting() const {
    return groups_[0].waiting.load(std::memory_order_relaxed) +
           groups_[1].waiting.load(std::memory_order_relaxed);
  }
  // Returns how long the longest-running task has been running.
  std::chrono::steady_clock::duration LongestRun() const;
  // Takes the length of a period that ends now, and returns for how much of it the process was not
  // stopped.
  using Counts = absl::FunctionRef<absl::Duration(absl::Duration)>;
  // Tells tasks that have overrun to stop. Returns how long the longest overrun has lasted, or
  // LongestRun if `overrun` is infinite.
  absl::Duration StopOverdue(Counts counts);

 private:
  // A stream and what it is doing. Belongs to the thread that has taken it from `idle`.
  struct WorkerStream {
    std::unique_ptr<Stream> stream;
    // When the worker's task began, in ticks of the steady clock, or 0 if it has no task.
    std::atomic<std::int64_t> busy_since{0};
    // Tells the running task to stop; the stream checks it.
    std::atomic<bool> stop{false};
    std::uint64_t run = 0;  // run_ of its task; 0 if it has none. Guarded by mutex_.
  };

  // The waiting tasks of one share in a group, in order of arrival.
  struct Queue {
    Task* first = nullptr;
    Task* last = nullptr;
    // The time that its tasks have used, in ticks of the steady clock. An idle share earns no
    // credit: when it has tasks again, it starts level with the others.
    std::int64_t used = 0;
  };
  // Streams, one thread per stream, and the tasks that are waiting for them. Guarded by the mutex.
  struct Group {
    std::condition_variable wake;
    std::deque<Queue> queues;  // by share
    // The queues with tasks. Among queues that have used equally much time, the one that has waited
    // longest comes first.
    std::vector<Queue*> active;
    // The `used` time of the most recently served share at the time when it was served.
    std::int64_t least_used = 0;
    // Whether a thread is polling. At most one thread polls at a time; it takes the next task
    // without being woken.
    bool polling = false;
    // The total length of the queues, for reads without the mutex.
    std::atomic<std::size_t> waiting{0};
    std::vector<WorkerStream*> idle;
  };

  Executor(Device& device, const Settings& settings) : device_(device), settings_(settings) {}

  void Work(Group& group);
  // Waits for a task and a stream for it. Returns null when the executor is stopping and no tasks
  // are left. The caller holds the mutex.
  Task* Next(std::unique_lock<std::mutex>& lock, Group& group, WorkerStream*& worker);
  void Poll(std::unique_lock<std::mutex>& lock, Group& group);
  // Returns how long the task took, in ticks of the steady clock. The caller does not hold the
  // mutex.
  std::int64_t Run(Task& task, WorkerStream& worker);
  // The caller holds the mutex.
  absl::Status Enqueue(Task& task, bool& wake);
  // Returns the group in which tasks of a size run.
  Group& GroupOf(TaskSize size) {
    return groups_[settings_.reserve && size != TaskSize::kLarge ? 1 : 0];
  }
  static Queue& QueueOf(Group& group, std::size_t share);
  // Returns the next task. REQUIRES: a task is waiting.
  static Task* First(Group& group);
  void Unlink(Task& task);
  WorkerStream* TakeStream(Task& task);
  // Returns a stream to `idle` after a task. size, share, took: the properties of that task.
  // Returns whether a thread must be woken for a waiting task.
  bool GiveBack(WorkerStream& worker, TaskSize size, std::size_t share, std::int64_t took);
  void NoteArrival();

  Device& device_;
  const Settings settings_;

  std::mutex mutex_;
  // With a reserve, the first group has the large tasks, and the second group has the other tasks.
  // Without a reserve, the second group is empty.
  std::array<Group, 2> groups_;
  std::vector<std::size_t> lengths_;  // per share, its queues in both groups together
  bool stopping_ = false;
  std::uint64_t runs_ = 0;  // tasks that have begun to run so far
  int prepared_ = 0;        // threads that are ready for tasks
  std::condition_variable thread_prepared_;
  int running_ = 0;                // running tasks that are not tiny
  std::int64_t last_arrival_ = 0;  // when a task last arrived, in ticks of the steady clock
  std::int64_t interval_ = 0;      // mean interval between tasks, in the same ticks

  std::vector<std::unique_ptr<WorkerStream>> streams_;
  std::vector<std::thread> threads_;
};

}  // namespace tessera
