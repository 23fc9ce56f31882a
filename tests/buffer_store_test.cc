#include "server/buffer_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/fake_device.h"

namespace tessera {
namespace {

using testing::ElementsAre;

constexpr std::uint64_t kLimit = 1000;

class BufferStoreTest : public testing::Test {
 protected:
  BufferSpec Spec(const std::string& name, std::int64_t floats) {
    BufferSpec spec;
    spec.name = name;
    spec.type = *MakeArrayType(DType::kF32, {floats});
    spec.device = &device_;
    return spec;
  }

  void Write(Draft& draft, std::uint64_t offset, std::uint64_t size) {
    ASSERT_TRUE(store_.BeginWrite(draft, offset, size).ok());
    store_.EndWrite(draft, offset, size, true);
  }

  BufferInfo Make(const BufferSpec& spec) {
    auto draft = *store_.Create(spec);
    Write(*draft, 0, spec.type.bytes());
    return *store_.Seal(draft);
  }

  std::vector<std::string> Names(const std::vector<BufferInfo>& infos) {
    std::vector<std::string> names;
    for (const BufferInfo& info : infos) names.push_back(info.buffer->name());
    return names;
  }

  FakeDevice device_;
  BufferStore store_{{{&device_, kLimit}},
                     {.default_ttl = absl::InfiniteDuration(),
                      .max_ttl = absl::Hours(1000),
                      .idle_draft = absl::Seconds(10)}};
};

TEST(RangeSetTest, AgreesWithABitmap) {
  constexpr std::uint64_t kSize = 64;
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    RangeSet set;
    std::vector<bool> bits(kSize);
    for (int step = 0; step < 20; ++step) {
      const std::uint64_t begin = random() % kSize;
      const std::uint64_t end = begin + random() % (kSize - begin + 1);
      const bool add = random() % 3 != 0;
      add ? set.Add({begin, end}) : set.Remove({begin, end});
      for (std::uint64_t i = begin; i < end; ++i) bits[i] = add;

      std::vector<Range> missing;
      for (std::uint64_t i = 0; i < kSize; ++i) {
        if (bits[i]) continue;
        if (!missing.empty() && missing.back().end == i) {
          missing.back().end = i + 1;
        } else {
          missing.push_back({i, i + 1});
        }
      }
      ASSERT_EQ(set.Missing(kSize, 100), missing);
      std::uint64_t prefix = 0;
      while (prefix < kSize && bits[prefix]) ++prefix;
      ASSERT_EQ(set.Prefix(), prefix);
    }
  }
}

TEST(RangeSetTest, MissingStopsAtTheLimit) {
  RangeSet set;
  for (std::uint64_t i = 0; i < 100; i += 2) set.Add({i, i + 1});
  EXPECT_THAT(set.Missing(100, 2), ElementsAre(Range{1, 2}, Range{3, 4}));
  EXPECT_EQ(ToString(set.Missing(100, 2)), "1-2, 3-4");
  EXPECT_NE(ToString(set.Missing(100, 100)).find("..."), std::string::npos);
}

TEST_F(BufferStoreTest, DraftBecomesReadyOnceComplete) {
  auto draft = *store_.Create(Spec("a", 10));
  EXPECT_EQ(ErrorReason(store_.Find("a").status()), "BUFFER_NOT_READY");
  Write(*draft, 20, 20);
  BufferInfo info = *store_.Get("a");
  EXPECT_FALSE(info.ready);
  EXPECT_EQ(info.committed_bytes, 0u);
  EXPECT_THAT(info.missing, ElementsAre(Range{0, 20}));
  const absl::Status early = store_.Seal("a").status();
  EXPECT_EQ(ErrorReason(early), "BUFFER_NOT_READY");
  EXPECT_EQ(ErrorMetadata(early)["missing"], "0-20");
  Write(*draft, 0, 20);
  info = *store_.Seal("a");
  EXPECT_TRUE(info.ready);
  EXPECT_EQ(info.committed_bytes, 40u);
  EXPECT_TRUE(store_.Find("a").ok());
  EXPECT_TRUE(store_.Seal("a").ok()) << "sealing a READY buffer succeeds";
  EXPECT_EQ(ErrorReason(store_.BeginWrite(*draft, 0, 4).status()), "BUFFER_SEALED");
  EXPECT_EQ(ErrorReason(store_.FindDraft("a").status()), "BUFFER_SEALED");
}

TEST_F(BufferStoreTest, WriteInFlightKeepsABufferFromBeingSealed) {
  auto draft = *store_.Create(Spec("a", 10));
  Write(*draft, 0, 40);
  ASSERT_TRUE(store_.BeginWrite(*draft, 0, 4).ok());
  EXPECT_EQ(ErrorReason(store_.Seal("a").status()), "BUFFER_NOT_READY");
  store_.EndWrite(*draft, 0, 4, false);
  EXPECT_EQ(ErrorMetadata(store_.Seal("a").status())["missing"], "0-4")
      << "a failed write leaves nothing to rely on";
  Write(*draft, 0, 4);
  EXPECT_TRUE(store_.Seal("a").ok());
}

TEST_F(BufferStoreTest, RangesOutsideTheBuffer) {
  auto draft = *store_.Create(Spec("a", 10));
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  for (const auto& [offset, size] : std::vector<std::pair<std::uint64_t, std::uint64_t>>{
           {0, 41}, {40, 1}, {41, 0}, {kMost, 1}, {1, kMost}, {kMost, kMost}, {39, 2}}) {
    const absl::Status status = store_.BeginWrite(*draft, offset, size).status();
    EXPECT_EQ(ErrorReason(status), "BAD_RANGE") << offset << " " << size;
    EXPECT_EQ(ErrorMetadata(status)["limit"], "40");
    EXPECT_EQ(ErrorMetadata(status)["offset"], std::to_string(offset));
    EXPECT_EQ(ErrorMetadata(status)["size"], std::to_string(size));
  }
}

TEST_F(BufferStoreTest, Names) {
  for (const std::string& name :
       {std::string(), std::string(129, 'a'), std::string("a b"), std::string("\xc3\xa9"),
        std::string("a\0b", 3), std::string("a:b")}) {
    EXPECT_EQ(ErrorReason(store_.Create(Spec(name, 1)).status()), "BAD_NAME") << name;
  }
  EXPECT_TRUE(store_.Create(Spec(std::string(128, 'a'), 1)).ok());
  EXPECT_TRUE(store_.Create(Spec("aZ0._/-", 1)).ok());
}

TEST_F(BufferStoreTest, TakenNames) {
  auto draft = *store_.Create(Spec("a", 1));
  EXPECT_EQ(ErrorReason(store_.Create(Spec("a", 1)).status()), "BUFFER_EXISTS");
  BufferSpec replacement = Spec("a", 2);
  replacement.replace = true;
  EXPECT_EQ(ErrorReason(store_.Create(replacement).status()), "BUFFER_EXISTS")
      << "a name has one draft at most";
  Write(*draft, 0, 4);
  ASSERT_TRUE(store_.Seal(draft).ok());
  EXPECT_EQ(ErrorReason(store_.Create(Spec("a", 1)).status()), "BUFFER_EXISTS");

  auto next = *store_.Create(replacement);
  const auto old = *store_.Find("a");
  EXPECT_EQ(old->type().bytes(), 4u) << "the old one serves until the new one is READY";
  EXPECT_TRUE(store_.Get("a")->ready);
  Write(*next, 0, 8);
  const BufferInfo info = *store_.Seal(next);
  EXPECT_GT(info.buffer->version(), old->version());
  EXPECT_EQ((*store_.Find("a"))->type().bytes(), 8u);
  EXPECT_EQ(store_.budget(device_).used(), 12u) << "someone still holds the old one";
}

TEST_F(BufferStoreTest, MemoryComesBackWithTheLastUser) {
  Make(Spec("a", 100));
  auto user = *store_.Find("a");
  EXPECT_TRUE(store_.Delete("a").ok());
  EXPECT_EQ(ErrorReason(store_.Find("a").status()), "BUFFER_NOT_FOUND");
  EXPECT_EQ(ErrorReason(store_.Delete("a")), "BUFFER_NOT_FOUND");
  EXPECT_EQ(store_.budget(device_).used(), 400u);
  EXPECT_EQ(device_.allocations(), 1u);
  user.reset();
  EXPECT_EQ(store_.budget(device_).used(), 0u);
  EXPECT_EQ(device_.allocations(), 0u);
}

TEST_F(BufferStoreTest, Budget) {
  Make(Spec("a", 200));
  const absl::Status status = store_.Create(Spec("b", 51)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(status), "QUOTA_EXCEEDED");
  EXPECT_EQ(ErrorMetadata(status)["requested"], "204");
  EXPECT_EQ(ErrorMetadata(status)["free"], "200");
  EXPECT_EQ(ErrorMetadata(status)["total"], "1000");
  EXPECT_EQ(ErrorReason(store_.Create(Spec("b", std::int64_t{1} << 60)).status()),
            "QUOTA_EXCEEDED");
  EXPECT_TRUE(store_.Create(Spec("b", 50)).ok()) << "exactly full is fine";
  EXPECT_TRUE(store_.Create(Spec("empty", 0)).ok());
}

TEST_F(BufferStoreTest, DeviceOutOfMemory) {
  device_.Fail(FakeDevice::Step::kAllocate, DeviceError::Kind::kOutOfMemory);
  const absl::Status status = store_.Create(Spec("a", 10)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(status), "GPU_MEMORY_EXHAUSTED");
  EXPECT_EQ(ErrorMetadata(status)["requested"], "40");
  EXPECT_EQ(store_.budget(device_).used(), 0u);
  EXPECT_TRUE(store_.Create(Spec("a", 10)).ok());
}

TEST_F(BufferStoreTest, DiscardedAndDeletedDrafts) {
  auto draft = *store_.Create(Spec("a", 10));
  store_.Discard(*draft);
  EXPECT_EQ(ErrorReason(store_.BeginWrite(*draft, 0, 4).status()), "BUFFER_NOT_FOUND");
  EXPECT_EQ(ErrorReason(store_.Seal(draft).status()), "BUFFER_NOT_FOUND");
  store_.Discard(*draft);
  draft = *store_.Create(Spec("a", 10));
  EXPECT_TRUE(store_.Delete("a").ok());
  EXPECT_EQ(ErrorReason(store_.BeginWrite(*draft, 0, 4).status()), "BUFFER_NOT_FOUND");
  draft.reset();
  EXPECT_EQ(device_.allocations(), 0u);
}

TEST_F(BufferStoreTest, ExclusiveDraftsAreTheirOwners) {
  BufferSpec spec = Spec("a", 10);
  spec.exclusive = true;
  auto draft = *store_.Create(spec);
  EXPECT_EQ(ErrorReason(store_.FindDraft("a").status()), "BUFFER_NOT_READY");
  Write(*draft, 0, 40);
  EXPECT_EQ(ErrorReason(store_.Seal("a").status()), "BUFFER_NOT_READY");
  EXPECT_TRUE(store_.Seal(draft).ok());
}

TEST_F(BufferStoreTest, Expiry) {
  BufferSpec spec = Spec("a", 10);
  spec.ttl = absl::Milliseconds(300);
  Make(spec);
  Make(Spec("b", 10));
  EXPECT_TRUE(store_.Find("a").ok());
  EXPECT_GT(store_.Get("b")->expire_time, absl::Now() + absl::Hours(999))
      << "no ttl of its own: the longest there is";
  absl::SleepFor(absl::Milliseconds(310));
  EXPECT_EQ(ErrorReason(store_.Find("a").status()), "BUFFER_NOT_FOUND");
  EXPECT_THAT(Names(store_.List("", "", 10)), ElementsAre("b"));
  EXPECT_EQ(store_.budget(device_).used(), 80u);
  store_.Sweep(absl::Now());
  EXPECT_EQ(store_.budget(device_).used(), 40u);
  EXPECT_TRUE(store_.Create(Spec("a", 10)).ok());
}

TEST_F(BufferStoreTest, TtlIsRenewedAndDropped) {
  BufferSpec spec = Spec("a", 10);
  spec.ttl = absl::Seconds(30);
  Make(spec);
  const BufferInfo renewed = *store_.SetTtl("a", absl::Hours(2));
  EXPECT_GT(renewed.expire_time, absl::Now() + absl::Hours(1));
  EXPECT_EQ(ErrorReason(store_.SetTtl("a", absl::Hours(1001)).status()), "BAD_TTL");
  EXPECT_EQ(ErrorReason(store_.SetTtl("a", std::nullopt).status()), "BAD_TTL")
      << "for ever is longer than the limit";
  EXPECT_EQ(ErrorReason(store_.SetTtl("b", absl::Hours(1)).status()), "BUFFER_NOT_FOUND");
  ASSERT_TRUE(store_.SetTtl("a", absl::Milliseconds(1)).ok());
  absl::SleepFor(absl::Milliseconds(2));
  EXPECT_EQ(ErrorReason(store_.SetTtl("a", absl::Hours(1)).status()), "BUFFER_NOT_FOUND");
}

TEST_F(BufferStoreTest, IdleDraftsGo) {
  auto idle = *store_.Create(Spec("idle", 10));
  auto busy = *store_.Create(Spec("busy", 10));
  BufferSpec owned = Spec("owned", 10);
  owned.exclusive = true;
  auto exclusive = *store_.Create(owned);
  ASSERT_TRUE(store_.BeginWrite(*busy, 0, 4).ok());
  store_.Sweep(absl::Now() + absl::Seconds(5));
  EXPECT_TRUE(store_.Get("idle").ok());
  store_.Sweep(absl::Now() + absl::Seconds(11));
  EXPECT_FALSE(store_.Get("idle").ok());
  EXPECT_TRUE(store_.Get("busy").ok()) << "its write has not ended";
  EXPECT_TRUE(store_.Get("owned").ok()) << "its owner ends it";
}

TEST_F(BufferStoreTest, ListMergesAndPages) {
  for (const char* name : {"a/1", "a/3", "b"}) Make(Spec(name, 1));
  auto draft = *store_.Create(Spec("a/2", 1));
  BufferSpec replacement = Spec("a/3", 1);
  replacement.replace = true;
  auto next = *store_.Create(replacement);
  EXPECT_THAT(Names(store_.List("", "", 10)), ElementsAre("a/1", "a/2", "a/3", "b"));
  EXPECT_THAT(Names(store_.List("a/", "", 10)), ElementsAre("a/1", "a/2", "a/3"));
  EXPECT_THAT(Names(store_.List("a/", "a/1", 1)), ElementsAre("a/2"));
  EXPECT_THAT(Names(store_.List("a/", "a/3", 10)), ElementsAre());
  EXPECT_THAT(Names(store_.List("c", "", 10)), ElementsAre());
  EXPECT_TRUE(store_.List("a/3", "", 1)[0].ready);
}

TEST_F(BufferStoreTest, ManyThreadsOnOneName) {
  std::vector<std::thread> threads;
  std::atomic<int> made{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        BufferSpec spec = Spec("a", 1);
        spec.replace = i % 2 == 0;
        if (auto draft = store_.Create(spec); draft.ok()) {
          // Another thread may have deleted it by now.
          if (store_.BeginWrite(**draft, 0, 4).ok()) store_.EndWrite(**draft, 0, 4, true);
          if (store_.Seal(*draft).ok()) ++made;
        }
        if (auto buffer = store_.Find("a"); buffer.ok()) {
          ASSERT_EQ((*buffer)->name(), "a");
        }
        if (i % 10 == 0) (void)store_.Delete("a");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(made, 0);
  (void)store_.Delete("a");
  EXPECT_EQ(store_.budget(device_).used(), 0u);
  EXPECT_EQ(device_.allocations(), 0u);
}

}  // namespace
}  // namespace tessera
