// Uploads and downloads in progress: what is read, copied, held and counted, and when.
#include <dlfcn.h>

#include <algorithm>

#include "grpc/grpc.h"
#include "grpcpp/generic/generic_stub.h"
#include "kernels/client_and_server/crc32c.h"
#include "server/clock.h"
#include "tests/service_fixture.h"

namespace {

std::mutex cancel_mutex;
std::function<void()> before_cancel;  // Runs before the next call is cancelled.

}  // namespace

// Replaces gRPC's function, and calls it after before_cancel.
extern "C" grpc_call_error grpc_call_cancel(grpc_call* call, void* reserved) {
  static auto* const behind =
      reinterpret_cast<decltype(&grpc_call_cancel)>(dlsym(RTLD_NEXT, "grpc_call_cancel"));
  std::function<void()> before;
  {
    const std::lock_guard lock(cancel_mutex);
    before.swap(before_cancel);
  }
  if (before) before();
  return behind(call, reserved);
}

namespace tessera {
namespace {

using grpc::StatusCode;
using Step = FakeDevice::Step;
using Kind = DeviceError::Kind;

// The maximum number of slots that a download holds before gRPC has sent them.
constexpr int kSlotsADownload = 3;

// Sends messages of 1000 bytes to a buffer, from a separate thread.
class Sender {
 public:
  Sender(v1::BufferService::Stub& stub, int messages, bool damage_last = false,
         const std::string& name = "x")
      : upload_(stub), thread_([this, messages, damage_last, name] {
          for (int i = 0; i < messages; ++i) {
            v1::UploadRequest message;
            message.set_name(name);
            message.set_data(std::string(1000, static_cast<char>('a' + i)));
            if (damage_last && i == messages - 1) message.set_crc32c(1);
            if (!upload_.Write(message)) break;
            ++sent_;
          }
          status_ = upload_.Finish();
        }) {}
  ~Sender() {
    upload_.context.TryCancel();
    Finish();
  }
  // The number of messages that the server has read.
  int sent() const { return sent_; }
  grpc::Status Finish() {
    if (thread_.joinable()) thread_.join();
    return status_;
  }

 private:
  UploadStream upload_;
  std::atomic<int> sent_{0};
  grpc::Status status_;
  std::thread thread_;
};

class TransferTest : public OnFakeDevice<TransferFixture> {
 protected:
  using OnFakeDevice<TransferFixture>::OnFakeDevice;

  std::uint64_t Committed(const std::string& name) {
    return Found(name).buffer().committed_bytes();
  }
  // Makes other calls. After them, the server has seen everything that arrived earlier.
  void Settle() {
    for (int i = 0; i < 100; ++i) (void)Used("uploads");
  }
  // Sends messages to "x". On return, the first one is being copied and the second one has arrived.
  std::unique_ptr<Sender> SendTwo(int messages, bool damage_last = false) {
    Reserve("x", 10'000);
    device_.Close(Step::kCopyToDevice);
    auto sender = std::make_unique<Sender>(server_.buffers(), messages, damage_last);
    device_.WaitForBlocked(1);
    EXPECT_TRUE(Eventually([&] { return sender->sent() == 2; }));
    Settle();
    return sender;
  }
  std::unique_ptr<grpc::ClientReader<v1::DownloadResponse>> Download(
      grpc::ClientContext& context, const std::string& request = "name: 'x'") {
    return server_.buffers().Download(&context, Of<v1::DownloadRequest>(request));
  }
  std::uint64_t Used(const std::string& budget) {
    const auto info = Good<v1::GetServerInfoResponse>(v1::GetServerInfoRequest());
    for (const v1::Budget& b : info.budgets()) {
      if (b.name() == budget) return b.used();
    }
    ADD_FAILURE() << "no budget " << budget;
    return 0;
  }
};

// --- Uploads in progress ------------------------------------------------------------------------

TEST_F(TransferTest, OneMessageIsReadWhileAnotherIsCopied) {
  const auto sender = SendTwo(6);
  EXPECT_EQ(sender->sent(), 2) << "a third message is read";
  // The memory of an earlier call may be returned slightly later.
  EXPECT_TRUE(Eventually([&] { return Used("host_memory") == 2 * TestOptions().max_message; }));
  device_.Open();
  EXPECT_TRUE(sender->Finish().ok());
  EXPECT_EQ(Committed("x"), 6000u);
  // The server may not know yet that its response to the previous request has been read.
  EXPECT_TRUE(Eventually([&] { return Used("host_memory") == 0; }));
}

TEST_F(TransferTest, AnIdleStreamHoldsOneMessage) {
  Reserve("x", 10'000);
  UploadStream upload(server_.buffers());
  for (int i = 0; i < 5; ++i) upload.Write(At("x", 0, "abcd"));
  EXPECT_TRUE(Eventually([&] { return Used("host_memory") == TestOptions().max_message; }));
  EXPECT_TRUE(upload.Finish().ok());
}

// The second message arrives before the first has been copied, so both count at the same time.
TEST_F(TransferTest, NothingCountsBeforeItHasArrived) {
  const auto sender = SendTwo(2);
  const int before = device_.Count(Step::kSynchronize);
  device_.Close(Step::kSynchronize);
  EXPECT_TRUE(Eventually([&] { return device_.Count(Step::kSynchronize) == before + 1; }));
  EXPECT_EQ(device_.Count(Step::kCopyToDevice), 2);
  EXPECT_EQ(Committed("x"), 0u);
  device_.Open();
  EXPECT_TRUE(sender->Finish().ok());
  EXPECT_EQ(Committed("x"), 2000u);
  EXPECT_EQ(device_.Count(Step::kSynchronize), before + 1);
}

TEST_F(TransferTest, AFailedCopyEndsBeforeItsMemoryDoes) {
  const auto sender = SendTwo(3);
  device_.Fail(Step::kCopyToDevice, Kind::kFailed);
  const int before = device_.Count(Step::kSynchronize);
  device_.Open();
  ExpectError(sender->Finish(), "CUDA_ERROR");
  EXPECT_EQ(device_.Count(Step::kSynchronize), before + 1);
  EXPECT_EQ(Committed("x"), 0u) << "the old bytes are overwritten with unknown ones";
  ASSERT_TRUE(Upload({At("x", 0, Random(10'000))}).ok());
  EXPECT_TRUE(Seal("x").ok()) << "a write seems to be in flight";
}

using FewRanges = Changed<TransferTest, [](Options& options) { options.max_ranges = 2; }>;

TEST_F(FewRanges, AFailedWriteTakesWhatWasThereAndNothingElse) {
  std::string bytes = Random(4000);
  Reserve("x", bytes.size());
  ASSERT_TRUE(Upload({At("x", 0, bytes.substr(0, 3000))}).ok());
  const std::string again = bytes.substr(1000, 1000);
  device_.Fail(Step::kCopyToDevice, Kind::kFailed);
  ExpectError(Upload({At("x", 1000, again)}), "CUDA_ERROR");
  EXPECT_EQ(MissingOf(Found("x")), "1000-2000, 3000-4000");

  v1::UploadRequest damaged = At("x", 1000, again);
  damaged.set_crc32c(1);
  for (int i = 0; i < 3; ++i) {
    ExpectError(Upload({damaged}), "BAD_CHECKSUM");
    device_.Fail(Step::kCopyToDevice, Kind::kFailed);
    ExpectError(Upload({At("x", 1000, again)}), "CUDA_ERROR");
  }
  ASSERT_TRUE(Upload({At("x", 1000, again)}).ok()) << "it counts among the ranges";
  ASSERT_TRUE(Upload({At("x", 3000, bytes.substr(3000))}).ok());
  ASSERT_TRUE(Seal("x").ok());
  EXPECT_TRUE(Fetched("x") == bytes);
}

TEST_F(TransferTest, AnOffsetBeyondTheEndIsRefusedWithoutDataAsWell) {
  Reserve("x", 100);
  EXPECT_TRUE(Upload({At("x", 100, "")}).ok());
  for (const std::uint64_t offset : {std::uint64_t{101}, ~std::uint64_t{0}})
    ExpectError(Upload({At("x", offset, "")}), "BAD_RANGE",
                {{"offset", absl::StrCat(offset)}, {"limit", "100"}});
}

TEST_F(TransferTest, WhatCameBeforeADamagedMessageCounts) {
  const auto sender = SendTwo(2, /*damage_last=*/true);
  device_.Open();
  ExpectError(sender->Finish(), "BAD_CHECKSUM", {{"offset", "1000"}});
  EXPECT_EQ(Committed("x"), 1000u);
  EXPECT_EQ(device_.Count(Step::kCopyToDevice), 1);
}

// Sends two messages that are copied one immediately after the other.
TEST_F(TransferTest, MessagesThatAreHereTogetherStayApart) {
  const auto send = [&](v1::UploadRequest first, v1::UploadRequest second) {
    device_.Close(Step::kCopyToDevice);
    UploadStream upload(server_.buffers());
    EXPECT_TRUE(upload.Write(first));
    device_.WaitForBlocked(1);
    EXPECT_TRUE(upload.Write(second));
    Settle();
    device_.Open();
    const grpc::Status status = upload.Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
  };
  Reserve("gap", 12);
  send(At("gap", 0, "0123"), At("gap", 8, "89ab"));
  EXPECT_EQ(MissingOf(Found("gap")), "4-8");

  Reserve("unknown", 8);
  v1::UploadRequest second = At("unknown", 4, "4567");
  second.set_crc32c(Crc32c("4567", 4));
  send(At("unknown", 0, "0123"), second);
  auto seal = Of<v1::SealBufferRequest>("name: 'unknown'");
  seal.set_crc32c(Crc32c("4567", 4));
  ExpectError(Call(seal), "CHECKSUM_UNKNOWN");

  Reserve("known", 8);
  v1::UploadRequest first = At("known", 0, "0123");
  first.set_crc32c(Crc32c("0123", 4));
  second.set_name("known");
  send(first, second);
  seal.set_name("known");
  seal.set_crc32c(Crc32c("01234567", 8));
  Good<v1::SealBufferResponse>(seal);
}

TEST_F(TransferTest, AClientThatLeavesInTheMiddleLeavesNothing) {
  for (int round = 0; round < 20; ++round) {
    device_.Close(Step::kCopyToDevice);
    {
      UploadStream upload(server_.buffers());
      upload.Write(First("y", 1000, "abcd"));
      device_.WaitForBlocked(1);
      if (round % 2 == 0) upload.Write(More("efgh"));
      upload.context.TryCancel();
      if (round % 3 == 0) absl::SleepFor(absl::Milliseconds(5));
      device_.Open();
      EXPECT_EQ(upload.Finish().error_code(), StatusCode::CANCELLED);
    }
    ASSERT_TRUE(Eventually([&] { return server_.used_bytes() == 0; }));
    ASSERT_TRUE(Eventually([&] { return Used("host_memory") == 0 && Used("uploads") == 0; }));
  }
}

TEST_F(TransferTest, ADraftThatVanishesEndsItsStream) {
  const auto sender = SendTwo(5);
  ASSERT_TRUE(Delete("x").ok());
  device_.Open();
  ExpectError(sender->Finish(), "BUFFER_NOT_FOUND");
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == 0; }));
}

TEST_F(TransferTest, ADraftThatVanishesEndsAStreamThatWaits) {
  Reserve("x", 100);
  UploadStream upload(server_.buffers());
  EXPECT_TRUE(upload.Write(At("x", 0, "abcd")));
  EXPECT_TRUE(Eventually([&] { return Committed("x") == 4; }));
  ASSERT_TRUE(Delete("x").ok());
  EXPECT_TRUE(Eventually([&] { return Used("uploads") == 0; })) << "no message has to come";
  ExpectError(upload.Finish(), "BUFFER_NOT_FOUND");
}

using OneTransferWorker =
    Changed<TransferTest, [](Options& options) { options.transfer_workers = 1; }>;
using ThreeTransferWorkers =
    Changed<TransferTest, [](Options& options) { options.transfer_workers = 3; }>;

TEST_F(OneTransferWorker, UploadsTakeTurns) {
  const std::vector<std::string> names = {"x", "y", "z"};
  for (const std::string& name : names) Reserve(name, 10'000);
  device_.Close(Step::kCopyToDevice);
  std::vector<std::unique_ptr<Sender>> senders;
  int sent = 0;  // In total: per sender, one message is being read and one is waiting.
  const auto all_sent = [&] {
    int sum = 0;
    for (const auto& sender : senders) sum += sender->sent();
    return sum == sent;
  };
  for (const std::string& name : names) {
    senders.push_back(std::make_unique<Sender>(server_.buffers(), 10, false, name));
    sent += 2;
    ASSERT_TRUE(Eventually(all_sent));
  }
  device_.WaitForBlocked(1);
  for (int round = 1; round <= 5; ++round) {
    for (const std::string& name : names) {
      EXPECT_EQ(Committed(name), 1000u * static_cast<unsigned>(round - 1)) << name;
      device_.Pass();
      device_.WaitForBlocked(1);
      ++sent;
      ASSERT_TRUE(Eventually(all_sent));
      EXPECT_EQ(Committed(name), 1000u * static_cast<unsigned>(round)) << name;
    }
  }
  device_.Open();
  for (const auto& sender : senders) EXPECT_TRUE(sender->Finish().ok());
}

TEST_F(ThreeTransferWorkers, CopyAtOnce) {
  Put("y", Random(kSlot));
  Reserve("x", 10'000);
  for (const Step step : {Step::kCopyToDevice, Step::kCopyToHost}) {
    const int before = device_.Count(step);
    device_.Close(step);
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) {
      callers.emplace_back([&] {
        std::string data;
        const grpc::Status status =
            step == Step::kCopyToDevice ? Upload({At("x", 0, "abcd")}) : server_.Fetch("y", &data);
        EXPECT_TRUE(status.ok()) << status.error_message();
      });
    }
    EXPECT_TRUE(Eventually([&] { return device_.Count(step) == before + 3; }));
    Settle();
    EXPECT_EQ(device_.Count(step), before + 3);
    device_.Open();
    for (std::thread& caller : callers) caller.join();
  }
}

// Advances the clock by this time, slowly enough that the server checks its streams in between and
// does not conclude that the process was suspended.
void Pass(absl::Duration time) {
  constexpr absl::Duration kStep = absl::Milliseconds(100);
  for (; time > absl::ZeroDuration(); time -= kStep) {
    AdvanceSteadyNow(kStep);
    absl::SleepFor(absl::Milliseconds(10));
  }
}

// Lets time pass until a condition holds.
bool Passes(const std::function<bool()>& condition) {
  return Eventually([&] {
    Pass(absl::Milliseconds(100));
    return condition();
  });
}

void HaveLittlePatience(Options& options) {
  options.transfer_workers = 1;
  options.transfer_timeout = absl::Seconds(5);
}

using LittlePatience = Changed<TransferTest, HaveLittlePatience>;

// An allocation takes longer than a client may pause, and then the worker is busy for even longer.
TEST_F(LittlePatience, IsNotForTheServersOwnTime) {
  constexpr absl::Duration kLong = absl::Seconds(6);
  UploadStream upload(server_.buffers());
  device_.Close(Step::kAllocate);
  EXPECT_TRUE(upload.Write(First("a", 1)));
  device_.WaitForBlocked(1);
  Pass(kLong);
  device_.Close(Step::kCopyToDevice);
  std::thread other([&] { EXPECT_TRUE(Upload({First("b", 1, "abcd")}).ok()); });
  EXPECT_TRUE(Eventually([&] { return device_.Count(Step::kCopyToDevice) == 1; }));
  EXPECT_TRUE(upload.Write(v1::UploadRequest()));
  Pass(kLong);
  device_.Open();
  other.join();
  EXPECT_TRUE(upload.Write(More("efgh")));
  const grpc::Status status = upload.Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// One download has the worker and waits for the device. The other one waits for the worker.
TEST_F(LittlePatience, IsNotForTheServersOwnTimeInDownloads) {
  const std::string bytes = Random(2 * kSlot);
  Put("x", bytes);
  device_.Close(Step::kCopyToHost);
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      std::string data;
      const grpc::Status status = server_.Fetch("x", &data);
      EXPECT_TRUE(status.ok()) << status.error_message();
      EXPECT_TRUE(data == bytes);
    });
  }
  device_.WaitForBlocked(1);
  ASSERT_TRUE(Eventually([&] { return Used("downloads") == 2; }));
  Pass(absl::Seconds(6));
  device_.Open();
  for (std::thread& reader : readers) reader.join();
}

// The clock continues while the process is stopped.
TEST_F(LittlePatience, IsNotForTimeInWhichTheProcessIsStopped) {
  const std::string bytes = Random(12 * kSlot);
  Put("x", bytes);
  grpc::ClientContext context;
  const auto reader = Download(context);
  ASSERT_TRUE(Eventually([&] { return Used("downloads") == 1; }));
  const std::uint64_t before = server_.used_bytes();
  UploadStream upload(server_.buffers());
  EXPECT_TRUE(upload.Write(First("a", 2, "abcd")));
  ASSERT_TRUE(Eventually([&] { return server_.used_bytes() == before + Charged(8); }));
  server_.AwaitTurn();
  AdvanceSteadyNow(absl::Hours(1));
  server_.AwaitTurn();
  EXPECT_TRUE(upload.Write(More("efgh")));
  EXPECT_TRUE(upload.Finish().ok());
  std::string got;
  v1::DownloadResponse response;
  while (reader->Read(&response)) got += response.data();
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(got == bytes);
}

TEST_F(LittlePatience, IsForReadersThatPause) {
  Put("x", Random(12 * kSlot));
  grpc::ClientContext context;
  auto reader = Download(context);
  v1::DownloadResponse response;
  for (int i = 0; i < 3; ++i) {
    const int fetched = device_.Count(Step::kCopyToHost);
    EXPECT_TRUE(reader->Read(&response));
    EXPECT_TRUE(Eventually([&] { return device_.Count(Step::kCopyToHost) > fetched; }));
    Pass(absl::Seconds(2));
  }
  EXPECT_EQ(Used("downloads"), 1u);
  Pass(absl::Seconds(4));
  EXPECT_TRUE(Eventually([&] { return Used("downloads") == 0; }));
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
}

// A steady flow of messages without data does not keep an upload alive: its timeout still expires.
TEST_F(LittlePatience, IsOverWithMessagesWithoutData) {
  UploadStream upload(server_.buffers());
  EXPECT_TRUE(upload.Write(First("a", 2, "abcd")));
  const v1::UploadRequest empty;
  for (int i = 0;
       i < 1'000'000 && upload.writer->Write(empty, grpc::WriteOptions().set_buffer_hint()); ++i)
    AdvanceSteadyNow(absl::Milliseconds(1));
  ExpectError(upload.writer->Finish(), "UPLOAD_IDLE", {{"limit", "5s"}});
}

using LittleHostMemory = Changed<TransferTest, [](Options& options) {
  options.max_message = 900 << 10;
  options.host_memory = (3 << 20) - 1;
}>;

// Half of the memory is for streams that hold none yet.
TEST_F(LittleHostMemory, StreamsReadOneMessageAtATime) {
  Reserve("x", 10'000);
  UploadStream other(server_.buffers());
  EXPECT_TRUE(Eventually([&] { return Used("uploads") == 1; }));
  device_.Close(Step::kCopyToDevice);
  Sender sender(server_.buffers(), 4);
  device_.WaitForBlocked(1);
  EXPECT_TRUE(Eventually([&] { return sender.sent() == 1; }));
  Settle();
  EXPECT_EQ(sender.sent(), 1);
  device_.Open();
  EXPECT_TRUE(sender.Finish().ok());
  other.context.TryCancel();
  (void)other.Finish();
}

TEST_F(LittleHostMemory, ADownloadNeedsItsSlots) {
  ASSERT_TRUE(Upload({First("a", 1, "abcd")}).ok());
  std::string data;
  ExpectError(server_.Fetch("a", &data), "HOST_MEMORY_EXHAUSTED",
              {{"requested", "3145728"}, {"total", "3145727"}});
}

// --- Downloads in progress ----------------------------------------------------------------------

TEST_F(TransferTest, AReaderThatStopsHoldsAFewChunks) {
  const std::string bytes = Random(10 * kSlot);
  Put("x", bytes);
  // Wait until the responses of Put have been freed.
  ASSERT_TRUE(Eventually([&] { return Used("host_memory") == 0; }));
  grpc::ClientContext context;
  auto reader = Download(context, "name: 'x' checksums: true");
  EXPECT_TRUE(Eventually([&] { return device_.Count(Step::kCopyToHost) == kSlotsADownload; }));
  Settle();
  EXPECT_EQ(device_.Count(Step::kCopyToHost), kSlotsADownload) << "chunks leave the device";
  EXPECT_TRUE(Eventually([&] { return Used("host_memory") == kSlotsADownload * kSlot; }))
      << Used("host_memory");
  std::string data;
  for (v1::DownloadResponse response; reader->Read(&response);) {
    EXPECT_EQ(response.offset(), data.size());
    EXPECT_EQ(response.crc32c(), Crc32c(response.data().data(), response.data().size()));
    data += response.data();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(data == bytes);
  EXPECT_TRUE(Eventually([&] { return Used("host_memory") == 0; }));
}

TEST_F(TransferTest, ChunksBeforeAFailureArrive) {
  Put("x", Random(6 * kSlot));
  grpc::ClientContext context;
  auto reader = Download(context);
  ASSERT_TRUE(Eventually([&] { return device_.Count(Step::kCopyToHost) == kSlotsADownload; }));
  // While gRPC has the second chunk and the third is waiting, the fourth fails.
  device_.Close(Step::kCopyToHost);
  device_.Fail(Step::kCopyToHost, Kind::kFailed);
  v1::DownloadResponse response;
  ASSERT_TRUE(reader->Read(&response));
  device_.WaitForBlocked(1);
  device_.Open();
  Settle();
  int chunks = 1;
  while (reader->Read(&response)) ++chunks;
  EXPECT_EQ(chunks, kSlotsADownload);
  ExpectError(reader->Finish(), "CUDA_ERROR");
}

TEST_F(TransferTest, NoMemoryForASlotEndsADownload) {
  Put("x", Random(6 * kSlot));
  const int slots = device_.Count(Step::kStaging);  // The slots that exist from the start.
  grpc::ClientContext contexts[2];
  std::vector<std::unique_ptr<grpc::ClientReader<v1::DownloadResponse>>> others;
  for (grpc::ClientContext& context : contexts) others.push_back(Download(context));
  ASSERT_TRUE(Eventually([&] { return device_.Count(Step::kCopyToHost) == slots; }));
  device_.Fail(Step::kStaging, Kind::kOutOfHostMemory);
  std::string data;
  ExpectError(server_.Fetch("x", &data), "HOST_MEMORY_EXHAUSTED");
  for (grpc::ClientContext& context : contexts) context.TryCancel();
  for (auto& other : others) (void)other->Finish();
}

TEST_F(TransferTest, ReadersThatLeaveLeaveNothing) {
  const std::string bytes = Random(8 * kSlot);
  Put("x", bytes);
  for (int round = 0; round < 30; ++round) {
    device_.Close(Step::kCopyToHost);
    grpc::ClientContext contexts[4];
    std::vector<std::unique_ptr<grpc::ClientReader<v1::DownloadResponse>>> readers;
    for (grpc::ClientContext& context : contexts) readers.push_back(Download(context));
    device_.WaitForBlocked(2);  // The other downloads are waiting for a worker.
    if (round % 3 == 0) device_.Open();
    for (grpc::ClientContext& context : contexts) {
      v1::DownloadResponse response;
      if (round % 6 == 0) readers[0]->Read(&response);
      context.TryCancel();
    }
    if (round % 3 == 1) absl::SleepFor(absl::Milliseconds(5));
    device_.Open();
    for (auto& reader : readers) EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
    ASSERT_TRUE(Eventually([&] { return Used("host_memory") == 0 && Used("downloads") == 0; }));
  }
  ASSERT_TRUE(Delete("x").ok());
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == 0; }));
}

// --- Memory that clients hold on to -------------------------------------------------------------

// A client in the server's process gets the slots themselves, and keeps them.
struct Keeper : grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
  Keeper(const std::shared_ptr<grpc::Channel>& channel, const v1::DownloadRequest& what)
      : stub(channel) {
    bool owned = false;
    grpc::SerializationTraits<v1::DownloadRequest>::Serialize(what, &request, &owned);
    stub.PrepareBidiStreamingCall(&context, "/tessera.v1.BufferService/Download",
                                  grpc::StubOptions(), this);
    StartWriteLast(&request, grpc::WriteOptions());
    StartRead(&response);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    kept.push_back(response);
    ++count;
    StartRead(&response);
  }
  void OnDone(const grpc::Status& s) override {
    status = s;
    done = true;
  }

  grpc::GenericStub stub;
  grpc::ClientContext context;
  grpc::ByteBuffer request;
  grpc::ByteBuffer response;
  std::vector<grpc::ByteBuffer> kept;
  std::atomic<int> count{0};
  std::atomic<bool> done{false};
  grpc::Status status;
};

TEST(KeptSlots, EndTheDownloadAndOutliveTheServer) {
  auto server = std::make_unique<TestServer>(With(HaveLittlePatience));
  ASSERT_TRUE(server->Put<float>("x", v1::DTYPE_F32, {1}, {0}).ok());
  const std::string view = absl::StrCat("view { shape: ", 6 * kSlot / 4, " strides: 0 }");
  ASSERT_TRUE(server->Call(Of<v1::CopyBufferRequest>("source: 'x' name: 'y' " + view)).ok());
  Keeper keeper(server->channel(), Of<v1::DownloadRequest>("name: 'y'"));
  ASSERT_TRUE(Eventually([&] { return keeper.count == kSlotsADownload; }));
  ASSERT_TRUE(Passes([&] { return keeper.done.load(); }));
  EXPECT_EQ(keeper.status.error_code(), StatusCode::CANCELLED);
  EXPECT_EQ(keeper.count, kSlotsADownload);
  server.reset();
  for (const grpc::ByteBuffer& kept : keeper.kept) {
    grpc::ByteBuffer bytes(kept);
    v1::DownloadResponse response;
    ASSERT_TRUE(
        grpc::SerializationTraits<v1::DownloadResponse>::Deserialize(&bytes, &response).ok());
    EXPECT_TRUE(response.data() == std::string(kSlot, '\0'));
  }
}

// The reader leaves after the server has found the call idle, but before the server cancels it.
TEST_F(LittlePatience, MayEndBeforeItsDownloadIsBrokenOff) {
  Put("x", Random(8 * kSlot));
  std::atomic<bool> done{false};
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReader<v1::DownloadResponse>> reader;
  {
    const std::lock_guard lock(cancel_mutex);
    before_cancel = [&] {
      context.TryCancel();
      EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
      EXPECT_TRUE(Eventually([&] { return Used("downloads") == 0; }));
      Settle();  // The call has ended by then.
      done = true;
    };
    reader = Download(context);
  }
  EXPECT_TRUE(Passes([&] { return done.load(); }));
}

TEST(SlotPool, KeepsWhatIsNeededAndFreesTheRest) {
  FakeDevice device;
  auto pool = SlotPool::Make(device, 2);
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ(device.Count(Step::kStaging), 2);
  const auto use = [&](std::size_t n) {
    std::vector<Slot> slots;
    for (std::size_t i = 0; i < n; ++i) {
      auto slot = (*pool)->Take();
      ASSERT_TRUE(slot.ok());
      slot->data()[Slot::kBytes - 1] = 'x';
      slots.push_back(*std::move(slot));
    }
  };
  use(5);
  EXPECT_EQ(device.Count(Step::kStaging), 5);
  use(5);
  (*pool)->Trim();
  use(4);
  EXPECT_EQ(device.Count(Step::kStaging), 5) << "nothing was unused";
  (*pool)->Trim();  // One slot has been unused.
  use(5);
  EXPECT_EQ(device.Count(Step::kStaging), 6);
  (*pool)->Trim();
  (*pool)->Trim();
  use(2);
  EXPECT_EQ(device.Count(Step::kStaging), 6);
  use(3);
  EXPECT_EQ(device.Count(Step::kStaging), 7);
  device.Fail(Step::kStaging, Kind::kOutOfHostMemory);
  EXPECT_FALSE(SlotPool::Make(device, 1).ok());
  Slot last = *(*pool)->Take();
  pool->reset();
  last.data()[0] = 'x';
}

// --- Imports ------------------------------------------------------------------------------------

using ImportTest = Changed<TransferTest, [](Options& options) { options.import_from = {"*"}; }>;

// The places of cancelled imports are free before their copies have ended.
TEST_F(ImportTest, CancelledImportsMakeRoomForOthersAtOnce) {
  TestServer source(With([](Options& options) { options.listen = {"127.0.0.1:0"}; }));
  ASSERT_TRUE(source.Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
  const auto run = [&](int i, grpc::ClientContext& context) {
    v1::ImportBufferRequest request;
    request.set_source(source.address());
    request.set_source_name("x");
    request.set_name(absl::StrCat("y", i));
    v1::ImportBufferResponse response;
    return server_.buffers().ImportBuffer(&context, request, &response);
  };
  device_.Close(Step::kCopyToDevice);
  grpc::ClientContext contexts[kMaxImports], last;
  {
    std::vector<std::jthread> callers;
    for (int i = 0; i < kMaxImports; ++i) {
      callers.emplace_back(
          [&, i] { EXPECT_EQ(run(i, contexts[i]).error_code(), StatusCode::CANCELLED); });
    }
    device_.WaitForBlocked(kMaxImports);
    for (grpc::ClientContext& context : contexts) context.TryCancel();
  }
  EXPECT_TRUE(Eventually([&] { return Used("imports") == 0; }));
  std::jthread caller([&] { EXPECT_TRUE(run(kMaxImports, last).ok()); });
  EXPECT_TRUE(Eventually([&] { return Used("imports") == 1; }));
  device_.Open();
}

}  // namespace
}  // namespace tessera
