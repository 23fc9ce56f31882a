#include "server/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "tests/fake_device.h"

namespace tessera {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::system_clock;

std::unique_ptr<Executor> Start(Device& device, int workers, std::size_t queue,
                                microseconds spin = microseconds(50)) {
  return *Executor::Start(device, workers, queue, spin);
}

// Occupies a worker until released.
class Blocker {
 public:
  Task MakeTask() {
    Task task;
    task.run = [this](absl::StatusOr<Lane*>) {
      started_.set_value();
      release_.get_future().wait();
    };
    return task;
  }
  void WaitUntilRunning() { started_.get_future().wait(); }
  void Release() { release_.set_value(); }

 private:
  std::promise<void> started_;
  std::promise<void> release_;
};

TEST(ExecutorTest, RunsOnALaneOfItsDevice) {
  FakeDevice device;
  auto executor = Start(device, 2, 8);
  std::promise<Device*> where;
  Task task;
  task.run = [&](absl::StatusOr<Lane*> lane) { where.set_value(&(*lane)->device()); };
  ASSERT_TRUE(executor->Submit(std::move(task)).ok());
  EXPECT_EQ(where.get_future().get(), &device);
  EXPECT_EQ(executor->workers(), 2);
}

TEST(ExecutorTest, QueueIsExact) {
  FakeDevice device;
  Blocker blocker;
  std::atomic<int> ran{0};
  {
    auto executor = Start(device, 1, 3);
    ASSERT_TRUE(executor->Submit(blocker.MakeTask()).ok());
    blocker.WaitUntilRunning();
    const auto submit = [&] {
      Task task;
      task.run = [&](absl::StatusOr<Lane*> lane) { ran += lane.ok(); };
      return executor->Submit(std::move(task));
    };
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(submit().ok());
    const absl::Status full = submit();
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(ErrorReason(full), "QUEUE_FULL");
    EXPECT_EQ(ErrorMetadata(full)["limit"], "3");
    blocker.Release();
  }
  EXPECT_EQ(ran, 3) << "what was accepted runs, even when the executor ends";
}

TEST(ExecutorTest, LateAndAbandonedWorkNeverRuns) {
  FakeDevice device;
  Blocker blocker;
  std::vector<absl::StatusCode> codes(3);
  {
    auto executor = Start(device, 1, 8);
    ASSERT_TRUE(executor->Submit(blocker.MakeTask()).ok());
    blocker.WaitUntilRunning();
    std::atomic<bool> gone{false};
    const auto submit = [&](int index, system_clock::time_point deadline,
                            std::function<bool()> cancelled) {
      Task task;
      task.deadline = deadline;
      task.cancelled = std::move(cancelled);
      task.run = [&codes, index](absl::StatusOr<Lane*> lane) {
        codes[static_cast<std::size_t>(index)] = lane.status().code();
      };
      ASSERT_TRUE(executor->Submit(std::move(task)).ok());
    };
    submit(0, system_clock::now() + milliseconds(5), nullptr);
    submit(1, system_clock::time_point::max(), [&] { return gone.load(); });
    submit(2, system_clock::now() + std::chrono::hours(1), [] { return false; });
    std::this_thread::sleep_for(milliseconds(10));
    gone = true;
    blocker.Release();
    executor.reset();
  }
  EXPECT_EQ(codes[0], absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(codes[1], absl::StatusCode::kCancelled);
  EXPECT_EQ(codes[2], absl::StatusCode::kOk);
}

TEST(ExecutorTest, LostDeviceAnswersWhatWaits) {
  FakeDevice device;
  Blocker blocker;
  std::promise<absl::Status> answer;
  auto executor = Start(device, 1, 8);
  ASSERT_TRUE(executor->Submit(blocker.MakeTask()).ok());
  blocker.WaitUntilRunning();
  Task task;
  task.run = [&](absl::StatusOr<Lane*> lane) { answer.set_value(lane.status()); };
  ASSERT_TRUE(executor->Submit(std::move(task)).ok());
  device.MarkLost();
  blocker.Release();
  EXPECT_EQ(ErrorReason(answer.get_future().get()), "DEVICE_LOST");
  EXPECT_EQ(ErrorReason(executor->Submit(Task())), "DEVICE_LOST");
}

TEST(ExecutorTest, LanesThatCannotBeMade) {
  class NoLanes final : public Device {
   public:
    const DeviceInfo& info() const override { return info_; }
    std::uint64_t FreeBytes() const override { return 0; }
    void* Allocate(std::size_t) override { return nullptr; }
    void Free(void*) noexcept override {}
    std::unique_ptr<Lane> MakeLane() override {
      throw DeviceError(DeviceError::Kind::kFailed, "fakeCreate()", "fakeErrorNotPermitted");
    }

   private:
    DeviceInfo info_;
  } device;
  const absl::Status status = Executor::Start(device, 1, 1, microseconds(0)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
}

// Every task runs exactly once, with and without a polling thread, from many submitters.
TEST(ExecutorTest, NothingIsLostUnderLoad) {
  for (const microseconds spin : {microseconds(0), microseconds(20), microseconds(2000)}) {
    FakeDevice device;
    std::atomic<int> ran{0};
    std::atomic<int> accepted{0};
    {
      auto executor = Start(device, 3, 16, spin);
      std::vector<std::thread> threads;
      for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&] {
          for (int i = 0; i < 2000; ++i) {
            Task task;
            task.run = [&](absl::StatusOr<Lane*>) { ++ran; };
            if (executor->Submit(std::move(task)).ok()) ++accepted;
            if (i % 100 == 0) std::this_thread::sleep_for(microseconds(100));
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
    EXPECT_EQ(ran, accepted);
    EXPECT_GT(ran, 0);
  }
}

// A task that arrives while a thread polls, and one that arrives when all sleep, both start soon.
TEST(ExecutorTest, OneAfterTheOther) {
  FakeDevice device;
  auto executor = Start(device, 2, 16, microseconds(100));
  for (int i = 0; i < 300; ++i) {
    std::promise<void> done;
    Task task;
    task.run = [&](absl::StatusOr<Lane*>) { done.set_value(); };
    ASSERT_TRUE(executor->Submit(std::move(task)).ok());
    ASSERT_EQ(done.get_future().wait_for(std::chrono::seconds(5)), std::future_status::ready);
    std::this_thread::sleep_for(microseconds(i));
  }
}

}  // namespace
}  // namespace tessera
