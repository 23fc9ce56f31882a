#include "server/devices/executor.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <future>

#include "server/clock.h"
#include "server/devices/chores.h"
#include "tests/described_device.h"
#include "tests/fake_device.h"
#include "tests/quiet.h"

namespace tessera {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

std::unique_ptr<Executor> Start(Device& device, int workers, std::size_t queue,
                                microseconds spin = microseconds(50)) {
  return *Executor::Start(device, {.workers = workers, .queue_length = queue, .spin = spin});
}

// A task that consists of its functions.
class TestTask final : public Task {
 public:
  explicit TestTask(
      std::function<void(Stream&)> run = [](Stream&) {}, std::size_t share = 0)
      : Task(share), run_(std::move(run)) {}
  int runs() const { return runs_; }
  absl::Status refused() const { return refused_; }

 private:
  void Run(Stream& stream) override {
    ++runs_;
    run_(stream);
  }
  void Refuse(const absl::Status& status) override { refused_ = status; }

  std::function<void(Stream&)> run_;
  std::atomic<int> runs_{0};
  absl::Status refused_;
};

// Occupies a worker until released.
class Blocker {
 public:
  Task& task() { return task_; }
  void WaitUntilRunning() { started_.get_future().wait(); }
  void Occupy(Executor& executor, TaskSize size = TaskSize::kLarge) {
    ASSERT_TRUE(executor.Submit(task_, size).ok());
    WaitUntilRunning();
  }
  void Release() { release_.set_value(); }

 private:
  std::promise<void> started_;
  std::promise<void> release_;
  TestTask task_{[this](Stream&) {
    started_.set_value();
    release_.get_future().wait();
  }};
};

TEST(ExecutorTest, StreamsArePreparedAndShareTheBudget) {
  FakeDevice device;
  Budget scratch(1 << 20);
  std::vector<Stream*> prepared;
  auto executor = *Executor::Start(device, {.workers = 3, .queue_length = 1, .scratch = &scratch},
                                   [&](Stream& stream) {
                                     EXPECT_EQ(stream.scratch_budget(), &scratch);
                                     prepared.push_back(&stream);
                                     return absl::OkStatus();
                                   });
  EXPECT_EQ(prepared.size(), 3u);
  const absl::Status failed =
      Executor::Start(device, {}, [](Stream&) { return absl::InternalError("no"); }).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
}

TEST(ExecutorTest, QueueIsExactAndInOrder) {
  FakeDevice device;
  Blocker blocker;
  std::vector<int> order;
  std::deque<TestTask> tasks;
  for (int i = 0; i < 4; ++i) tasks.emplace_back([&order, i](Stream&) { order.push_back(i); });
  {
    auto executor = Start(device, 1, 3);
    blocker.Occupy(*executor);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(executor->Submit(tasks[i]).ok());
    EXPECT_EQ(executor->waiting(), 3u);
    const absl::Status full = executor->Submit(tasks[3]);
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(ErrorReason(full), "QUEUE_FULL");
    EXPECT_EQ(ErrorMetadata(full)["limit"], "3");
    EXPECT_EQ(ErrorMetadata(full)["device"], "fake:0");
    blocker.Release();
  }
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2})) << "what was accepted runs, even at the end";
}

TEST(ExecutorTest, NoMoreRunAtOnceThanThereAreWorkers) {
  FakeDevice device;
  std::deque<Blocker> blockers(4);
  auto executor = Start(device, 3, 16);
  for (Blocker& blocker : blockers) ASSERT_TRUE(executor->Submit(blocker.task()).ok());
  for (int i = 0; i < 3; ++i) blockers[i].WaitUntilRunning();
  AwaitQuiet();
  EXPECT_EQ(executor->waiting(), 1u);
  blockers[0].Release();
  blockers[3].WaitUntilRunning();
  for (int i = 1; i < 4; ++i) blockers[i].Release();
}

// Tasks of several shares on one worker. Each task records its share when it runs, and takes
// minutes on the test's clock.
class SharesTest : public testing::Test {
 protected:
  // Keeps the worker busy until Order is called.
  void Hold() { blocker_.Occupy(*executor_); }
  void SubmitFor(std::size_t share, int count, int minutes, bool at_once = false) {
    for (int i = 0; i < count; ++i) {
      TestTask& task = tasks_.emplace_back(
          [this, share, minutes](Stream&) {
            order_.push_back(share);
            AdvanceSteadyNow(absl::Minutes(minutes));
            ++ended_;
            ended_.notify_all();
          },
          share);
      ASSERT_TRUE((at_once ? executor_->RunOrSubmit(task) : executor_->Submit(task)).ok());
    }
  }
  void AwaitAll() {
    for (std::size_t n = ended_; n < tasks_.size(); n = ended_) ended_.wait(n);
  }
  // Runs all tasks, and returns their order.
  std::vector<std::size_t> Order() {
    blocker_.Release();
    executor_.reset();
    return order_;
  }

  FakeDevice device_;
  Blocker blocker_;
  std::deque<TestTask> tasks_;
  std::vector<std::size_t> order_;
  std::atomic<std::size_t> ended_{0};
  std::unique_ptr<Executor> executor_ = Start(device_, 1, 100);
};

TEST_F(SharesTest, TakeTurns) {
  Hold();
  SubmitFor(1, 20, 2);
  SubmitFor(2, 3, 2);
  SubmitFor(7, 3, 2);
  const std::vector<std::size_t> order = Order();
  ASSERT_EQ(order.size(), 26u);
  // A later share waits for one task of each earlier share, not for their whole queues.
  const auto last = [&](std::size_t share) {
    return std::find(order.rbegin(), order.rend(), share).base() - order.begin();
  };
  EXPECT_LE(last(2), 9);
  EXPECT_LE(last(7), 9);
}

TEST_F(SharesTest, AreServedByTheTimeTheyTake) {
  Hold();
  SubmitFor(1, 8, 60);
  SubmitFor(2, 20, 1);
  const std::vector<std::size_t> order = Order();
  // The second share's tasks together take a third of the time of one task of the first share.
  EXPECT_GE(std::count(order.begin(), order.begin() + 22, std::size_t{2}), 20);
}

class LateShareTest : public SharesTest, public testing::WithParamInterface<bool> {};

// The parameter says whether the earlier tasks ran immediately or through the queue.
TEST_P(LateShareTest, HasSavedNothingUp) {
  const bool at_once = GetParam();
  SubmitFor(3, 1, 1, at_once);
  SubmitFor(1, 20, 10, at_once);
  AwaitAll();
  SubmitFor(1, 1, 50, at_once);
  AwaitAll();
  SubmitFor(3, 1, 1, at_once);  // This does not reset the other shares.
  AwaitAll();
  Hold();
  order_.clear();
  SubmitFor(1, 4, 10);
  SubmitFor(2, 15, 10);
  const std::vector<std::size_t> order = Order();
  // The second share begins where the first share was before its task of 50 minutes.
  const auto first = std::find(order.begin(), order.end(), std::size_t{1}) - order.begin();
  EXPECT_GE(first, 5);
  EXPECT_LE(first, 6);
}

INSTANTIATE_TEST_SUITE_P(Ways, LateShareTest, testing::Bool());

TEST(ExecutorTest, WhatIsNotLargeNeverWaitsForWhatIs) {
  FakeDevice device;
  auto executor = *Executor::Start(device, {.workers = 2, .reserve = true, .queue_length = 8});
  EXPECT_EQ(executor->workers(), 2);
  Blocker blockers[2];
  for (Blocker& blocker : blockers) {
    blocker.Occupy(*executor);
  }
  TestTask large;
  ASSERT_TRUE(executor->Submit(large).ok());
  for (const std::size_t share : {0, 1}) {
    for (const TaskSize size : {TaskSize::kSmall, TaskSize::kTiny}) {
      std::promise<void> done;
      TestTask task([&](Stream&) { done.set_value(); }, share);
      ASSERT_TRUE(executor->Submit(task, size).ok());
      done.get_future().wait();
    }
  }
  EXPECT_EQ(large.runs(), 0) << "the reserve is for others";
  EXPECT_EQ(executor->waiting(), 1u);
  for (Blocker& blocker : blockers) blocker.Release();
  executor.reset();
  EXPECT_EQ(large.runs(), 1);
}

// Large work has its own stream, and a thread with lower priority.
TEST(ExecutorTest, LargeTasksHaveTheirOwnStreamsAndThreadsWhereThereIsAReserve) {
  FakeDevice device;
  const int here = getpriority(PRIO_PROCESS, 0);
  for (const bool reserve : {false, true}) {
    auto executor = *Executor::Start(device, {.reserve = reserve, .queue_length = 8});
    for (const TaskSize size : {TaskSize::kTiny, TaskSize::kSmall, TaskSize::kLarge}) {
      std::promise<std::pair<bool, int>> seen;
      TestTask task([&](Stream& stream) {
        seen.set_value({device.IsLarge(stream), getpriority(PRIO_PROCESS, 0)});
      });
      ASSERT_TRUE(executor->Submit(task, size).ok());
      const bool large = reserve && size == TaskSize::kLarge;
      EXPECT_EQ(seen.get_future().get(), std::pair(large, large ? std::min(here + 10, 19) : here));
    }
  }
  EXPECT_EQ(getpriority(PRIO_PROCESS, 0), here);
}

TEST(ExecutorTest, TheTimeOfLargeTasksIsNoDebtOfSmallOnes) {
  FakeDevice device;
  Blocker blocker;
  std::vector<std::size_t> order;
  std::deque<TestTask> tasks;
  auto executor = *Executor::Start(device, {.workers = 1, .reserve = true, .queue_length = 100});
  blocker.Occupy(*executor, TaskSize::kSmall);
  const auto submit = [&](std::size_t share, TaskSize size, int minutes) {
    tasks.emplace_back(
        [&order, share, size, minutes](Stream&) {
          AdvanceSteadyNow(absl::Minutes(minutes));
          if (size == TaskSize::kSmall) order.push_back(share);
        },
        share);
    ASSERT_TRUE(executor->Submit(tasks.back(), size).ok());
  };
  // One share is waiting all the time, while another share submits many large tasks.
  for (int i = 0; i < 20; ++i) submit(2, TaskSize::kSmall, 1);
  for (int i = 0; i < 3; ++i) submit(1, TaskSize::kLarge, 60);
  while (tasks.back().runs() == 0) std::this_thread::yield();
  // Tasks that are submitted now, even a task of the flooding share, run among the small ones.
  submit(3, TaskSize::kSmall, 1);
  submit(1, TaskSize::kSmall, 1);
  blocker.Release();
  executor.reset();
  ASSERT_EQ(order.size(), 22u);
  for (const std::size_t share : {1, 3})
    EXPECT_LE(std::find(order.begin(), order.end(), share) - order.begin(), 8) << share;
}

TEST(ExecutorTest, SizesOvertakeNothingThatMayRun) {
  FakeDevice device;
  Blocker blocker;
  std::vector<int> order;
  std::deque<TestTask> tasks;
  for (int i = 0; i < 6; ++i) tasks.emplace_back([&order, i](Stream&) { order.push_back(i); });
  auto executor = Start(device, 1, 8);
  blocker.Occupy(*executor);
  for (int i = 0; i < 6; ++i)
    ASSERT_TRUE(executor->Submit(tasks[i], i % 2 == 0 ? TaskSize::kLarge : TaskSize::kSmall).ok());
  EXPECT_TRUE(executor->Cancel(tasks[2]));
  EXPECT_TRUE(executor->Cancel(tasks[3]));
  blocker.Release();
  executor.reset();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 4, 5}));
}

TEST(ExecutorTest, AQueueThatIsFullIsThatOfOneShare) {
  FakeDevice device;
  Blocker blocker;
  TestTask first([](Stream&) {}, 1), more([](Stream&) {}, 1), other([](Stream&) {}, 2);
  auto executor = Start(device, 1, 1);
  blocker.Occupy(*executor);
  EXPECT_TRUE(executor->Submit(first).ok());
  EXPECT_EQ(ErrorReason(executor->Submit(more)), "QUEUE_FULL");
  EXPECT_TRUE(executor->Submit(other).ok());
  EXPECT_EQ(executor->waiting(), 2u);
  EXPECT_TRUE(executor->Cancel(first));
  EXPECT_FALSE(executor->Cancel(first)) << "it does not wait";
  EXPECT_TRUE(executor->Submit(more).ok()) << "in its place";
  blocker.Release();
  executor.reset();
  EXPECT_EQ(first.runs(), 0);
  EXPECT_EQ(more.runs() + other.runs(), 2);
}

TEST(ExecutorTest, ARunningTaskIsToldToStop) {
  FakeDevice device;
  auto executor = Start(device, 1, 3);
  std::promise<bool> before, after;
  TestTask task([&](Stream& stream) {
    before.set_value(stream.stopped());
    while (!stream.stopped()) std::this_thread::yield();
    after.set_value(stream.stopped());
  });
  ASSERT_TRUE(executor->Submit(task).ok());
  EXPECT_FALSE(before.get_future().get());
  EXPECT_FALSE(executor->Cancel(task));
  EXPECT_TRUE(after.get_future().get());
  std::promise<bool> next;
  TestTask other([&](Stream& stream) { next.set_value(stream.stopped()); });
  ASSERT_TRUE(executor->Submit(other).ok());
  EXPECT_FALSE(next.get_future().get()) << "the stream forgets";
}

TEST(ExecutorTest, WhatOverrunsIsToldToStop) {
  FakeDevice device;
  auto executor =
      *Executor::Start(device, {.workers = 1, .queue_length = 3, .overrun = absl::Seconds(100)});
  std::promise<void> begun, release;
  std::promise<bool> stopped, next;
  TestTask task([&](Stream& stream) {
    stream.Expect(2);
    stream.Expect(3);
    begun.set_value();
    release.get_future().wait();
    stopped.set_value(stream.stopped());
  });
  ASSERT_TRUE(executor->Submit(task).ok());
  begun.get_future().wait();
  const auto all = [](absl::Duration wait) { return wait; };
  // The task may run for 100 s plus eight times the expected 5 s.
  AdvanceSteadyNow(absl::Seconds(120));
  EXPECT_EQ(executor->StopOverdue(all), absl::ZeroDuration());
  AdvanceSteadyNow(absl::Seconds(120));
  const auto half = [](absl::Duration wait) { return wait / 2; };
  EXPECT_EQ(executor->StopOverdue(half), absl::ZeroDuration()) << "the process was suspended";
  EXPECT_GE(executor->StopOverdue(all), absl::Seconds(100));
  release.set_value();
  EXPECT_TRUE(stopped.get_future().get());
  TestTask other(
      [&](Stream& stream) { next.set_value(stream.stopped() || stream.expected_seconds() != 0); });
  ASSERT_TRUE(executor->Submit(other).ok());
  EXPECT_FALSE(next.get_future().get()) << "the stream forgets";
}

TEST(ExecutorTest, ShortTasksRunOnTheThreadThatBringsThemWhileNothingLongerRuns) {
  FakeDevice device;
  Blocker blocker;
  std::thread::id where;
  const auto run_short = [&](Executor& executor) {
    std::promise<void> done;
    TestTask task([&](Stream&) {
      where = std::this_thread::get_id();
      done.set_value();
    });
    EXPECT_TRUE(executor.RunOrSubmit(task).ok());
    done.get_future().wait();
  };
  const auto here = std::this_thread::get_id();
  auto executor = Start(device, 2, 3);
  run_short(*executor);
  EXPECT_EQ(where, here);
  blocker.Occupy(*executor);
  run_short(*executor);
  EXPECT_NE(where, here) << "it might wait for the device";
  blocker.Release();
  executor = Start(device, 1, 3);
  {
    // A short task occupies the only stream.
    TestTask inner([&](Stream&) { where = std::this_thread::get_id(); });
    TestTask outer([&](Stream&) {
      EXPECT_TRUE(executor->RunOrSubmit(inner).ok());
      EXPECT_EQ(inner.runs(), 0);
      EXPECT_EQ(executor->waiting(), 1u);
    });
    EXPECT_TRUE(executor->RunOrSubmit(outer).ok());
    executor.reset();
    EXPECT_EQ(inner.runs(), 1) << "on the stream that has become idle";
    EXPECT_NE(where, here);
  }
  device.MarkLost();
  executor = Start(device, 1, 3);
  TestTask late;
  EXPECT_EQ(ErrorReason(executor->RunOrSubmit(late)), "DEVICE_LOST");
}

TEST(ExecutorTest, LongestRunIsThatOfTheTaskThatBeganFirst) {
  FakeDevice device;
  std::deque<Blocker> blockers(8);
  auto executor = *Executor::Start(device, {.workers = 2, .reserve = true, .queue_length = 8});
  const auto hours = [&] { return executor->LongestRun() / std::chrono::hours(1); };
  const auto start = [&](std::size_t i) {
    blockers[i].Occupy(*executor, i % 2 == 0 ? TaskSize::kLarge : TaskSize::kSmall);
    AdvanceSteadyNow(absl::Hours(1));
  };
  EXPECT_EQ(executor->LongestRun().count(), 0);
  TestTask tiny([&](Stream&) {
    AdvanceSteadyNow(absl::Hours(7));
    EXPECT_EQ(hours(), 7);
  });
  ASSERT_TRUE(executor->RunOrSubmit(tiny).ok());
  EXPECT_EQ(executor->LongestRun().count(), 0) << "it has ended";
  for (std::size_t i = 0; i < 4; ++i) {
    start(i);
    EXPECT_EQ(hours(), i + 1);
  }
  // Each of the other tasks takes the place of the earliest one.
  for (std::size_t i = 4; i < 8; ++i) {
    blockers[i - 4].Release();
    start(i);
    EXPECT_EQ(hours(), 4);
  }
  for (std::size_t i = 4; i < 8; ++i) blockers[i].Release();
}

TEST(ExecutorTest, StreamsThatCannotBeMade) {
  class NoStreams final : public test::Described {
   public:
    using test::Described::Described;
    std::unique_ptr<Stream> MakeStream() override {
      throw DeviceError(DeviceError::Kind::kFailed, "fakeCreate()", "fakeErrorNotPermitted");
    }
  } device(Backend::kCpu);
  EXPECT_EQ(Executor::Start(device, {}).status().code(), absl::StatusCode::kInternal);
}

// Many threads submit, with and without a polling thread. Every task runs exactly once unless it is
// cancelled first.
TEST(ExecutorTest, NothingIsLostUnderLoad) {
  for (const microseconds spin : {microseconds(0), microseconds(20), microseconds(2000)}) {
    FakeDevice device;
    std::atomic<int> expected{0};
    std::deque<std::deque<TestTask>> tasks(4);
    {
      auto executor = Start(device, 3, 16, spin);
      std::vector<std::thread> threads;
      for (std::deque<TestTask>& own : tasks) {
        threads.emplace_back([&] {
          for (int i = 0; i < 2000; ++i) {
            TestTask& task = own.emplace_back();
            if (!(i % 2 == 0 ? executor->Submit(task) : executor->RunOrSubmit(task)).ok()) continue;
            ++expected;
            if (i % 3 == 0 && executor->Cancel(task)) --expected;
            if (i % 100 == 0) std::this_thread::sleep_for(microseconds(100));
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
    int ran = 0;
    for (const std::deque<TestTask>& own : tasks) {
      for (const TestTask& task : own) {
        EXPECT_LE(task.runs(), 1);
        ran += task.runs();
      }
    }
    EXPECT_EQ(ran, expected);
    EXPECT_GT(ran, 0);
  }
}

// A task that arrives while a thread polls and a task that arrives when all threads sleep both
// start soon.
TEST(ExecutorTest, OneAfterTheOther) {
  FakeDevice device;
  auto executor = Start(device, 2, 16, microseconds(100));
  std::deque<TestTask> tasks;
  for (int i = 0; i < 300; ++i) {
    std::promise<void> done;
    TestTask& task = tasks.emplace_back([&](Stream&) { done.set_value(); });
    ASSERT_TRUE(executor->Submit(task).ok());
    ASSERT_EQ(done.get_future().wait_for(std::chrono::minutes(1)), std::future_status::ready);
    std::this_thread::sleep_for(microseconds(i));
  }
  executor.reset();  // Must precede the end of the objects that its tasks refer to.
}

// A polling thread takes one task, and the other task wakes a sleeping thread.
TEST(ExecutorTest, TwoTasksAtOnceRunAtOnce) {
  FakeDevice device;
  auto executor = Start(device, 2, 16, std::chrono::seconds(1));
  std::deque<TestTask> tasks;
  for (int i = 0; i < 500; ++i) {
    std::promise<void> second_runs, first_done;
    TestTask& first = tasks.emplace_back([&](Stream&) {
      EXPECT_EQ(second_runs.get_future().wait_for(std::chrono::minutes(1)),
                std::future_status::ready);
      first_done.set_value();
    });
    TestTask& second = tasks.emplace_back([&](Stream&) { second_runs.set_value(); });
    ASSERT_TRUE(executor->Submit(first).ok());
    ASSERT_TRUE(executor->Submit(second).ok());
    first_done.get_future().wait();
    if (HasFailure()) break;
  }
  executor.reset();  // Must precede the end of the objects that its tasks refer to.
}

// Work for chores that blocks their threads until it is released.
class Work {
 public:
  void Submit(Chores& chores, int count, std::size_t share = 0) {
    const auto hold = [this] {
      ++began_;
      released_.wait();
      ++ended_;
    };
    for (int i = 0; i < count; ++i) ASSERT_TRUE(chores.Submit(hold, share).ok());
  }
  void Await(int began) {
    while (began_ < began) std::this_thread::yield();
  }
  int began() const { return began_; }
  int ended() const { return ended_; }
  void Release() { release_.set_value(); }

 private:
  std::promise<void> release_;
  const std::shared_future<void> released_ = release_.get_future().share();
  std::atomic<int> began_{0}, ended_{0};
};

TEST(ChoresTest, DoesWhatItTookAndRefusesTheRest) {
  std::atomic<int> done{0};
  {
    Work held;
    Chores chores(1, 2);
    held.Submit(chores, 1);
    held.Await(1);
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(chores.Submit([&] { ++done; }).ok());
    const absl::Status full = chores.Submit([&] { ++done; });
    EXPECT_EQ(ErrorReason(full), "QUEUE_FULL");
    EXPECT_EQ(ErrorMetadata(full)["limit"], "2");
    held.Release();
  }
  EXPECT_EQ(done, 2);
}

TEST(ChoresTest, AQueueThatIsFullIsThatOfOneShare) {
  Chores chores(0, 1);
  ASSERT_TRUE(chores.Submit([] {}, 1).ok());
  EXPECT_EQ(ErrorReason(chores.Submit([] {}, 1)), "QUEUE_FULL");
  EXPECT_TRUE(chores.Submit([] {}, 0).ok());
  EXPECT_TRUE(chores.Submit([] {}, 2).ok());
}

TEST(ChoresTest, AShareLeavesAThreadToOthers) {
  std::promise<void> done;
  Work held;
  {
    Chores chores(3, 8);
    held.Submit(chores, 5, 1);
    AwaitQuiet();
    EXPECT_EQ(held.began(), 2);
    ASSERT_TRUE(chores.Submit([&] { done.set_value(); }, 2).ok());
    EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
    held.Release();
  }
  EXPECT_EQ(held.ended(), 5);
}

TEST(ChoresTest, OthersTakeOverFromThreadsThatHang) {
  for (const int threads : {1, 3}) {
    Work held;
    std::promise<void> done;
    Chores chores(threads, 8, /*patience=*/milliseconds(1));
    held.Submit(chores, 3);
    ASSERT_TRUE(chores.Submit([&] { done.set_value(); }).ok());
    auto reached = done.get_future();
    for (int i = 0; i < 1000 && reached.wait_for(milliseconds(20)) != std::future_status::ready;
         ++i)
      chores.Relieve();
    EXPECT_EQ(reached.wait_for(milliseconds(0)), std::future_status::ready) << threads;
    held.Release();
  }
}

TEST(ChoresTest, NoMoreThreadsJoinThan64) {
  Work held;
  Chores chores(1, 100, /*patience=*/milliseconds(0));
  held.Submit(chores, 70);
  for (int i = 0, more = 20; i < 10000 && more > 0; ++i) {
    chores.Relieve();
    std::this_thread::sleep_for(milliseconds(1));
    if (held.began() >= 64) --more;
  }
  EXPECT_EQ(held.began(), 64);
  held.Release();
}

// The destructor of something that a work item captures may submit more work.
TEST(ChoresTest, WhatWorkHoldsEndsWithoutTheLock) {
  std::promise<void> done;
  Chores chores(1, 1);
  const int thing = 0;
  std::shared_ptr<const void> held(
      &thing, [&](const void*) { EXPECT_TRUE(chores.Submit([&] { done.set_value(); }).ok()); });
  ASSERT_TRUE(chores.Submit([held = std::move(held)] {}).ok());
  done.get_future().wait();
}

TEST(ChoresTest, SharesTakeTurns) {
  Work held;
  std::vector<int> order;
  {
    Chores chores(1, 8);
    held.Submit(chores, 1);
    held.Await(1);
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(chores.Submit([&] { order.push_back(1); }, 1).ok());
    ASSERT_TRUE(chores.Submit([&] { order.push_back(2); }, 2).ok());
    EXPECT_GT(chores.LongestRun(), std::chrono::steady_clock::duration::zero());
    held.Release();
  }
  EXPECT_EQ(order, (std::vector<int>{1, 2, 1, 1}));
}

TEST(ChoresTest, FreesOnItsOwnThread) {
  std::promise<std::thread::id> freed;
  Chores chores(1, 1);
  const int thing = 0;
  chores.Release(std::shared_ptr<const void>(
      &thing, [&](const void*) { freed.set_value(std::this_thread::get_id()); }));
  EXPECT_NE(freed.get_future().get(), std::this_thread::get_id());
}

}  // namespace
}  // namespace tessera
