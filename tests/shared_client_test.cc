// The client library with a server that shares memory. The client uses that memory without being
// told to, and continues without it if it fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "kernels/base/error.h"
#include "tessera/v1/shared_memory.grpc.pb.h"
#include "tests/client_fixture.h"
#include "tests/quiet.h"

namespace tessera {
namespace {

constexpr std::size_t kMib = std::size_t{1} << 20;
// Constants of client/transfers/shared_transfers.cc.
constexpr std::size_t kLeast = 4 * kMib;
constexpr std::size_t kSlot = 16 * kMib;

const std::string kSocket = SocketPath("shared_client");

tessera::Options SharedOptions() {
  tessera::Options options = TcpOptions();
  options.shared_memory = kSocket;
  return options;
}

class SharedClientTest : public ::testing::Test {
 protected:
  SharedClientTest()
      : device_(new FakeDevice),
        server_(SharedOptions(), Only(device_)),
        client_({.server = server_.address()}) {}

  absl::StatusOr<v1::Buffer> Put(const std::string& name, const std::string& data,
                                 const UploadOptions& options = {}) {
    return client_.Upload(name, DType::kI32, {static_cast<std::int64_t>(data.size() / 4)},
                          FromMemory(data), options);
  }
  // Uploads an array while the server is still copying into a slot that the client has given up.
  // That copy ends after the upload has filled its own slot.
  void ExpectIntactUpload() {
    const std::string data(kSlot, 'd');
    const auto source = [&](std::uint64_t offset, absl::Span<char> to) {
      std::memcpy(to.data(), data.data() + offset, to.size());
      device_->Open();
      AwaitQuiet();
      return absl::OkStatus();
    };
    const auto buffer = client_.Upload("new", DType::kI32, {kSlot / 4}, source);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_TRUE(Get(client_, "new") == data);
  }
  // Cancels a download while the server is copying into the client's slot. The copy continues until
  // the device is opened.
  void GiveUpDownload(const std::string& name, std::size_t size) {
    device_->Close(FakeDevice::Step::kCopyToHost);
    std::stop_source stop;
    std::string got(size, '\0');
    const std::jthread caller([&] {
      const DownloadOptions options{.cancel = stop.get_token()};
      const auto buffer = client_.Download(name, absl::MakeSpan(got), options);
      EXPECT_TRUE(absl::IsCancelled(buffer.status())) << buffer.status();
    });
    device_->WaitForBlocked(1);
    stop.request_stop();
  }
  // Returns the number of bytes that gRPC messages have carried since the last call.
  std::uint64_t Wire() {
    const Traffic now = client_.traffic();
    const std::uint64_t all = now.sent_bytes + now.received_bytes;
    return all - std::exchange(wire_, all);
  }

  FakeDevice* const device_;  // Owned by the server.
  TestServer server_;
  Client client_;
  std::uint64_t wire_ = 0;
};

TEST_F(SharedClientTest, LargeArraysLeaveTheWireAlone) {
  for (const std::size_t size : {kLeast, kSlot - 4, kSlot, kSlot + 4, 2 * kSlot, 5 * kSlot + 12}) {
    const std::string data = Pattern(size);
    std::uint64_t sent = 0;
    const auto progress = [&](std::uint64_t bytes) { sent = bytes; };
    const auto buffer = Put("x", data, {.replace = true, .progress = progress});
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(buffer->state(), v1::Buffer::STATE_READY);
    EXPECT_EQ(sent, size);
    EXPECT_TRUE(Get(client_, "x") == data) << size;
    EXPECT_LT(Wire(), 16 << 10);
    EXPECT_TRUE(Get(client_, "x", {.offset = 4}) == data.substr(4));
    const DownloadOptions window{.offset = 8, .limit = size - 16};
    EXPECT_TRUE(Get(client_, "x", window) == data.substr(8, size - 16));
    Wire();
  }
}

TEST_F(SharedClientTest, SmallOnesAndOthersDoNot) {
  const std::string small = Pattern(kLeast - 4), large = Pattern(kLeast);
  ASSERT_TRUE(Put("small", small).ok());
  EXPECT_GT(Wire(), small.size());
  EXPECT_TRUE(Get(client_, "small") == small);
  EXPECT_GT(Wire(), small.size());
  Client unwilling({.server = server_.address(), .shared_memory = false});
  ASSERT_TRUE(unwilling.Upload("large", DType::kI32, {kLeast / 4}, FromMemory(large)).ok());
  EXPECT_GT(unwilling.traffic().sent_bytes, large.size());
  EXPECT_TRUE(Get(client_, "large") == large);
}

TEST_F(SharedClientTest, SourcesAreAskedInOrderByOneThreadAtATime) {
  const std::size_t size = 4 * kSlot;
  std::atomic<int> inside = 0;
  std::uint64_t next = 0;
  const auto source = [&](std::uint64_t offset, absl::Span<char> out) {
    EXPECT_EQ(inside.fetch_add(1), 0);
    EXPECT_EQ(offset, std::exchange(next, offset + out.size()));
    std::memset(out.data(), 1, out.size());
    --inside;
    return absl::OkStatus();
  };
  ASSERT_TRUE(client_.Upload("x", DType::kI32, {size / 4}, source).ok());
  EXPECT_EQ(next, size);
}

// Uploads in one slot and in several, from the caller's memory, and in one stream and several. The
// source fails at the beginning, in the middle or at the end, or the server fails.
TEST_F(SharedClientTest, AReplacementThatFailsLeavesWhatWasThere) {
  const std::string old = Pattern(kLeast), data(3 * kSlot, 'd');
  const auto before = Put("x", old);
  ASSERT_TRUE(before.ok()) << before.status();
  Client wire({.server = server_.address(), .shared_memory = false});
  const auto expect_old = [&](const absl::Status& status, std::string_view what) {
    EXPECT_FALSE(status.ok()) << what;
    // The server may notice the end of a stream later.
    EXPECT_TRUE(Eventually([&] {
      const auto now = client_.GetBuffer("x");
      return now.ok() && now->buffer().version() == before->version() && now->drafts_size() == 0 &&
             server_.used_bytes() == Charged(kLeast);
    })) << what;
  };
  struct Way {
    const char* name;
    Client& client;
    std::size_t size;
    int streams = 1;
  };
  const Way ways[] = {{"one slot", client_, kLeast},
                      {"slots", client_, 3 * kSlot},
                      {"a stream", wire, kLeast},
                      {"streams", wire, kSlot, 4}};
  const auto replace = [&](const Way& way, const Source& source,
                           std::function<void(std::uint64_t)> progress = nullptr) {
    const std::int64_t shape[] = {static_cast<std::int64_t>(way.size / 4)};
    const UploadOptions options = {
        .replace = true, .streams = way.streams, .progress = std::move(progress)};
    return way.client.Upload("x", DType::kI32, shape, source, options).status();
  };
  // The server's failure comes first. After a client's failure, the server may begin a cancelled
  // stream late, and that stream would use up the failure.
  for (const Way& way : ways) {
    for (const int after : {0, way.size > kSlot ? 2 : 0}) {
      device_->Fail(FakeDevice::Step::kCopyToDevice, DeviceError::Kind::kFailed, 1, after);
      expect_old(replace(way, FromMemory(std::string_view(data).substr(0, way.size))), way.name);
      EXPECT_EQ(device_->Relent(FakeDevice::Step::kCopyToDevice), 0) << way.name;
    }
  }
  const absl::StatusOr<SharedMemory> memory = client_.MakeSharedMemory(kMib);
  ASSERT_TRUE(memory.ok()) << memory.status();
  device_->Fail(FakeDevice::Step::kCopyToDevice, DeviceError::Kind::kFailed);
  expect_old(
      client_.UploadShared("x", DType::kI32, {kMib / 4}, *memory, 0, {.replace = true}).status(),
      "memory of the caller");
  for (const Way& way : ways) {
    for (const std::size_t end : {std::size_t{1}, way.size / 2, way.size}) {
      expect_old(replace(way,
                         [&](std::uint64_t offset, absl::Span<char> out) {
                           return offset + out.size() < end ? FromMemory(data)(offset, out)
                                                            : absl::AbortedError("enough");
                         }),
                 way.name);
    }
    expect_old(replace(way, FromMemory(std::string_view(data).substr(0, way.size)),
                       [](std::uint64_t) { throw std::runtime_error("enough"); }),
               way.name);
  }
  EXPECT_TRUE(Get(client_, "x") == old);
}

TEST_F(SharedClientTest, ADrainClosesTheSocketOfRegions) {
  ASSERT_TRUE(SharedMemory::Make(kSocket, kMib, absl::Minutes(1)).ok());
  server_.server().Drain();
  EXPECT_FALSE(SharedMemory::Make(kSocket, kMib, absl::Minutes(1)).ok());
}

TEST_F(SharedClientTest, ErrorsAreThoseOfStreams) {
  const std::string data = Pattern(2 * kSlot);
  ASSERT_TRUE(Put("x", data).ok());
  EXPECT_EQ(ErrorReason(Put("x", data).status()), "BUFFER_EXISTS");
  EXPECT_EQ(ErrorReason(Put("x", data.substr(0, kLeast)).status()), "BUFFER_EXISTS");
  EXPECT_EQ(ErrorReason(Put("no spaces", data).status()), "BAD_NAME");
  const auto none = [](const v1::Buffer&, std::string_view) { return absl::OkStatus(); };
  EXPECT_EQ(ErrorReason(client_.Download("y", none).status()), "BUFFER_NOT_FOUND");
  EXPECT_EQ(ErrorReason(client_.Download("x", none, {.offset = data.size() + 1}).status()),
            "BAD_RANGE");
  device_->Fail(FakeDevice::Step::kCopyToHost, DeviceError::Kind::kFailed);
  EXPECT_EQ(ErrorReason(client_.Download("x", none).status()), "CUDA_ERROR");
  const auto stop = [](const v1::Buffer&, std::string_view bytes) {
    return bytes.empty() ? absl::OkStatus() : absl::AbortedError("enough");
  };
  EXPECT_EQ(client_.Download("x", stop).status().message(), "enough");
  EXPECT_TRUE(Get(client_, "x") == data);
}

TEST_F(SharedClientTest, AnErrorOfASinkOrSourceEndsTheTransferUnchanged) {
  const std::string data = Pattern(3 * kSlot);
  ASSERT_TRUE(Put("x", data).ok());
  for (const char* reason : {"REGION_NOT_FOUND", "VERSION_MISMATCH"}) {
    const absl::Status error = MakeError(absl::StatusCode::kNotFound, reason, "mine");
    const auto sink = [&](const v1::Buffer&, std::string_view bytes) {
      return bytes.empty() ? absl::OkStatus() : error;
    };
    EXPECT_EQ(client_.Download("x", sink).status(), error);
    for (const std::size_t size : {kLeast, 3 * kSlot}) {
      int asked = 0;
      const auto source = [&](std::uint64_t, absl::Span<char>) {
        ++asked;
        return error;
      };
      const std::int64_t shape[] = {static_cast<std::int64_t>(size / 4)};
      EXPECT_EQ(client_.Upload("y", DType::kI32, shape, source).status(), error);
      EXPECT_EQ(asked, 1);
    }
  }
}

TEST_F(SharedClientTest, ATransferEndsAtItsDeadline) {
  const std::string data = Pattern(2 * kSlot);
  ASSERT_TRUE(Put("x", data).ok());
  std::string got(data.size(), '\0');
  for (const int seconds : {0, -1}) {
    const absl::Duration timeout = absl::Seconds(seconds);
    const absl::Status wanted = absl::DeadlineExceededError(
        absl::StrCat("no answer within ", absl::FormatDuration(timeout), ", the call's deadline"));
    for (const std::size_t size : {kLeast, 2 * kSlot})
      EXPECT_EQ(Put("y", data.substr(0, size), {.timeout = timeout}).status(), wanted);
    EXPECT_EQ(client_.Download("x", absl::MakeSpan(got), {.timeout = timeout}).status(), wanted);
  }
  const absl::Duration timeout = absl::Milliseconds(500);
  const absl::Time begin = absl::Now();
  const auto wait = [&] { absl::SleepFor(begin + timeout - absl::Now() + absl::Seconds(1)); };
  const auto source = [&](std::uint64_t offset, absl::Span<char> out) {
    if (offset + out.size() == data.size()) wait();
    return FromMemory(data)(offset, out);
  };
  const auto late = client_.Upload("y", DType::kI32, {kSlot / 2}, source, {.timeout = timeout});
  const absl::Status wanted =
      absl::DeadlineExceededError("no answer within 500ms, the call's deadline");
  EXPECT_EQ(late.status(), wanted);
  const auto sink = [&](const v1::Buffer&, std::string_view bytes) {
    if (bytes.empty()) absl::SleepFor(timeout);
    return absl::OkStatus();
  };
  ASSERT_TRUE(Put("z", data + data).ok());
  EXPECT_EQ(client_.Download("z", sink, {.timeout = timeout}).status(), wanted);
  ASSERT_TRUE(client_.DeleteBuffer("z").ok());
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == Charged(data.size()); }));
}

TEST_F(SharedClientTest, ATransferThatStandsStillEnds) {
  const std::string data = Pattern(2 * kSlot);
  ASSERT_TRUE(Put("x", data).ok());
  Client hasty({.server = server_.address(), .stall_timeout = absl::Milliseconds(300)});
  const auto expect_stalled = [&](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(ErrorReason(status), "STALLED");
    EXPECT_EQ(status.message(), "no progress for 300ms");
    device_->Open();
  };
  for (const std::size_t size : {kLeast, 2 * kSlot}) {
    device_->Close(FakeDevice::Step::kCopyToDevice);
    expect_stalled(hasty
                       .Upload(std::to_string(size), DType::kI32,
                               {static_cast<std::int64_t>(size / 4)},
                               FromMemory(std::string_view(data).substr(0, size)))
                       .status());
  }
  std::string got(data.size(), '\0');
  device_->Close(FakeDevice::Step::kCopyToHost);
  expect_stalled(hasty.Download("x", absl::MakeSpan(got)).status());
}

TEST_F(SharedClientTest, MoreTransfersThanSlots) {
  const std::string data = Pattern(kSlot + kMib);
  std::vector<std::jthread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      const std::string name = "x" + std::to_string(i);
      for (int round = 0; round < 3; ++round) {
        EXPECT_TRUE(Put(name, data, {.replace = true}).ok());
        EXPECT_TRUE(Get(client_, name) == data);
      }
    });
  }
}

TEST_F(SharedClientTest, ACallerThatLeavesEndsTheTransferBetweenPieces) {
  constexpr std::size_t kSize = 192 * kMib;  // Three pieces.
  const absl::StatusOr<SharedMemory> memory = client_.MakeSharedMemory(kSize);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const auto stub = v1::SharedMemoryService::NewStub(server_.channel());
  v1::UploadSharedRequest request;
  request.set_name("x");
  request.mutable_spec()->set_dtype(v1::DTYPE_I32);
  request.mutable_spec()->add_shape(kSize / 4);
  request.mutable_source()->set_region(memory->region());
  request.mutable_source()->set_size(kSize);
  device_->Close(FakeDevice::Step::kCopyToDevice);
  grpc::ClientContext context;
  std::jthread caller([&] {
    v1::UploadSharedResponse response;
    EXPECT_EQ(stub->UploadShared(&context, request, &response).error_code(),
              grpc::StatusCode::CANCELLED);
  });
  device_->WaitForBlocked(1);
  context.TryCancel();
  caller.join();
  AwaitQuiet();  // The server has noticed the cancellation.
  device_->Open();
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == 0; }));
  EXPECT_EQ(device_->Count(FakeDevice::Step::kCopyToDevice), 1);
}

TEST_F(SharedClientTest, ASlotIsNotUsedAgainWhileTheServerMayWriteToIt) {
  ASSERT_TRUE(Put("old", Pattern(kSlot)).ok());
  GiveUpDownload("old", kSlot);
  // The server is still working on the abandoned download when the next array is in its slot.
  ExpectIntactUpload();
}

// A slot into which a part is being prefetched when the caller stops reading is not used again.
TEST_F(SharedClientTest, ASlotThatIsFetchedAheadIsNotUsedAgainEither) {
  ASSERT_TRUE(Put("old", Pattern(2 * kSlot)).ok());
  std::stop_source stop;
  const auto sink = [&](const v1::Buffer&, std::string_view bytes) {
    if (bytes.empty()) {
      device_->Close(FakeDevice::Step::kCopyToHost);  // The first part has arrived.
      return absl::OkStatus();
    }
    device_->WaitForBlocked(1);
    stop.request_stop();
    return absl::AbortedError("enough");
  };
  const DownloadOptions options{.cancel = stop.get_token()};
  EXPECT_TRUE(absl::IsAborted(client_.Download("old", sink, options).status()));
  ExpectIntactUpload();
}

TEST_F(SharedClientTest, ASlotGoesBackToItsOwnMemory) {
  // An upload whose source has filled a slot, and then waits for permission to continue.
  struct Held {
    std::promise<void> filled, go_on;
    std::jthread thread;
  };
  const auto hold = [&](Held& held, char fill) {
    held.thread = std::jthread([&, fill] {
      const auto source = [&](std::uint64_t, absl::Span<char> to) {
        std::memset(to.data(), fill, to.size());
        held.filled.set_value();
        held.go_on.get_future().wait();
        return absl::OkStatus();
      };
      const auto buffer = client_.Upload(std::string(1, fill), DType::kI32, {kLeast / 4}, source);
      EXPECT_TRUE(buffer.ok()) << buffer.status();
    });
    held.filled.get_future().wait();
  };
  ASSERT_TRUE(Put("x", Pattern(kLeast)).ok());
  Held old;
  hold(old, 'o');
  GiveUpDownload("x", kLeast);  // The client gives up the memory.
  device_->Open();
  std::vector<Held> all(4);
  for (std::size_t i = 0; i < all.size(); ++i) hold(all[i], "abcd"[i]);
  old.go_on.set_value();
  old.thread.join();
  const std::string last(kLeast, 'z');
  EXPECT_TRUE(client_.Upload("last", DType::kI32, {kLeast / 4}, FromMemory(last)).ok());
  for (Held& held : all) {
    held.go_on.set_value();
    held.thread.join();
  }
  for (const char fill : {'o', 'a', 'b', 'c', 'd'})
    EXPECT_TRUE(Get(client_, std::string(1, fill)) == std::string(kLeast, fill)) << fill;
  EXPECT_TRUE(Get(client_, "last") == last);
}

TEST_F(SharedClientTest, MemoryOfTheCallerIsNotCopied) {
  absl::StatusOr<SharedMemory> memory = client_.MakeSharedMemory(3 * kMib + 1);
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_EQ(memory->bytes().size(), 3 * kMib + 4096);
  const std::string data = Pattern(kMib);
  std::memcpy(memory->bytes().data() + 100, data.data(), data.size());
  const auto buffer = client_.UploadShared("x", DType::kI32, {kMib / 4}, *memory, 100);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_TRUE(Get(client_, "x") == data);
  const auto got = client_.DownloadShared("x", *memory, kMib + 100, 2 * kMib, 8);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->size(), kMib - 8);
  EXPECT_EQ(std::memcmp(memory->bytes().data() + kMib + 100, data.data() + 8, kMib - 8), 0);
  const auto outside = client_.DownloadShared("x", *memory, 3 * kMib, kMib);
  EXPECT_EQ(ErrorReason(outside.status()), "BAD_RANGE");
  // No part beyond the end of the memory is requested.
  const Traffic before = client_.traffic();
  for (const std::size_t offset : {3 * kMib + 1, 3 * kMib + 5000, ~std::size_t{0}}) {
    EXPECT_EQ(ErrorReason(client_.UploadShared("y", DType::kI32, {1024}, *memory, offset).status()),
              "BAD_RANGE");
    EXPECT_EQ(ErrorReason(client_.DownloadShared("x", *memory, offset, 4096).status()),
              "BAD_RANGE");
  }
  const SharedMemory moved = *std::move(memory);
  EXPECT_TRUE(moved.connected());
  // NOLINTNEXTLINE(bugprone-use-after-move): this is the behaviour under test
  EXPECT_EQ(ErrorReason(client_.UploadShared("y", DType::kI32, {1}, *memory).status()),
            "BAD_RANGE");
  EXPECT_EQ(client_.traffic().sent_bytes, before.sent_bytes);
}

TEST(SharedClient, GoesOnWithoutSharedMemoryOrWhereTheServerHasNoRoom) {
  for (const bool shared : {false, true}) {
    tessera::Options options = shared ? SharedOptions() : TcpOptions();
    options.shared_memory_limit = kMib;
    TestServer server(options);
    Client client({.server = server.address()});
    const std::string data = Pattern(2 * kSlot);
    ASSERT_TRUE(client.Upload("x", DType::kI32, {kSlot / 2}, FromMemory(data)).ok());
    EXPECT_GT(client.traffic().sent_bytes, data.size());
    std::string got(data.size(), '\0');
    ASSERT_TRUE(client.Download("x", absl::MakeSpan(got)).ok());
    EXPECT_TRUE(got == data);
    const absl::Status none = client.MakeSharedMemory(2 * kMib).status();
    EXPECT_EQ(none.code(),
              shared ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnimplemented);
    EXPECT_EQ(ErrorReason(none), shared ? "SHARED_MEMORY_EXHAUSTED" : "") << none;
    // The client fails before it allocates memory that it may not share.
    EXPECT_EQ(absl::StrContains(none.message(), "at most 1048576 bytes"), shared) << none;
  }
}

// The buffer comes back with its version. The memory does not.
TEST(SharedClient, ADownloadGoesOnOverAStreamAfterARestart) {
  std::string folder = testing::TempDir() + "shared_client-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  tessera::Options options = SharedOptions();
  options.data_dir = folder;
  auto server = std::make_unique<TestServer>(options);
  options.listen = {server->address()};
  Client client(FastOptions(server->address()));
  const std::string data = Pattern(4 * kSlot);
  ASSERT_TRUE(client.Upload("x", DType::kI32, {kSlot}, FromMemory(data)).ok());
  const absl::Status saved = client.Snapshot().status();
  ASSERT_TRUE(saved.ok()) << saved;
  std::string got;
  bool restarted = false;
  const auto sink = [&](const v1::Buffer&, std::string_view bytes) {
    got += bytes;
    if (bytes.empty() || std::exchange(restarted, true)) return absl::OkStatus();
    server.reset();
    server = std::make_unique<TestServer>(options);
    return absl::OkStatus();
  };
  const std::uint64_t limit = data.size() - 100;
  const absl::Status status = client.Download("x", sink, {.offset = 4, .limit = limit}).status();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(restarted);
  EXPECT_TRUE(got == data.substr(4, limit));
  server.reset();
  std::filesystem::remove_all(folder);
}

TEST(SharedClient, FindsANewServer) {
  tessera::Options options = SharedOptions();
  auto server = std::make_unique<TestServer>(options);
  options.listen = {server->address()};
  Client client({.server = server->address()});
  const std::string data = Pattern(kSlot);
  ASSERT_TRUE(client.Upload("x", DType::kI32, {kSlot / 4}, FromMemory(data)).ok());
  absl::StatusOr<SharedMemory> memory = client.MakeSharedMemory(kMib);
  ASSERT_TRUE(memory.ok() && memory->connected());
  server.reset();
  EXPECT_FALSE(memory->connected());
  server = std::make_unique<TestServer>(options);
  const std::uint64_t before = client.traffic().sent_bytes;
  const auto buffer = client.Upload("x", DType::kI32, {kSlot / 4}, FromMemory(data));
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_LT(client.traffic().sent_bytes - before, 16 << 10);
  const auto lost = client.UploadShared("y", DType::kI32, {1}, *memory);
  EXPECT_EQ(ErrorReason(lost.status()), "REGION_NOT_FOUND") << lost.status();
}

}  // namespace
}  // namespace tessera
