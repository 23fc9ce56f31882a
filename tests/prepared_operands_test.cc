#include "server/prepared_operands.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/buffer_store.h"
#include "tests/fake_device.h"

namespace tessera {
namespace {

constexpr std::size_t kBytes = PreparedOperands::kLeastBytes;
constexpr std::uint64_t kLimit = 8 * kBytes;

class PreparedOperandsTest : public testing::Test {
 protected:
  // A READY buffer of so many times kBytes.
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

  // What a call is given that prepares this of a buffer, and nothing else. done: whether its work is.
  PreparedMemory Ask(const std::shared_ptr<const Buffer>& buffer, std::string_view how = "copy",
                     std::size_t bytes = kBytes, bool done = true) {
    const auto find = [&](const void*) { return buffer; };
    PreparedOperands::Call call(prepared_, *stream_, find);
    const PreparedMemory memory = call.Keep({how, Of(*buffer)}, bytes);
    EXPECT_EQ(call.EndOperation(done), memory.ready ? bytes : 0);
    if (done) call.Finish();
    return memory;
  }
  // So that the next one finds it.
  void* Make(const std::shared_ptr<const Buffer>& buffer, std::string_view how = "copy") {
    EXPECT_EQ(Ask(buffer, how).data, nullptr) << "seen for the first time";
    const PreparedMemory memory = Ask(buffer, how);
    EXPECT_NE(memory.data, nullptr);
    EXPECT_FALSE(memory.ready);
    return memory.data;
  }
  static View Of(const Buffer& buffer) { return WholeView(buffer.type(), buffer.data()); }
  bool Has(const std::shared_ptr<const Buffer>& buffer, std::string_view how = "copy") {
    const auto find = [&](const void*) { return buffer; };
    PreparedOperands::Call call(prepared_, *stream_, find);
    return call.Keep({how, Of(*buffer)}, kBytes).ready;
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
  const auto find = [&](const void*) { return x; };
  PreparedOperands::Call call(prepared_, *stream_, find);
  View view = Of(*x);
  EXPECT_TRUE(call.Keep({"copy", view}, kBytes).ready);
  view.strides[0] = -1;
  EXPECT_FALSE(call.Keep({"copy", view}, kBytes).ready);
  view = Of(*x);
  view.dtype = DType::kI32;
  EXPECT_FALSE(call.Keep({"copy", view}, kBytes).ready);
  view = Of(*x);
  --view.shape[0];
  EXPECT_FALSE(call.Keep({"copy", view}, kBytes).ready);
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
  const auto find = [&](const void*) { return x; };
  PreparedOperands::Call call(prepared_, *stream_, find);
  const PreparedMemory making = call.Keep({"copy", Of(*x)}, kBytes);
  ASSERT_NE(making.data, nullptr);
  EXPECT_EQ(call.Keep({"copy", Of(*x)}, kBytes).data, nullptr) << "of the same operation";
  EXPECT_EQ(Ask(x).data, nullptr);
  EXPECT_EQ(call.EndOperation(true), 0u);
  EXPECT_EQ(Ask(x).data, nullptr);
  const PreparedMemory made = call.Keep({"copy", Of(*x)}, kBytes);
  EXPECT_TRUE(made.ready);
  EXPECT_EQ(made.data, making.data);
  EXPECT_EQ(call.EndOperation(true), kBytes);
  call.Finish();
  EXPECT_TRUE(Ask(x).ready);
}

TEST_F(PreparedOperandsTest, OfAnOperationThatFailedNothingIsSeenByTheNextOne) {
  const auto x = Put("x");
  Ask(x);
  const auto find = [&](const void*) { return x; };
  PreparedOperands::Call call(prepared_, *stream_, find);
  ASSERT_NE(call.Keep({"copy", Of(*x)}, kBytes).data, nullptr);
  call.EndOperation(false);
  EXPECT_EQ(device_.allocations(), 2u) << "its work may be under way";
  EXPECT_EQ(call.Keep({"copy", Of(*x)}, kBytes).data, nullptr) << "seen for the first time";
  call.EndOperation(true);
  call.Finish();
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
  const auto find = [&](const void*) { return y; };
  PreparedOperands::Call call(prepared_, *stream_, find);
  EXPECT_FALSE(call.Keep({"copy", view}, kBytes).ready);
}

TEST_F(PreparedOperandsTest, YieldsToBuffersTheOneThatWasUsedLongestAgoFirst) {
  const auto x = Put("x", 3);
  Make(x, "first");
  Make(x, "second");
  Make(x, "third");
  EXPECT_TRUE(Has(x, "first"));  // 2 of 8 are free
  ASSERT_NE(Put("y", 3), nullptr);
  EXPECT_TRUE(Has(x, "first"));
  EXPECT_FALSE(Has(x, "second"));
  EXPECT_TRUE(Has(x, "third"));
  ASSERT_NE(Put("z", 2), nullptr);
  EXPECT_EQ(prepared_.bytes(), 0u);
  EXPECT_EQ(Put("one too many"), nullptr);
}

TEST_F(PreparedOperandsTest, WhatACallUsesStaysUntilItsEnd) {
  const auto x = Put("x", 4);
  Make(x);
  {
    const auto find = [&](const void*) { return x; };
    PreparedOperands::Call call(prepared_, *stream_, find);
    ASSERT_TRUE(call.Keep({"copy", Of(*x)}, kBytes).ready);
    EXPECT_EQ(Put("y", 4), nullptr);
    EXPECT_EQ(prepared_.bytes(), kBytes);
  }
  EXPECT_TRUE(Has(x));
  EXPECT_NE(Put("y", 4), nullptr);
  EXPECT_FALSE(Has(x));
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
  EXPECT_TRUE(Has(x, "third")) << "what can never be kept takes nothing away";
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
