// Runs work on one device: a bounded queue for each share, a few streams, and as many threads to
// drive them. With a reserve, what is not large has streams and threads of its own; what is tiny
// may also run on the thread that brings it.
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

// How much of the device's time a task takes: beside a tiny one the waking of a thread would count;
// large ones leave the reserve to the others.
enum class TaskSize { kTiny, kSmall, kLarge };

// One piece of work for a device. It may be submitted again once it has run.
class Task {
 public:
  // share: whose turn the task takes, a small number. Where tasks of several wait, the one goes
  // first whose share has had least of the streams' time.
  explicit Task(std::size_t share = 0) : share_(share) {}
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

 protected:
  ~Task() = default;

 private:
  friend class Executor;
  // On a thread of the executor, with the stream for itself. The task may be gone on return. Must
  // not throw.
  virtual void Run(Stream& stream) = 0;
  // Instead of Run, on a thread of the executor or in RefuseWaiting: the device is lost.
  virtual void Refuse(const absl::Status& status) = 0;

  const std::size_t share_;
  // These belong to the executor's mutex. A queue is a list through the tasks themselves, so that
  // one can leave from its middle.
  Task* before_ = nullptr;
  Task* behind_ = nullptr;
  bool queued_ = false;
  TaskSize size_ = TaskSize::kLarge;
  std::uint64_t run_ = 0;  // the number of its run; 0: it has not begun to run
};

// What every call is told once the device has failed for good: UNAVAILABLE / DEVICE_LOST {device}.
absl::Status DeviceLostError(const Device& device);

// Thread safe. The device outlives it.
class Executor {
 public:
  struct Settings {
    // Tasks that run at once. With a reserve: so many large ones, on streams for such, and as many
    // others, for which the threads of a device that computes on them give way.
    int workers = 1;
    bool reserve = false;
    // How many tasks of a share may wait, besides the ones that run.
    std::size_t queue_length = 1;
    // A thread without work polls for twice the mean interval between the last tasks before it
    // sleeps, if that is no longer than this: waking a sleeping thread costs more than a small
    // operation.
    std::chrono::microseconds spin{0};
    // Of all streams together; null: no limit.
    Budget* scratch = nullptr;
    // Whether each thread shares loops on the host among as many threads as the device's work may
    // use. These are made at the start.
    bool shares_loops = false;
    // For a device whose work can be stopped: a task is told to stop once it has run for longer
    // than this plus kOverrun times what its stream expects. Infinite: never.
    absl::Duration overrun = absl::InfiniteDuration();
  };
  static constexpr double kOverrun = 8;
  // Makes the streams, and calls prepare for each before the threads start.
  static absl::StatusOr<std::unique_ptr<Executor>> Start(
      Device& device, const Settings& settings,
      absl::FunctionRef<absl::Status(Stream&)> prepare = [](Stream&) { return absl::OkStatus(); });

  // Runs what is queued, then stops. REQUIRES: nobody is in another function.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Never waits. The task lives until it has run. Unless OK it is not queued: RESOURCE_EXHAUSTED /
  // QUEUE_FULL {limit}, UNAVAILABLE / DEVICE_LOST.
  absl::Status Submit(Task& task, TaskSize size = TaskSize::kLarge);
  // Runs a task that is tiny here and now if nothing waits, nothing runs that is not tiny, behind
  // which the device might let it wait, and a stream is idle; else the same as Submit. Saves waking
  // a thread, and keeps the caller for as long as the task takes.
  absl::Status RunOrSubmit(Task& task);

  // True: the task was waiting, and now never runs. False: it runs, its stream being told to stop,
  // or has run. REQUIRES: the task has been submitted and lives.
  bool Cancel(Task& task);

  // Refuses the tasks that wait, as idle threads do, for when all threads hang with a device that
  // is lost.
  void RefuseWaiting();

  int workers() const { return settings_.workers; }
  // How many tasks wait for a thread now.
  std::size_t waiting() const {
    return groups_[0].waiting.load(std::memory_order_relaxed) +
           groups_[1].waiting.load(std::memory_order_relaxed);
  }
  // For how long the task that has run longest has run.
  std::chrono::steady_clock::duration LongestRun() const;
  // Returns how much of a time that ends now counts.
  using Counts = absl::FunctionRef<absl::Duration(absl::Duration)>;
  // Tells tasks that have overrun to stop. Returns for how long the longest overrun has lasted; if
  // `overrun` is infinite, LongestRun.
  absl::Duration StopOverdue(Counts counts);

 private:
  // A stream and what it is doing. Belongs to the thread that has taken it from `idle`.
  struct WorkerStream {
    std::unique_ptr<Stream> stream;
    // When its task began, in ticks of the steady clock; 0: it has none.
    std::atomic<std::int64_t> busy_since{0};
    // Tells the task that runs to stop; the stream checks it.
    std::atomic<bool> stop{false};
    std::uint64_t run = 0;  // the number of the task's run; 0: none. Guarded by mutex_.
  };

  // The tasks of one share that wait in a group, in the order in which they came.
  struct Queue {
    Task* first = nullptr;
    Task* last = nullptr;
    // The time that its tasks have had, in ticks of the steady clock. An idle share
    // saves nothing up: when it comes back it begins where the others are.
    std::int64_t used = 0;
  };
  // Streams, as many threads that drive them, and what waits for these. Belongs to the mutex.
  struct Group {
    std::condition_variable wake;
    std::deque<Queue> queues;  // by share
    // Those with tasks; where two have had the same, the one that waits longer comes first.
    std::vector<Queue*> active;
    // What the share that went last had had by then.
    std::int64_t least_used = 0;
    // At most one thread polls at a time: it takes the next task without being woken.
    bool polling = false;
    // The length of all queues, to read without the mutex.
    std::atomic<std::size_t> waiting{0};
    std::vector<WorkerStream*> idle;
  };

  Executor(Device& device, const Settings& settings) : device_(device), settings_(settings) {}

  void Work(Group& group);
  // Waits for a task and a stream for it; null when there are no tasks left and the executor stops.
  // With the mutex.
  Task* Next(std::unique_lock<std::mutex>& lock, Group& group, WorkerStream*& worker);
  void Poll(std::unique_lock<std::mutex>& lock, Group& group);
  // Without the mutex. How long it took, in ticks of the steady clock.
  std::int64_t Run(Task& task, WorkerStream& worker);
  // With the mutex.
  absl::Status Enqueue(Task& task, bool& wake);
  // Where tasks of a size run.
  Group& GroupOf(TaskSize size) {
    return groups_[settings_.reserve && size != TaskSize::kLarge ? 1 : 0];
  }
  static Queue& QueueOf(Group& group, std::size_t share);
  // The task that is next. REQUIRES: some wait.
  static Task* First(Group& group);
  void Unlink(Task& task);
  WorkerStream* TakeStream(Task& task);
  // Whether a thread has to be woken for what waits. size, share, took: of what ran.
  bool GiveBack(WorkerStream& worker, TaskSize size, std::size_t share, std::int64_t took);
  void NoteArrival();

  Device& device_;
  const Settings settings_;

  std::mutex mutex_;
  // With a reserve, the first one has the large tasks, the second one the others; else it is empty.
  std::array<Group, 2> groups_;
  std::vector<std::size_t> lengths_;  // of both queues of a share
  bool stopping_ = false;
  std::uint64_t runs_ = 0;  // tasks that have begun to run so far
  int prepared_ = 0;        // threads that are ready for tasks
  std::condition_variable thread_prepared_;
  int running_ = 0;  // tasks that are not tiny
  // When the last task came and the mean interval between tasks, in ticks of the steady clock.
  std::int64_t last_arrival_ = 0;
  std::int64_t interval_ = 0;

  std::vector<std::unique_ptr<WorkerStream>> streams_;
  std::vector<std::thread> threads_;
};

}  // namespace tessera
