#include "server/buffers/buffer_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <random>

#include "kernels/client_and_server/crc32c.h"
#include "server/clock.h"
#include "tests/fake_device.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

constexpr std::uint64_t kLimit = 5 * 256;  // Five buffers of up to 64 floats each.

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
    return *store_.Seal(*draft);
  }

  std::vector<std::string> Names(const std::string& prefix = "", const std::string& after = "",
                                 std::size_t most = 10) {
    std::vector<std::string> names;
    for (const BufferInfo& info : store_.List(prefix, after, most))
      names.push_back(info.buffer->name());
    return names;
  }

  FakeDevice device_;
  BufferStore store_{{{&device_, kLimit}},
                     {.default_ttl = absl::InfiniteDuration(),
                      .max_ttl = absl::Hours(1000),
                      .idle_draft = absl::Seconds(10),
                      .buffers = 8,
                      .ranges = 4}};

  static BufferSpec Replacing(BufferSpec spec) {
    spec.replace = true;
    return spec;
  }
  static BufferSpec WithTtl(BufferSpec spec, absl::Duration ttl) {
    spec.ttl = ttl;
    return spec;
  }
  // Tries to make a link of that name. Returns the reason why that fails, or "".
  std::string Link(const std::string& source, std::uint64_t version, const std::string& name,
                   std::optional<absl::Duration> ttl = std::nullopt) {
    BufferSpec spec;
    spec.name = name;
    spec.ttl = ttl;
    return ErrorReason(store_.Link(source, version, spec).status());
  }
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
  EXPECT_EQ(ErrorReason(store_.Find("a", 0).status()), "BUFFER_NOT_READY");
  Write(*draft, 20, 20);
  BufferInfo info = *store_.Get("a", 0);
  EXPECT_FALSE(info.ready);
  EXPECT_EQ(info.committed_bytes, 0u);
  EXPECT_THAT(info.missing, ElementsAre(Range{0, 20}));
  const absl::Status early = store_.Seal("a", 0, {}).status();
  EXPECT_EQ(ErrorReason(early), "BUFFER_NOT_READY");
  EXPECT_EQ(ErrorMetadata(early)["missing"], "0-20");
  Write(*draft, 0, 20);
  info = *store_.Seal("a", 0, {});
  EXPECT_TRUE(info.ready);
  EXPECT_EQ(info.committed_bytes, 40u);
  EXPECT_TRUE(store_.Find("a", 0).ok());
  EXPECT_TRUE(store_.Seal("a", info.version, {}).ok()) << "sealing again succeeds";
  EXPECT_EQ(ErrorReason(store_.Seal("a", 0, {}).status()), "BUFFER_NOT_FOUND")
      << "its owner is unknown";
  EXPECT_EQ(ErrorReason(store_.BeginWrite(*draft, 0, 4).status()), "BUFFER_SEALED");
  EXPECT_EQ(ErrorReason(store_.FindDraft("a", 0).status()), "BUFFER_SEALED");
}

TEST_F(BufferStoreTest, WriteInFlightKeepsABufferFromBeingSealed) {
  auto draft = *store_.Create(Spec("a", 10));
  Write(*draft, 0, 40);
  ASSERT_TRUE(store_.BeginWrite(*draft, 0, 4).ok());
  EXPECT_EQ(ErrorReason(store_.Seal("a", 0, {}).status()), "BUFFER_NOT_READY");
  store_.EndWrite(*draft, 0, 4, false);
  EXPECT_EQ(ErrorMetadata(store_.Seal("a", 0, {}).status())["missing"], "0-4")
      << "a failed write leaves nothing to rely on";
  Write(*draft, 0, 4);
  EXPECT_TRUE(store_.Seal("a", 0, {}).ok());
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
  EXPECT_TRUE(store_.Create(Replacing(Spec("a", 2))).ok()) << "replacing does not wait";
  Write(*draft, 0, 4);
  ASSERT_TRUE(store_.Seal(*draft).ok());
  EXPECT_EQ(ErrorReason(store_.Create(Spec("a", 1)).status()), "BUFFER_EXISTS");

  auto next = *store_.Create(Replacing(Spec("a", 2)));
  const BufferInfo old = *store_.Find("a", 0);
  EXPECT_EQ(old.buffer->type().bytes(), 4u) << "the old one serves until the new one is READY";
  EXPECT_TRUE(store_.Get("a", 0)->ready);
  Write(*next, 0, 8);
  const BufferInfo info = *store_.Seal(*next);
  EXPECT_GT(info.version, old.version);
  EXPECT_EQ(store_.Find("a", 0)->buffer->type().bytes(), 8u);
}

TEST_F(BufferStoreTest, ADraftThatDoesNotReplaceLosesToOneThatDoes) {
  auto first = *store_.Create(Spec("a", 1));
  Write(*first, 0, 4);
  Make(Replacing(Spec("a", 2)));
  EXPECT_EQ(ErrorReason(store_.Seal(*first).status()), "BUFFER_EXISTS");
  EXPECT_EQ(store_.Find("a", 0)->buffer->type().bytes(), 8u);
}

TEST_F(BufferStoreTest, TheLastToBeReadyWins) {
  auto first = *store_.Create(Replacing(Spec("a", 1)));
  auto second = *store_.Create(Replacing(Spec("a", 2)));
  const std::uint64_t first_version = first->buffer().version();
  Write(*second, 0, 8);
  const BufferInfo newer = *store_.Seal(*second);
  EXPECT_EQ(newer.version, second->buffer().version()) << "a draft keeps its version";
  EXPECT_GT(newer.version, first_version);
  Write(*first, 0, 4);
  const BufferInfo last = *store_.Seal("a", first_version, {});
  EXPECT_GT(last.version, newer.version) << "unless a newer one has become READY before";
  EXPECT_EQ(store_.Find("a", 0)->version, last.version);
  EXPECT_EQ(store_.Seal("a", first_version, {})->version, last.version);
}

TEST_F(BufferStoreTest, VersionsBeginAtTheClock) {
  const BufferInfo info = Make(Spec("a", 1));
  const auto now = static_cast<std::uint64_t>(absl::ToUnixMicros(absl::Now()));
  EXPECT_LE(info.version, now + 1000);
  EXPECT_GT(info.version, now - 60'000'000);
}

TEST_F(BufferStoreTest, WrongVersionsChangeNothing) {
  const BufferInfo ready = Make(Spec("a", 1));
  auto draft = *store_.Create(Replacing(Spec("a", 1)));
  const std::uint64_t version = draft->buffer().version();
  EXPECT_EQ(store_.Get("a", version)->ready, false);
  EXPECT_EQ(store_.Get("a", ready.version)->ready, true);
  const auto mismatch = [&](const absl::Status& status) {
    EXPECT_EQ(ErrorReason(status), "VERSION_MISMATCH");
    EXPECT_EQ(ErrorMetadata(status)["expected"], "7");
    EXPECT_EQ(ErrorMetadata(status)["actual"], std::to_string(ready.version));
  };
  mismatch(store_.Get("a", 7).status());
  mismatch(store_.Find("a", 7).status());
  mismatch(store_.Seal("a", 7, {}).status());
  mismatch(store_.FindDraft("a", 7).status());
  mismatch(store_.SetTtl("a", 7, absl::Hours(1)).status());
  mismatch(store_.Delete("a", 7));
  EXPECT_EQ(store_.Drafts("a").size(), 1u);
  EXPECT_TRUE(store_.Delete("a", version).ok());
  EXPECT_TRUE(store_.Find("a", 0).ok()) << "only the draft";
  EXPECT_EQ(store_.Drafts("a").size(), 0u);
  EXPECT_EQ(ErrorReason(store_.BeginWrite(*draft, 0, 4).status()), "BUFFER_NOT_FOUND");
  draft = *store_.Create(Replacing(Spec("a", 1)));
  EXPECT_TRUE(store_.Delete("a", ready.version).ok());
  EXPECT_EQ(store_.Drafts("a").size(), 1u) << "only the READY one";
}

TEST_F(BufferStoreTest, SeveralDraftsNeedTheirVersions) {
  auto first = *store_.Create(Replacing(Spec("a", 1)));
  EXPECT_EQ(*store_.FindDraft("a", 0), first);
  auto second = *store_.Create(Replacing(Spec("a", 1)));
  EXPECT_EQ(ErrorReason(store_.FindDraft("a", 0).status()), "VERSION_REQUIRED") << "of two";
  auto third = *store_.Create(Replacing(Spec("a", 1)));
  const absl::Status which = store_.FindDraft("a", 0).status();
  EXPECT_EQ(ErrorReason(which), "VERSION_REQUIRED");
  EXPECT_EQ(ErrorMetadata(which)["versions"],
            absl::StrCat(first->buffer().version(), ", ", second->buffer().version(), ", ",
                         third->buffer().version()));
  EXPECT_EQ(*store_.FindDraft("a", second->buffer().version()), second);
  EXPECT_EQ(ErrorReason(store_.Seal("a", 0, {}).status()), "VERSION_REQUIRED");
  EXPECT_TRUE(store_.Delete("a", 0).ok());
  EXPECT_EQ(store_.Drafts("a").size(), 0u) << "without a version, all of them go";
}

TEST_F(BufferStoreTest, ResultsAreSeenWhenTheyAreReady) {
  Make(Spec("a", 1));
  BufferSpec spec = Replacing(Spec("a", 2));
  ResultDraft result(store_, spec);
  ASSERT_TRUE(result.Open().ok());
  EXPECT_EQ(store_.Drafts("a").size(), 0u);
  EXPECT_TRUE(store_.Delete("a", 0).ok());
  EXPECT_EQ(ErrorReason(store_.Get("a", 0).status()), "BUFFER_NOT_FOUND");
  EXPECT_TRUE(result.Seal().ok()) << "whose name was deleted before";
  EXPECT_EQ(store_.Find("a", 0)->buffer->type().bytes(), 8u);
  {
    ResultDraft dropped(store_, spec);
    ASSERT_TRUE(dropped.Open().ok());
  }
  EXPECT_EQ(store_.budget(device_).used(), 256u);
}

TEST_F(BufferStoreTest, ResultsBecomeReadyTogetherOrNotAtAll) {
  const auto seal = [&](const BufferSpec& first, const BufferSpec& second, bool taken = false) {
    ResultDraft a(store_, first), b(store_, second);
    EXPECT_TRUE(a.Open().ok());
    EXPECT_TRUE(b.Open().ok());
    if (taken) Make(Replacing(Spec(second.name, 1)));
    const auto sealed = ResultDraft::SealAll({&a, &b});
    EXPECT_TRUE(!sealed.ok() || sealed->at(1).buffer == store_.Find(second.name, 0)->buffer);
    return ErrorReason(sealed.status());
  };
  const std::shared_ptr<const Buffer> before = Make(Spec("a", 1)).buffer;
  EXPECT_EQ(seal(Replacing(Spec("a", 2)), Spec("b", 2), /*taken=*/true), "BUFFER_EXISTS");
  EXPECT_EQ(store_.Find("a", 0)->buffer, before);
  EXPECT_EQ(seal(Replacing(Spec("a", 2)), Replacing(Spec("b", 2))), "");
  EXPECT_EQ(store_.Find("a", 0)->buffer->type().bytes(), 8u);
  // Both results have the same name, so the second one would replace the first.
  EXPECT_EQ(seal(Replacing(Spec("c", 1)), Spec("c", 2)), "BUFFER_EXISTS");
  EXPECT_EQ(ErrorReason(store_.Find("c", 0).status()), "BUFFER_NOT_FOUND");
  EXPECT_EQ(seal(Spec("c", 1), Replacing(Spec("c", 2))), "");
}

TEST_F(BufferStoreTest, OperandsAreFoundAtOneMoment) {
  const BufferInfo a = Make(Spec("a", 1));
  Make(Spec("b", 1));
  BufferStore::Wanted wanted[] = {{"a", a.version}, {"", 0}, {"b", 0}};
  Awaited awaited;
  store_.FindAll(absl::MakeSpan(wanted), awaited);
  EXPECT_EQ(wanted[0].buffer, a.buffer);
  EXPECT_EQ(wanted[1].buffer, nullptr);
  EXPECT_NE(wanted[2].buffer, nullptr);
  for (const BufferStore::Wanted& one : wanted) EXPECT_TRUE(one.status.ok()) << one.status;
  BufferStore::Wanted some[] = {{"none", 0}, {"b", 0}};
  store_.FindAll(absl::MakeSpan(some), awaited);
  EXPECT_EQ(ErrorReason(some[0].status), "BUFFER_NOT_FOUND");
  EXPECT_NE(some[1].buffer, nullptr);
  EXPECT_TRUE(awaited.empty());
}

TEST_F(BufferStoreTest, RestoredBuffersAreThereBeforeTheirBytes) {
  const std::uint64_t version = store_.last_version() + 1'000'000;
  int asked = 0;
  const auto arrival = std::make_shared<Arrival>([&asked] { ++asked; });
  const auto restored = store_.Restore({.spec = Spec("a", 2),
                                        .version = version,
                                        .create_time = SteadyNow(),
                                        .checksum = 7,
                                        .arrival = arrival});
  // Everything but the bytes has been restored.
  EXPECT_EQ(store_.Get("a", version)->checksum, 7u);
  EXPECT_TRUE(store_.Get("a", 0)->ready);
  EXPECT_EQ(ErrorReason(store_.Create(Spec("a", 1)).status()), "BUFFER_EXISTS");
  ASSERT_TRUE(store_.Link("a", 0, Spec("b", 0)).ok());
  EXPECT_GT(Make(Spec("c", 1)).version, version);
  EXPECT_EQ(asked, 0);
  // A call that needs the bytes waits, or is refused if it cannot wait.
  EXPECT_EQ(ErrorReason(store_.Find("a", 0).status()), "BUFFER_NOT_READY");
  Awaited awaited, of_link;
  EXPECT_EQ(store_.Find("a", 0, &awaited)->buffer, restored);
  EXPECT_TRUE(store_.Find("b", 0, &of_link).ok());
  EXPECT_EQ(asked, 2);
  absl::Status a = absl::UnknownError("not called"), b = a;
  awaited.Then([&a](const absl::Status& status) { a = status; });
  of_link.Then([&b](const absl::Status& status) { b = status; });
  EXPECT_TRUE(of_link.Cancel());
  EXPECT_FALSE(of_link.Cancel());
  arrival->End(absl::OkStatus());
  EXPECT_TRUE(a.ok()) << a;
  EXPECT_TRUE(absl::IsUnknown(b)) << b;
  EXPECT_FALSE(awaited.Cancel());
  Awaited none;
  EXPECT_TRUE(store_.Find("b", 0, &none).ok());
  EXPECT_TRUE(none.empty());
}

TEST_F(BufferStoreTest, RestoredBuffersMayBeLost) {
  const auto restore = [&](const std::string& name, std::int64_t floats) {
    const auto arrival = std::make_shared<Arrival>([] {});
    store_.Restore({.spec = Spec(name, floats),
                    .version = store_.last_version() + 1,
                    .create_time = SteadyNow(),
                    .arrival = arrival});
    return arrival;
  };
  const auto reason_of = [&](const std::string& name) {
    Awaited awaited;
    return ErrorReason(store_.Find(name, 0, &awaited).status());
  };
  restore("a", 1)->End(MakeError(absl::StatusCode::kDataLoss, "DATA_LOST", "gone"));
  EXPECT_EQ(reason_of("a"), "DATA_LOST");
  EXPECT_TRUE(store_.Get("a", 0).ok());
  Make(Replacing(Spec("a", 1)));
  EXPECT_EQ(reason_of("a"), "");
  // There is no memory for this one.
  EXPECT_TRUE(restore("large", std::int64_t{1} << 40)->ended());
  EXPECT_EQ(reason_of("large"), "QUOTA_EXCEEDED");
  EXPECT_TRUE(store_.Delete("large", 0).ok());
}

TEST_F(BufferStoreTest, Checksums) {
  const std::string data = "0123456789abcdef";
  const auto write = [&](Draft& draft, std::uint64_t begin, std::uint64_t end, bool with = true) {
    ASSERT_TRUE(store_.BeginWrite(draft, begin, end - begin).ok());
    store_.EndWrite(draft, begin, end - begin, true,
                    with ? std::optional(Crc32c(data.data() + begin, end - begin)) : std::nullopt);
  };
  const std::uint32_t whole = Crc32c(data.data(), data.size());
  auto draft = *store_.Create(Spec("a", 4));
  write(*draft, 8, 16);
  write(*draft, 0, 4);
  write(*draft, 4, 8);  // It is between the other two ranges.
  EXPECT_EQ(ErrorReason(store_.Seal(*draft, whole + 1).status()), "BAD_CHECKSUM");
  EXPECT_EQ(store_.Seal(*draft, whole).status(), absl::OkStatus());
  EXPECT_EQ(store_.Find("a", 0)->checksum, whole);
  const std::uint64_t version = store_.Find("a", 0)->version;
  EXPECT_EQ(ErrorReason(store_.Seal("a", version, whole + 1).status()), "BAD_CHECKSUM")
      << "also of one that is sealed again";

  draft = *store_.Create(Spec("twice", 4));
  write(*draft, 0, 16);
  write(*draft, 4, 8);
  EXPECT_EQ(ErrorReason(store_.Seal(*draft, whole).status()), "CHECKSUM_UNKNOWN");
  EXPECT_EQ(store_.Seal(*draft)->checksum, std::nullopt);

  draft = *store_.Create(Spec("again", 4));
  write(*draft, 0, 16);
  ASSERT_TRUE(store_.BeginWrite(*draft, 8, 8).ok());
  store_.EndWrite(*draft, 8, 8, false);
  write(*draft, 8, 16);
  EXPECT_EQ(ErrorReason(store_.Seal(*draft, whole).status()), "CHECKSUM_UNKNOWN")
      << "the checksum of the half that a failed write has left is unknown";

  draft = *store_.Create(Spec("without", 4));
  write(*draft, 0, 8);
  write(*draft, 8, 16, false);
  EXPECT_EQ(ErrorReason(store_.Seal(*draft, whole).status()), "CHECKSUM_UNKNOWN");
}

TEST_F(BufferStoreTest, RangesAreCountedWhileTheyAreWrittenAndAfterwards) {
  auto draft = *store_.Create(Spec("a", 64));
  const auto expect_full = [&] {
    const absl::Status status = store_.BeginWrite(*draft, 100, 4).status();
    EXPECT_EQ(ErrorReason(status), "TOO_MANY_RANGES");
    EXPECT_EQ(ErrorMetadata(status)["limit"], "4");
  };
  for (std::uint64_t i = 0; i < 4; ++i) ASSERT_TRUE(store_.BeginWrite(*draft, 8 * i, 4).ok());
  expect_full();
  for (std::uint64_t i = 0; i < 4; ++i) store_.EndWrite(*draft, 8 * i, 4, true);
  expect_full();
  Write(*draft, 4, 4);  // Closes a gap.
  Write(*draft, 100, 4);
}

TEST_F(BufferStoreTest, AWriteGrows) {
  auto draft = *store_.Create(Spec("a", 64));
  for (std::uint64_t i = 0; i < 3; ++i) Write(*draft, 8 * i, 4);
  char* memory = static_cast<char*>(*store_.BeginWrite(*draft, 100, 4));
  EXPECT_EQ(*store_.ExtendWrite(*draft, 104, 4), memory + 4) << "it is not a separate range";
  EXPECT_EQ(ErrorReason(store_.ExtendWrite(*draft, 253, 4).status()), "BAD_RANGE");
  store_.EndWrite(*draft, 100, 8, true);
  EXPECT_THAT(store_.Describe(*draft).missing,
              testing::ElementsAre(Range{4, 8}, Range{12, 16}, Range{20, 100}, Range{108, 256}));
  ASSERT_TRUE(store_.BeginWrite(*draft, 4, 4).ok());
  ASSERT_TRUE(store_.Delete("a", 0).ok());
  EXPECT_EQ(ErrorReason(store_.ExtendWrite(*draft, 8, 4).status()), "BUFFER_NOT_FOUND");
  store_.AbandonWrite(*draft);
}

TEST_F(BufferStoreTest, BuffersAreCounted) {
  std::vector<std::shared_ptr<Draft>> drafts;
  for (int i = 0; i < 8; ++i) drafts.push_back(*store_.Create(Spec("a" + std::to_string(i), 0)));
  const absl::Status status = store_.Create(Spec("b", 0)).status();
  EXPECT_EQ(ErrorReason(status), "TOO_MANY_BUFFERS") << "empty ones count, too";
  EXPECT_EQ(ErrorMetadata(status)["limit"], "8");
  EXPECT_TRUE(store_.Delete("a3", 0).ok());
  EXPECT_FALSE(store_.Create(Spec("b", 0)).ok()) << "it is still held";
  drafts.clear();
  EXPECT_TRUE(store_.Create(Spec("b", 0)).ok());
}

TEST_F(BufferStoreTest, MemoryComesBackWithTheLastUser) {
  Make(Spec("a", 64));
  std::shared_ptr<const Buffer> user = store_.Find("a", 0)->buffer;
  EXPECT_TRUE(store_.Delete("a", 0).ok());
  EXPECT_EQ(ErrorReason(store_.Find("a", 0).status()), "BUFFER_NOT_FOUND");
  EXPECT_EQ(ErrorReason(store_.Delete("a", 0)), "BUFFER_NOT_FOUND");
  EXPECT_EQ(store_.budget(device_).used(), 256u);
  EXPECT_EQ(device_.allocations(), 1u);
  user.reset();
  EXPECT_EQ(store_.budget(device_).used(), 0u);
  EXPECT_EQ(store_.count().used(), 0u);
  EXPECT_EQ(device_.allocations(), 0u);
}

TEST_F(BufferStoreTest, Budget) {
  Make(Spec("a", 4 * 64));
  const absl::Status status = store_.Create(Spec("b", 65)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(status), "QUOTA_EXCEEDED");
  EXPECT_EQ(ErrorMetadata(status)["requested"], "512") << "its memory on the device";
  EXPECT_EQ(ErrorMetadata(status)["free"], "256");
  EXPECT_EQ(ErrorMetadata(status)["total"], "1280");
  EXPECT_EQ(ErrorReason(store_.Create(Spec("b", std::int64_t{1} << 60)).status()),
            "QUOTA_EXCEEDED");
  EXPECT_TRUE(store_.Create(Spec("b", 1)).ok()) << "exactly full is fine";
}

TEST_F(BufferStoreTest, DiscardedAndDeletedDrafts) {
  auto draft = *store_.Create(Spec("a", 10));
  store_.Discard(*draft);
  EXPECT_EQ(ErrorReason(store_.BeginWrite(*draft, 0, 4).status()), "BUFFER_NOT_FOUND");
  EXPECT_EQ(ErrorReason(store_.Seal(*draft).status()), "BUFFER_NOT_FOUND");
  store_.Discard(*draft);
  draft = *store_.Create(Spec("a", 10));
  EXPECT_TRUE(store_.Delete("a", 0).ok());
  EXPECT_EQ(ErrorReason(store_.BeginWrite(*draft, 0, 4).status()), "BUFFER_NOT_FOUND");
  draft.reset();
  EXPECT_EQ(device_.allocations(), 0u);
}

TEST_F(BufferStoreTest, ExclusiveDraftsAreTheirOwners) {
  BufferSpec spec = Spec("a", 10);
  spec.kind = Draft::Kind::kStream;
  auto draft = *store_.Create(spec);
  EXPECT_EQ(ErrorReason(store_.FindDraft("a", 0).status()), "BUFFER_NOT_READY");
  Write(*draft, 0, 40);
  EXPECT_EQ(ErrorReason(store_.Seal("a", 0, {}).status()), "BUFFER_NOT_READY");
  EXPECT_TRUE(store_.Seal(*draft).ok());
}

TEST_F(BufferStoreTest, Expiry) {
  Make(WithTtl(Spec("a", 10), absl::Hours(1)));
  Make(Spec("b", 10));
  EXPECT_TRUE(store_.Find("a", 0).ok());
  EXPECT_GT(store_.Get("b", 0)->expire_time, absl::Now() + absl::Hours(999))
      << "no ttl is given: the longest one applies";
  EXPECT_LE(store_.Get("b", 0)->expire_time, SteadyNow() + absl::Hours(1000));
  AdvanceSteadyNow(absl::Hours(1));
  EXPECT_EQ(ErrorReason(store_.Find("a", 0).status()), "BUFFER_NOT_FOUND");
  EXPECT_THAT(Names(), ElementsAre("b"));
  EXPECT_EQ(store_.budget(device_).used(), 512u);
  auto doomed = store_.Sweep(SteadyNow());
  EXPECT_EQ(doomed.size(), 1u);
  EXPECT_EQ(store_.budget(device_).used(), 512u) << "the memory goes with what is returned";
  doomed.clear();
  EXPECT_EQ(store_.budget(device_).used(), 256u);
  EXPECT_TRUE(store_.Create(Spec("a", 10)).ok());
}

TEST_F(BufferStoreTest, TtlCountsFromReady) {
  auto draft = *store_.Create(WithTtl(Spec("a", 1), absl::Hours(1)));
  EXPECT_EQ(store_.Get("a", 0)->expire_time, absl::InfiniteFuture());
  AdvanceSteadyNow(absl::Hours(2));
  Write(*draft, 0, 4);
  const absl::Time before = SteadyNow();
  const absl::Time expiry = store_.Seal(*draft)->expire_time;
  EXPECT_GE(expiry, before + absl::Hours(1));
  EXPECT_LE(expiry, SteadyNow() + absl::Hours(1));

  draft = *store_.Create(WithTtl(Spec("b", 1), absl::Hours(1)));
  ASSERT_TRUE(store_.SetTtl("b", 0, absl::Hours(2)).ok());
  Write(*draft, 0, 4);
  EXPECT_GE(store_.Seal(*draft)->expire_time, before + absl::Hours(2)) << "changed while a draft";
}

TEST_F(BufferStoreTest, TimesEndWithTheYear9999) {
  BufferStore store({{&device_, kLimit}}, {});
  const BufferSpec spec = WithTtl(Spec("a", 1), absl::Hours(24 * 365) * 9000);
  EXPECT_EQ(ErrorReason(store.Create(spec).status()), "BAD_TTL");
}

TEST_F(BufferStoreTest, TtlIsRenewedAndDropped) {
  Make(WithTtl(Spec("a", 10), absl::Seconds(30)));
  const BufferInfo renewed = *store_.SetTtl("a", 0, absl::Hours(2));
  EXPECT_GT(renewed.expire_time, absl::Now() + absl::Hours(1));
  EXPECT_EQ(ErrorReason(store_.SetTtl("a", 0, absl::Hours(1001)).status()), "BAD_TTL");
  EXPECT_EQ(ErrorReason(store_.SetTtl("a", 0, std::nullopt).status()), "BAD_TTL")
      << "for ever is longer than the limit";
  EXPECT_EQ(ErrorReason(store_.SetTtl("b", 0, absl::Hours(1)).status()), "BUFFER_NOT_FOUND");
  ASSERT_TRUE(store_.SetTtl("a", 0, absl::Hours(1)).ok());
  AdvanceSteadyNow(absl::Hours(1));
  EXPECT_EQ(ErrorReason(store_.SetTtl("a", 0, absl::Hours(1)).status()), "BUFFER_NOT_FOUND");
}

TEST_F(BufferStoreTest, SweepsFollowEveryTtl) {
  const auto make = [&](const std::string& name, absl::Duration ttl) {
    Make(WithTtl(Spec(name, 0), ttl));
  };
  make("1", absl::Hours(1));
  make("2", absl::Hours(2));
  make("to_1", absl::Hours(2));
  make("to_2", absl::Hours(1));
  ASSERT_TRUE(store_.SetTtl("to_1", 0, absl::Hours(1)).ok());
  ASSERT_TRUE(store_.SetTtl("to_2", 0, absl::Hours(2)).ok());
  make("replaced", absl::Hours(1));
  Make(Replacing(Spec("replaced", 0)));
  const absl::Time now = SteadyNow();
  const auto left = [&](absl::Duration later) {
    (void)store_.Sweep(now + later);
    return Names();
  };
  EXPECT_THAT(left(absl::Minutes(30)), SizeIs(5));
  EXPECT_THAT(left(absl::Minutes(90)), ElementsAre("2", "replaced", "to_2"));
  EXPECT_THAT(left(absl::Minutes(150)), ElementsAre("replaced"));
}

// Tests each limit: the server's limit on buffers, and a tenant's limits on bytes and on buffers.
TEST_F(BufferStoreTest, WhatHasExpiredCountsAsLongAsItIsInUse) {
  constexpr std::uint64_t kMany = 1000;
  for (const auto& [buffers, bytes, own_buffers] : std::vector<std::array<std::uint64_t, 3>>{
           {1, kLimit, kMany}, {8, 256, kMany}, {8, kLimit, 1}}) {
    SCOPED_TRACE(testing::Message() << buffers << " " << bytes << " " << own_buffers);
    BufferStore store({{&device_, kLimit}}, {.buffers = buffers});
    store.SetQuotas(bytes, own_buffers);
    const auto make = [&](const std::string& name) {
      const auto draft = store.Create(WithTtl(Spec(name, 64), absl::Hours(1)));
      if (!draft.ok()) return draft.status();
      EXPECT_TRUE(store.BeginWrite(**draft, 0, 256).ok());
      store.EndWrite(**draft, 0, 256, true);
      return store.Seal(**draft).status();
    };
    ASSERT_TRUE(make("a").ok());
    std::shared_ptr<const Buffer> user = store.Find("a", 0)->buffer;
    AdvanceSteadyNow(absl::Hours(2));
    store.Sweep(SteadyNow()).clear();
    EXPECT_EQ(store.List("", "", 10).size(), 0u);
    EXPECT_TRUE(absl::IsResourceExhausted(make("b"))) << "it is in use";
    user.reset();
    EXPECT_EQ(make("b"), absl::OkStatus());
    AdvanceSteadyNow(absl::Hours(2));
    EXPECT_EQ(make("b2"), absl::OkStatus()) << "a call that lacks room sweeps by itself";
    AdvanceSteadyNow(absl::Hours(2));
    const auto gone = store.Sweep(SteadyNow());
    EXPECT_EQ(store.budget(device_).used(), 256u) << "its memory is not free yet";
    EXPECT_EQ(make("c"), absl::OkStatus());
  }
}

TEST_F(BufferStoreTest, ACallThatLacksMemoryOfTheDeviceSweeps) {
  Make(WithTtl(Spec("a", 1), absl::Hours(1)));
  AdvanceSteadyNow(absl::Hours(2));
  for (const char* expected : {"", "HOST_MEMORY_EXHAUSTED"}) {
    device_.Fail(FakeDevice::Step::kAllocate, DeviceError::Kind::kOutOfMemory);
    EXPECT_EQ(ErrorReason(store_.Create(Replacing(Spec("b", 1))).status()), expected);
  }
}

TEST_F(BufferStoreTest, WhatALostDeviceHadGoes) {
  Make(Spec("a", 1));
  auto draft = *store_.Create(Spec("b", 1));
  store_.Evict(device_).clear();
  EXPECT_THAT(Names(), ElementsAre());
  EXPECT_EQ(ErrorReason(store_.CheckOpen(*draft)), "BUFFER_NOT_FOUND");
}

// --- Links ---

TEST_F(BufferStoreTest, ALinkIsTheMemoryOfItsSource) {
  auto draft = *store_.Create(Spec("a", 64));
  ASSERT_TRUE(store_.BeginWrite(*draft, 0, 256).ok());
  store_.EndWrite(*draft, 0, 256, true, 7);
  const BufferInfo a = *store_.Seal(*draft);
  BufferSpec spec;
  spec.name = "b";
  spec.ttl = absl::Hours(1);
  const BufferInfo b = *store_.Link("a", a.version, spec);
  EXPECT_EQ(b.buffer->data(), a.buffer->data());
  EXPECT_EQ(b.buffer->type().bytes(), 256u);
  EXPECT_EQ(b.checksum, 7u);
  EXPECT_GT(b.version, a.version);
  EXPECT_LE(b.expire_time, SteadyNow() + absl::Hours(1));
  EXPECT_GT(a.expire_time, SteadyNow() + absl::Hours(1));
  EXPECT_EQ(store_.Find("b", b.version)->buffer, b.buffer);
  EXPECT_EQ(store_.budget(device_).used(), 256u);
  EXPECT_EQ(device_.allocations(), 1u);
  EXPECT_EQ(store_.tally(device_).ready, 2u);
  ASSERT_TRUE(store_.Delete("a", 0).ok());
  EXPECT_TRUE(store_.Find("b", 0).ok());
  AdvanceSteadyNow(absl::Hours(2));
  EXPECT_FALSE(store_.Find("b", 0).ok());
}

TEST_F(BufferStoreTest, ALinkOfALinkHoldsTheMemoryAlone) {
  Make(Spec("0", 64));
  for (int i = 0; i < 20; ++i) {
    // Each round makes a second name for the memory and deletes the first one.
    ASSERT_EQ(Link(std::to_string(i), 0, std::to_string(i + 1)), "");
    ASSERT_TRUE(store_.Delete(std::to_string(i), 0).ok());
  }
  std::vector<std::shared_ptr<Draft>> others;
  for (int i = 0; i < 6; ++i) others.push_back(*store_.Create(Spec("a" + std::to_string(i), 0)));
  EXPECT_EQ(Link("20", 0, "21"), "TOO_MANY_BUFFERS");
  EXPECT_EQ(device_.allocations(), 1u);
  ASSERT_TRUE(store_.Delete("20", 0).ok());
  EXPECT_EQ(device_.allocations(), 0u);
  EXPECT_EQ(store_.budget(device_).used(), 0u);
}

TEST_F(BufferStoreTest, LinksThatCannotBe) {
  const BufferInfo a = Make(Spec("a", 1));
  auto draft = *store_.Create(Spec("draft", 1));
  EXPECT_EQ(Link("a", 0, "b c"), "BAD_NAME");
  EXPECT_EQ(Link("a", 0, "b", absl::Hours(1001)), "BAD_TTL");
  EXPECT_EQ(Link("b", 0, "c"), "BUFFER_NOT_FOUND");
  EXPECT_EQ(Link("draft", 0, "b"), "BUFFER_NOT_READY");
  EXPECT_EQ(Link("a", a.version + 1, "b"), "VERSION_MISMATCH");
  EXPECT_EQ(Link("a", 0, "a"), "BUFFER_EXISTS");
  EXPECT_EQ(Link("a", 0, "draft"), "BUFFER_EXISTS");
  store_.SetQuotas(kLimit, 2);
  EXPECT_EQ(Link("a", 0, "b"), "TENANT_QUOTA_EXCEEDED");
  store_.SetQuotas(kLimit, 3);
  EXPECT_EQ(Link("a", 0, "b", absl::Hours(1)), "") << "what was refused does not count";
  EXPECT_EQ(Link("a", 0, "c"), "TENANT_QUOTA_EXCEEDED");
  AdvanceSteadyNow(absl::Hours(2));
  EXPECT_EQ(Link("a", 0, "c"), "") << "in the place of the one that has expired";
}

TEST_F(BufferStoreTest, ALinkReplaces) {
  Make(Spec("a", 64));
  const void* const data = Make(Spec("b", 1)).buffer->data();
  for (const char* name : {"a", "b"}) {
    const BufferSpec spec = Replacing(Spec(name, 0));
    const BufferInfo before = *store_.Find(name, 0);
    const BufferInfo link = *store_.Link("b", 0, spec);
    EXPECT_EQ(link.buffer->data(), data);
    EXPECT_GT(link.version, before.version);
    EXPECT_EQ(store_.Find(name, 0)->version, link.version);
  }
  EXPECT_EQ(device_.allocations(), 1u);
  EXPECT_EQ(store_.tally(device_).ready, 2u);
}

TEST_F(BufferStoreTest, ANameTakenWhileMemoryWasBeingFound) {
  device_.Close(FakeDevice::Step::kAllocate);
  absl::Status made[2];
  std::shared_ptr<Draft> drafts[2];
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      auto draft = store_.Create(Spec("a", 1));
      made[t] = draft.status();
      if (draft.ok()) drafts[t] = *std::move(draft);
    });
  }
  device_.WaitForBlocked(2);
  device_.Open();
  for (std::thread& thread : threads) thread.join();
  EXPECT_NE(made[0].ok(), made[1].ok());
  EXPECT_EQ(ErrorReason(made[0].ok() ? made[1] : made[0]), "BUFFER_EXISTS");
  EXPECT_EQ(store_.budget(device_).used(), 256u);
}

TEST_F(BufferStoreTest, IdleDraftsGo) {
  auto idle = *store_.Create(Spec("idle", 10));
  auto busy = *store_.Create(Spec("busy", 10));
  BufferSpec owned = Spec("owned", 10);
  owned.kind = Draft::Kind::kStream;
  auto exclusive = *store_.Create(owned);
  ASSERT_TRUE(store_.BeginWrite(*busy, 0, 4).ok());
  (void)store_.Sweep(SteadyNow() + absl::Seconds(5));
  EXPECT_TRUE(store_.Get("idle", 0).ok());
  (void)store_.Sweep(SteadyNow() + absl::Seconds(11));
  EXPECT_EQ(ErrorReason(store_.CheckOpen(*idle)), "BUFFER_NOT_FOUND");
  EXPECT_FALSE(store_.Get("idle", 0).ok());
  EXPECT_TRUE(store_.Get("busy", 0).ok()) << "its write has not ended";
  EXPECT_TRUE(store_.Get("owned", 0).ok()) << "its owner ends it";
}

TEST_F(BufferStoreTest, ListMergesAndPages) {
  for (const char* name : {"a/1", "a/3", "b"}) Make(Spec(name, 0));
  auto draft = *store_.Create(Spec("a/2", 0));
  auto next = *store_.Create(Replacing(Spec("a/3", 0)));
  EXPECT_THAT(Names(), ElementsAre("a/1", "a/2", "a/3", "b"));
  EXPECT_THAT(Names("a/"), ElementsAre("a/1", "a/2", "a/3"));
  EXPECT_THAT(Names("a/", "a/1", 1), ElementsAre("a/2"));
  EXPECT_THAT(Names("a/", "a/3"), ElementsAre());
  EXPECT_THAT(Names("a/1", "a/1"), ElementsAre()) << "the prefix is a name";
  EXPECT_THAT(Names("c"), ElementsAre());
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
          // Another thread may have deleted it in the meantime.
          if (store_.BeginWrite(**draft, 0, 4).ok()) store_.EndWrite(**draft, 0, 4, true);
          if (store_.Seal(**draft).ok()) ++made;
        }
        if (auto buffer = store_.Find("a", 0); buffer.ok()) {
          ASSERT_EQ(buffer->buffer->name(), "a");
        }
        if (i % 10 == 0) (void)store_.Delete("a", 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(made, 0);
  (void)store_.Delete("a", 0);
  EXPECT_EQ(store_.budget(device_).used(), 0u);
  EXPECT_EQ(device_.allocations(), 0u);
}

}  // namespace
}  // namespace tessera
