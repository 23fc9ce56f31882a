#include "server/buffers/prepared_operands.h"

#include <gtest/gtest.h>

#include <chrono>

#include "server/buffers/buffer_store.h"
#include "server/clock.h"
#include "tests/fake_device.h"
#include "tests/test_server.h"

namespace tessera {
namespace {

constexpr std::size_t kBytes = PreparedOperands::kLeastBytes;
constexpr std::uint64_t kLimit = 8 * kBytes;

class PreparedOperandsTest : public testing::Test {
 protected:
  // Creates a READY buffer of `size` times kBytes.
  std::shared_ptr<const Buffer> Put(const std::string& name, std::int64_t size = 1) {
    BufferSpec spec;
    spec.name = name;
    spec.type = *MakeArrayType(DType::kF32, {size * static_cast<std::int64_t>(kBytes / 4)});
    spec.device = &device_;
    auto draft = store_.Create(spec);
    if (!draft.ok()) return nullptr;
    EXPECT_TRUE(store_.BeginWrite(**draft, 0, spec.type.bytes()).ok());
    store_.EndWrite(**draft, 0, spec.type.bytes(), true);
    return store_.Seal(**draft)->buffer;
  }

  // Puts until there is memory. On a busy machine, calls may use it for longer than kPatience.
  void PutPatiently(const std::string& name, std::int64_t size) {
    EXPECT_TRUE(Eventually([&] { return Put(name, size) != nullptr; }));
  }

  // A call whose only operand is a buffer. The call uses the buffer's prepared memory until it
  // ends.
  struct User {
    User(PreparedOperandsTest& test, std::shared_ptr<const Buffer> buffer)
        : User(test.prepared_, *test.stream_, std::move(buffer)) {}
    User(PreparedOperands& of, Stream& stream, std::shared_ptr<const Buffer> buffer)
        : operand(std::move(buffer)), call(of, stream, find) {}
    PreparedMemory Keep(std::string_view how = "copy", std::size_t bytes = kBytes) {
      return call.Keep({how, Of(*operand)}, bytes);
    }
    const std::shared_ptr<const Buffer> operand;
    const std::function<std::shared_ptr<const Buffer>(const void*)> find = [this](const void*) {
      return operand;
    };
    PreparedOperands::Call call;
  };

  // Prepares only this operand for a call, and returns what the call gets. done: whether the call's
  // work has ended.
  PreparedMemory Ask(const std::shared_ptr<const Buffer>& buffer, std::string_view how = "copy",
                     std::size_t bytes = kBytes, bool done = true) {
    User user(*this, buffer);
    const PreparedMemory memory = user.Keep(how, bytes);
    EXPECT_EQ(user.call.EndOperation(done), memory.ready ? bytes : 0);
    if (done) user.call.Finish();
    return memory;
  }
  // Prepares the operand so that the next call finds it.
  void* Make(const std::shared_ptr<const Buffer>& buffer, std::string_view how = "copy") {
    EXPECT_EQ(Ask(buffer, how).data, nullptr) << "seen for the first time";
    const PreparedMemory memory = Ask(buffer, how);
    EXPECT_NE(memory.data, nullptr);
    EXPECT_FALSE(memory.ready);
    return memory.data;
  }
  static View Of(const Buffer& buffer) { return WholeView(buffer.type(), buffer.data()); }
  bool Has(const std::shared_ptr<const Buffer>& buffer, std::string_view how = "copy") {
    return User(*this, buffer).Keep(how).ready;
  }
  std::unique_ptr<User> Use(const std::shared_ptr<const Buffer>& buffer,
                            std::string_view how = "copy") {
    auto user = std::make_unique<User>(*this, buffer);
    EXPECT_TRUE(user->Keep(how).ready);
    return user;
  }
  void AwaitForgotten(const std::shared_ptr<const Buffer>& buffer) {
    const absl::Time give_up = SteadyNow() + absl::Seconds(10);
    while (Has(buffer) && SteadyNow() < give_up) std::this_thread::yield();
  }

  FakeDevice device_;
  BufferStore store_{{{&device_, kLimit}}, {}};
  PreparedOperands& prepared_ = store_.prepared(device_);
  std::unique_ptr<Stream> stream_ = *MakeStream(device_);
};

TEST_F(PreparedOperandsTest, IsMadeForTheSecondCallAndFoundByTheThird) {
  const auto x = Put("x");
  void* const made = Make(x);
  EXPECT_EQ(prepared_.bytes(), kBytes);
  for (int i = 0; i < 3; ++i) {
    const PreparedMemory found = Ask(x);
    EXPECT_TRUE(found.ready);
    EXPECT_EQ(found.data, made);
  }
  EXPECT_EQ(store_.budget(device_).used(), 2 * kBytes);
}

TEST_F(PreparedOperandsTest, AnotherWayAnotherViewAndAnotherBufferAreOthers) {
  const auto x = Put("x"), y = Put("y");
  Make(x);
  EXPECT_FALSE(Has(x, "another copy"));
  EXPECT_FALSE(Has(y));
  User user(*this, x);
  EXPECT_TRUE(user.Keep().ready);
  View views[] = {Of(*x), Of(*x), Of(*x)};
  views[0].strides[0] = -1;
  views[1].dtype = DType::kI32;
  --views[2].shape[0];
  for (const View& view : views) EXPECT_FALSE(user.call.Keep({"copy", view}, kBytes).ready);
}

TEST_F(PreparedOperandsTest, WhatIsSmallOrNoBuffersIsNotKept) {
  const auto x = Put("x");
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Ask(x, "copy", kBytes - 1).data, nullptr);
    const auto nowhere = [](const void*) { return std::shared_ptr<const Buffer>(); };
    PreparedOperands::Call call(prepared_, *stream_, nowhere);
    EXPECT_EQ(call.Keep({"copy", Of(*x)}, kBytes).data, nullptr);
  }
  EXPECT_EQ(prepared_.bytes(), 0u);
}

TEST_F(PreparedOperandsTest, WhatACallHasNotFinishedIsForgotten) {
  const auto x = Put("x");
  Ask(x);
  EXPECT_NE(Ask(x, "copy", kBytes, /*done=*/false).data, nullptr);
  EXPECT_EQ(prepared_.bytes(), 0u);
  EXPECT_EQ(device_.allocations(), 1u);
  Make(x);
  EXPECT_TRUE(Has(x));
}

TEST_F(PreparedOperandsTest, OtherCallsDoNotSeeWhatIsBeingMadeButLaterOperationsOfTheCallDo) {
  const auto x = Put("x");
  Ask(x);
  User user(*this, x);
  const PreparedMemory making = user.Keep();
  ASSERT_NE(making.data, nullptr);
  EXPECT_EQ(user.Keep().data, nullptr) << "of the same operation";
  EXPECT_EQ(Ask(x).data, nullptr);
  EXPECT_EQ(user.call.EndOperation(true), 0u);
  EXPECT_EQ(Ask(x).data, nullptr);
  const PreparedMemory made = user.Keep();
  EXPECT_TRUE(made.ready);
  EXPECT_EQ(made.data, making.data);
  EXPECT_EQ(user.call.EndOperation(true), kBytes);
  user.call.Finish();
  EXPECT_TRUE(Ask(x).ready);
}

TEST_F(PreparedOperandsTest, OfAnOperationThatFailedNothingIsSeenByTheNextOne) {
  const auto x = Put("x");
  Ask(x);
  User user(*this, x);
  ASSERT_NE(user.Keep().data, nullptr);
  user.call.EndOperation(false);
  EXPECT_EQ(device_.allocations(), 2u) << "its work may be running";
  EXPECT_EQ(user.Keep().data, nullptr) << "seen for the first time";
  user.call.EndOperation(true);
  user.call.Finish();
  EXPECT_FALSE(Has(x));
}

TEST_F(PreparedOperandsTest, GoesWithItsBuffer) {
  auto x = Put("x");
  Make(x);
  ASSERT_TRUE(store_.Delete("x", 0).ok());
  store_.Sweep(SteadyNow());
  EXPECT_EQ(prepared_.bytes(), kBytes) << "a call may hold the buffer";
  x.reset();
  EXPECT_FALSE(store_.Sweep(SteadyNow()).empty());
  EXPECT_EQ(prepared_.bytes(), 0u);
  EXPECT_EQ(store_.budget(device_).used(), 0u);
  EXPECT_EQ(device_.allocations(), 0u);
}

TEST_F(PreparedOperandsTest, ABufferAtTheSameAddressIsAnother) {
  auto x = Put("x");
  const View view = Of(*x);
  Make(x);
  ASSERT_TRUE(store_.Delete("x", 0).ok());
  x.reset();
  const auto y = Put("y");
  EXPECT_FALSE(User(*this, y).call.Keep({"copy", view}, kBytes).ready);
}

TEST_F(PreparedOperandsTest, YieldsToBuffersTheOneThatWasUsedLongestAgoFirst) {
  const auto x = Put("x", 3);
  Make(x, "first");
  Make(x, "second");
  Make(x, "third");
  EXPECT_TRUE(Has(x, "first"));  // 2 of 8 units are free.
  ASSERT_NE(Put("y", 3), nullptr);
  EXPECT_TRUE(Has(x, "first"));
  EXPECT_FALSE(Has(x, "second"));
  EXPECT_TRUE(Has(x, "third"));
  ASSERT_NE(Put("z", 2), nullptr);
  EXPECT_EQ(prepared_.bytes(), 0u);
  EXPECT_EQ(Put("one too many"), nullptr);
}

TEST_F(PreparedOperandsTest, ABufferWaitsForTheEndOfACallThatUsesWhatItNeeds) {
  const auto x = Put("x", 4);
  Make(x);
  Ask(x, "another");
  auto use = Use(x);
  std::thread waiting([&] { EXPECT_NE(Put("y", 4), nullptr); });
  AwaitForgotten(x);
  EXPECT_EQ(prepared_.bytes(), kBytes) << "it is in use";
  EXPECT_EQ(Ask(x, "another").data, nullptr) << "nothing new is kept in the meantime";
  use.reset();
  waiting.join();
  EXPECT_EQ(prepared_.bytes(), 0u);
  ASSERT_TRUE(store_.Delete("y", 0).ok());
  EXPECT_NE(Ask(x, "another").data, nullptr);
}

TEST_F(PreparedOperandsTest, WhatIsBeingMadeGoesToABufferToo) {
  const auto x = Put("x", 4);
  Ask(x);
  std::thread waiting;
  {
    User user(*this, x);
    ASSERT_NE(user.Keep().data, nullptr);
    EXPECT_EQ(user.call.EndOperation(true), 0u);
    waiting = std::thread([&] { PutPatiently("y", 4); });
    // Later operations find the operand until it is forgotten.
    EXPECT_TRUE(Eventually([&] { return !user.Keep().ready; }));
    user.call.EndOperation(true);
    user.call.Finish();
  }
  waiting.join();
  EXPECT_EQ(prepared_.bytes(), 0u);
  EXPECT_EQ(device_.allocations(), 2u);
}

TEST_F(PreparedOperandsTest, WhatIsForgottenWhileItIsMadeGoesWithItsCall) {
  const auto x = Put("x");
  Ask(x);
  {
    User user(*this, x);
    ASSERT_NE(user.Keep().data, nullptr);
    EXPECT_EQ(user.call.EndOperation(true), 0u);
    prepared_.Clear();
    EXPECT_EQ(device_.allocations(), 2u) << "it is in use";
    user.call.Finish();
  }
  EXPECT_EQ(device_.allocations(), 1u);
  EXPECT_FALSE(Has(x));
}

TEST_F(PreparedOperandsTest, BuffersDoNotWaitForEver) {
  const auto x = Put("x", 4);
  Make(x);
  auto use = Use(x);
  const absl::Time begin = SteadyNow();
  EXPECT_EQ(Put("y", 4), nullptr);
  EXPECT_GE(SteadyNow() - begin, absl::FromChrono(PreparedOperands::kPatience));
  EXPECT_EQ(device_.allocations(), 2u) << "it is in use";
  // The next buffers are refused immediately. On a busy machine, a refusal may take longer.
  EXPECT_TRUE(Eventually([&] {
    const absl::Time again = SteadyNow();
    EXPECT_EQ(Put("y", 4), nullptr);
    return SteadyNow() - again < absl::FromChrono(PreparedOperands::kPatience);
  }));
  // No further call finds the operand, so it is freed when its current use ends.
  EXPECT_FALSE(Has(x));
  use.reset();
  EXPECT_EQ(store_.budget(device_).used(), 4 * kBytes);
  EXPECT_NE(Put("y", 4), nullptr);
}

TEST_F(PreparedOperandsTest, WhatCallsUseGoesLast) {
  const auto x = Put("x", 4);
  Make(x, "used");
  Make(x, "unused");
  const auto use = Use(x, "used");
  EXPECT_TRUE(Has(x, "unused"));  // The most recently used one.
  EXPECT_NE(Put("y", 3), nullptr);
  EXPECT_TRUE(Has(x, "used"));
  EXPECT_FALSE(Has(x, "unused"));
}

TEST_F(PreparedOperandsTest, GivesAllUpWhereTheBudgetHasRoomButTheDeviceHasNone) {
  const auto x = Put("x", 4);
  Make(x, "first");
  Make(x, "second");
  device_.Fail(FakeDevice::Step::kAllocate, DeviceError::Kind::kOutOfMemory);
  EXPECT_NE(Put("y", 3), nullptr) << "the third attempt";
  EXPECT_EQ(prepared_.bytes(), 0u);
}

TEST_F(PreparedOperandsTest, ABufferWaitsForMemoryThatACallUses) {
  const auto x = Put("x");
  Make(x);
  auto use = Use(x);
  device_.Fail(FakeDevice::Step::kAllocate, DeviceError::Kind::kOutOfMemory, 1000);
  std::thread waiting([&] { EXPECT_NE(Put("y"), nullptr); });
  AwaitForgotten(x);
  EXPECT_EQ(device_.Relent(FakeDevice::Step::kAllocate), 999)
      << "no attempt before memory is freed";
  use.reset();
  waiting.join();
}

TEST_F(PreparedOperandsTest, YieldsToTheWorkOfCalls) {
  const auto x = Put("x");
  Make(x, "used");
  Make(x, "unused");
  const auto use = Use(x, "used");
  device_.Fail(FakeDevice::Step::kScratch, DeviceError::Kind::kOutOfMemory);
  EXPECT_TRUE(Scratch(*stream_, 100).ok());
  EXPECT_EQ(prepared_.bytes(), kBytes) << "it is in use";
  EXPECT_FALSE(Has(x, "used"));
  // If nothing is freed, nothing is retried.
  device_.Fail(FakeDevice::Step::kScratch, DeviceError::Kind::kOutOfMemory, 2);
  EXPECT_EQ(ErrorReason(Scratch(*stream_, 100).status()), "HOST_MEMORY_EXHAUSTED");
  EXPECT_EQ(device_.Relent(FakeDevice::Step::kScratch), 1);
  // Another failure is not a lack of memory.
  Make(x, "unused");
  device_.Fail(FakeDevice::Step::kScratch, DeviceError::Kind::kFailed);
  EXPECT_EQ(ErrorReason(Scratch(*stream_, 100).status()), "CUDA_ERROR");
  EXPECT_TRUE(Has(x, "unused"));
}

TEST_F(PreparedOperandsTest, CallsThatKeepWhatTheyCanDoNotHinderABuffer) {
  const auto x = Put("x", 2);
  std::atomic<bool> stop = false;
  std::atomic<int> found = 0;
  std::vector<std::thread> calls;
  for (int thread = 0; thread < 4; ++thread) {
    calls.emplace_back([&, thread] {
      const std::unique_ptr<Stream> stream = *MakeStream(device_);
      const std::string_view ways[] = {"0", "1", "2", "3", "4", "5"};
      for (std::size_t i = static_cast<std::size_t>(thread); !stop; ++i) {
        User user(prepared_, *stream, x);
        for (std::size_t k = 0; k < 2; ++k) {
          if (user.Keep(ways[(i + k) % 6]).ready) ++found;
          std::this_thread::yield();
        }
        user.call.EndOperation(true);
        user.call.Finish();
      }
    });
  }
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    if (Put("y", 6) == nullptr) {
      ++refused;
      PutPatiently("y", 6);
    }
    EXPECT_TRUE(store_.Delete("y", 0).ok());
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  stop = true;
  for (std::thread& call : calls) call.join();
  EXPECT_GT(found, 0);
  EXPECT_LT(refused, 30);
  prepared_.Clear();
  EXPECT_EQ(prepared_.bytes(), 0u);
  EXPECT_EQ(store_.budget(device_).used(), 2 * kBytes);
  EXPECT_EQ(device_.allocations(), 1u);
}

TEST_F(PreparedOperandsTest, WhatDoesNotFitEitherWayTakesNothingAway) {
  const auto x = Put("x", 4);
  Make(x);
  EXPECT_EQ(Put("y", 5), nullptr);
  EXPECT_TRUE(Has(x));
}

TEST_F(PreparedOperandsTest, YieldsToNewer) {
  const auto x = Put("x", 6);
  Make(x, "first");
  Make(x, "second");
  Make(x, "third");
  EXPECT_FALSE(Has(x, "first"));
  EXPECT_TRUE(Has(x, "third"));
  EXPECT_EQ(Ask(x, "huge", 9 * kBytes).data, nullptr);
  EXPECT_EQ(Ask(x, "huge", 9 * kBytes).data, nullptr);
  EXPECT_TRUE(Has(x, "third")) << "what can never be kept displaces nothing";
}

TEST_F(PreparedOperandsTest, WithoutMemoryNothingIsKeptAndMemoryThatBuffersNeedIsGivenBack) {
  const auto x = Put("x");
  Make(x, "first");
  Ask(x, "second");
  device_.Fail(FakeDevice::Step::kAllocate, DeviceError::Kind::kOutOfMemory);
  EXPECT_EQ(Ask(x, "second").data, nullptr);
  EXPECT_EQ(prepared_.bytes(), kBytes);
  device_.Fail(FakeDevice::Step::kAllocate, DeviceError::Kind::kOutOfMemory);
  EXPECT_NE(Put("y"), nullptr) << "the second attempt";
  EXPECT_EQ(prepared_.bytes(), 0u);
}

TEST_F(PreparedOperandsTest, RemembersSoManyAndNoMore) {
  const auto x = Put("x");
  std::vector<std::string> ways;
  for (std::size_t i = 0; i <= PreparedOperands::kMost; ++i) ways.push_back(std::to_string(i));
  for (const std::string& way : ways) Ask(x, way);
  EXPECT_EQ(Ask(x, ways.front()).data, nullptr) << "it is new again";
  EXPECT_NE(Ask(x, ways.back()).data, nullptr);
}

TEST_F(PreparedOperandsTest, ALostDeviceKeepsNothing) {
  const auto x = Put("x");
  Make(x);
  store_.Evict(device_);
  EXPECT_EQ(prepared_.bytes(), 0u);
}

}  // namespace
}  // namespace tessera
