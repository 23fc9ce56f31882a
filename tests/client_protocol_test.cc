// What the client sends to a server, how it interprets the responses, and what it retries.
#include "client/async.h"
#include "client/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <semaphore>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/program_results.h"
#include "google/rpc/error_details.pb.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/crc32c.h"
#include "tessera/v1/shared_memory.grpc.pb.h"
#include "tests/client_fixture.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

// Runs a service on a free port.
class Served {
 public:
  explicit Served(grpc::Service& service) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    server_ = builder.BuildAndStart();
    address = "127.0.0.1:" + std::to_string(port);
  }
  std::string address;

 private:
  std::unique_ptr<grpc::Server> server_;
};

// A service that is asked for the server's shared memory, and responds only when the caller is
// gone.
class SilentSharedMemory final : public v1::SharedMemoryService::Service {
 public:
  grpc::Status GetSharedMemory(grpc::ServerContext* context, const v1::GetSharedMemoryRequest*,
                               v1::GetSharedMemoryResponse*) override {
    asked.release();
    if (Eventually([&] { return context->IsCancelled(); })) ++left;
    return {grpc::StatusCode::UNIMPLEMENTED, ""};
  }
  std::counting_semaphore<> asked{0};
  std::atomic<int> left = 0;  // Callers that are gone.
};

// A service that has one name, "x". The READY buffer of that name has version 3, and the draft gets
// version 7. The service fails on demand, and remembers its requests.
class FakeBuffers final : public v1::BufferService::Service {
 public:
  static constexpr std::uint64_t kOld = 3;
  static constexpr std::uint64_t kDraft = 7;

  static grpc::Status Error(grpc::StatusCode code, const std::string& reason,
                            int retry_delay_ms = 0) {
    google::rpc::Status status;
    status.set_code(static_cast<int>(code));
    google::rpc::ErrorInfo info;
    info.set_domain("tessera");
    info.set_reason(reason);
    status.add_details()->PackFrom(info);
    if (retry_delay_ms > 0) {
      google::rpc::RetryInfo retry;
      retry.mutable_retry_delay()->set_seconds(retry_delay_ms / 1000);
      retry.mutable_retry_delay()->set_nanos(retry_delay_ms % 1000 * 1'000'000);
      status.add_details()->PackFrom(retry);
    }
    return {code, reason, status.SerializeAsString()};
  }
  static grpc::Status Damaged() { return Error(grpc::StatusCode::DATA_LOSS, "BAD_CHECKSUM"); }

  v1::Buffer Describe(std::uint64_t version, v1::Buffer::State state) const {
    v1::Buffer buffer;
    buffer.set_name("x");
    buffer.set_dtype(v1::DTYPE_F32);
    buffer.set_size_bytes(data.size());
    buffer.add_shape(static_cast<std::int64_t>(data.size() / 4));
    buffer.set_version(version);
    buffer.set_state(state);
    return buffer;
  }

  grpc::Status CreateBuffer(grpc::ServerContext*, const v1::CreateBufferRequest*,
                            v1::CreateBufferResponse* response) override {
    const std::lock_guard lock(mutex);
    if (++creates <= refusals) return refusal;
    *response->mutable_buffer() = Describe(kDraft, v1::Buffer::STATE_WRITING);
    return grpc::Status::OK;
  }

  grpc::Status Upload(grpc::ServerContext*, grpc::ServerReader<v1::UploadRequest>* reader,
                      v1::UploadResponse* response) override {
    std::vector<v1::UploadRequest> messages;
    v1::UploadRequest message;
    while (reader->Read(&message)) messages.push_back(message);
    const std::lock_guard lock(mutex);
    streams.push_back(std::move(messages));
    if (damaged_uploads > 0) {
      --damaged_uploads;
      return Damaged();
    }
    const bool creates_it = streams.back().front().has_spec();
    *response->mutable_buffer() =
        Describe(kDraft, creates_it ? v1::Buffer::STATE_READY : v1::Buffer::STATE_WRITING);
    return grpc::Status::OK;
  }

  grpc::Status GetBuffer(grpc::ServerContext*, const v1::GetBufferRequest* request,
                         v1::GetBufferResponse* response) override {
    const std::lock_guard lock(mutex);
    gets.push_back(request->version());
    if (knows_versions && request->version() == kDraft) {
      *response->mutable_buffer() = Describe(kDraft, v1::Buffer::STATE_WRITING);
      v1::ByteRange& missing = *response->add_missing();
      missing.set_end(data.size());
    } else {
      *response->mutable_buffer() = Describe(kOld, v1::Buffer::STATE_READY);
    }
    return grpc::Status::OK;
  }

  grpc::Status SealBuffer(grpc::ServerContext*, const v1::SealBufferRequest* request,
                          v1::SealBufferResponse* response) override {
    const std::lock_guard lock(mutex);
    seals.push_back(*request);
    if (!seal_error.ok()) return seal_error;
    *response->mutable_buffer() = Describe(sealed_version, v1::Buffer::STATE_READY);
    if (sealed_bytes) response->mutable_buffer()->set_size_bytes(*sealed_bytes);
    return grpc::Status::OK;
  }

  grpc::Status DeleteBuffer(grpc::ServerContext*, const v1::DeleteBufferRequest* request,
                            v1::DeleteBufferResponse*) override {
    const std::lock_guard lock(mutex);
    deletes.push_back(request->version());
    return grpc::Status::OK;
  }

  grpc::Status Download(grpc::ServerContext*, const v1::DownloadRequest* request,
                        grpc::ServerWriter<v1::DownloadResponse>* writer) override {
    const std::lock_guard lock(mutex);
    downloads.push_back(*request);
    if (request->version() != 0 && request->version() != kOld) {
      return Error(grpc::StatusCode::FAILED_PRECONDITION, "VERSION_MISMATCH");
    }
    constexpr std::size_t kChunk = 1000;
    bool damaged = false;
    v1::DownloadResponse response;
    *response.mutable_buffer() = Describe(kOld, v1::Buffer::STATE_READY);
    if (whole_checksum) response.mutable_buffer()->set_crc32c(*whole_checksum);
    for (std::uint64_t at = request->offset(); at < data.size(); at += kChunk) {
      response.set_offset(at);
      response.set_data(data.substr(at, kChunk));
      if (request->checksums())
        response.set_crc32c(Crc32c(response.data().data(), response.data().size()));
      if (at >= kChunk && damaged_downloads > 0 && !std::exchange(damaged, true)) {
        --damaged_downloads;
        (*response.mutable_data())[10] ^= 1;
      }
      if (!writer->Write(response)) break;
      response.clear_buffer();
    }
    return grpc::Status::OK;
  }

  std::string data;
  // The first `refusals` calls of CreateBuffer get this status.
  grpc::Status refusal;
  int refusals = 0;
  int damaged_uploads = 0;
  int damaged_downloads = 0;
  bool knows_versions = true;
  std::uint64_t sealed_version = kDraft;
  std::optional<std::uint64_t> sealed_bytes;  // If set, replaces the size of `data`.
  grpc::Status seal_error;
  std::optional<std::uint32_t> whole_checksum;

  std::mutex mutex;
  int creates = 0;
  std::vector<std::vector<v1::UploadRequest>> streams;
  std::vector<std::uint64_t> gets;
  std::vector<v1::SealBufferRequest> seals;
  std::vector<std::uint64_t> deletes;
  std::vector<v1::DownloadRequest> downloads;
};

class ProtocolTest : public ::testing::Test {
 protected:
  ProtocolTest() { fake_.data = Pattern(40'000); }
  absl::StatusOr<v1::Buffer> Upload(int streams) {
    upload_.streams = streams;
    return client_.Upload("x", DType::kF32, {10'000}, FromMemory(fake_.data), upload_);
  }
  std::uint32_t Checksum() const { return Crc32c(fake_.data.data(), fake_.data.size()); }

  FakeBuffers fake_;
  const Served served_{fake_};
  Client client_{FastOptions(served_.address)};
  UploadOptions upload_ = {.chunk_bytes = 4096};
};

TEST_F(ProtocolTest, EveryMessageOfAnUploadHasItsChecksumAndTheLastOneThatOfTheBuffer) {
  ASSERT_TRUE(Upload(1).ok());
  ASSERT_THAT(fake_.streams, SizeIs(1));
  const auto& messages = fake_.streams[0];
  ASSERT_THAT(messages, SizeIs(10));
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string& bytes = messages[i].data();
    EXPECT_EQ(messages[i].crc32c(), Crc32c(bytes.data(), bytes.size()));
    EXPECT_EQ(messages[i].has_buffer_crc32c(), i == 9);
  }
  EXPECT_EQ(messages[9].buffer_crc32c(), Checksum());
}

TEST_F(ProtocolTest, RangesNameTheVersionOfTheirDraftAndSealingHasTheChecksum) {
  const auto buffer = Upload(3);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  ASSERT_THAT(fake_.streams, SizeIs(3));
  for (const auto& messages : fake_.streams) {
    EXPECT_EQ(messages[0].version(), FakeBuffers::kDraft);
    for (const auto& message : messages) {
      EXPECT_TRUE(message.has_crc32c());
      EXPECT_FALSE(message.has_buffer_crc32c());
    }
  }
  ASSERT_THAT(fake_.seals, SizeIs(1));
  EXPECT_EQ(fake_.seals[0].version(), FakeBuffers::kDraft);
  EXPECT_EQ(fake_.seals[0].crc32c(), Checksum());
}

TEST_F(ProtocolTest, WithoutChecksumsNoneIsSent) {
  upload_.checksums = false;
  ASSERT_TRUE(Upload(1).ok());
  ASSERT_TRUE(Upload(2).ok());
  for (const auto& messages : fake_.streams) {
    for (const auto& message : messages) {
      EXPECT_FALSE(message.has_crc32c() || message.has_buffer_crc32c());
    }
  }
  EXPECT_FALSE(fake_.seals[0].has_crc32c());
  std::string out(fake_.data.size(), '\0');
  ASSERT_TRUE(client_.Download("x", absl::MakeSpan(out), {.checksums = false}).ok());
  EXPECT_FALSE(fake_.downloads[0].checksums());
}

TEST_F(ProtocolTest, ADamagedUploadIsSentAgainAFewTimes) {
  for (int streams : {1, 2}) {
    fake_.damaged_uploads = 2;
    EXPECT_TRUE(Upload(streams).ok());
    fake_.damaged_uploads = 1000;
    const absl::Status status = Upload(streams).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(ErrorReason(status), "BAD_CHECKSUM");
    EXPECT_GT(fake_.damaged_uploads, 980);
  }
}

TEST_F(ProtocolTest, ADamagedDownloadGoesOnWhereItWasRight) {
  fake_.damaged_downloads = 3;
  std::string out(fake_.data.size(), '\0');
  const auto buffer = client_.Download("x", absl::MakeSpan(out));
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_TRUE(out == fake_.data);
  ASSERT_THAT(fake_.downloads, SizeIs(4));
  EXPECT_EQ(fake_.downloads[0].version(), 0u);
  EXPECT_EQ(fake_.downloads[1].version(), FakeBuffers::kOld);
  EXPECT_EQ(fake_.downloads[1].offset(), 1000u);

  fake_.damaged_downloads = 1000;
  EXPECT_EQ(ErrorReason(client_.Download("x", absl::MakeSpan(out)).status()), "BAD_CHECKSUM");
  EXPECT_GT(fake_.damaged_downloads, 980);
}

// This service sends everything.
TEST_F(ProtocolTest, ASinkNeverGetsMoreBytesThanTheLimit) {
  std::uint64_t taken = 0;
  const auto sink = [&](const v1::Buffer&, std::string_view bytes) {
    taken += bytes.size();
    return absl::OkStatus();
  };
  const absl::Status status = client_.Download("x", sink, {.limit = 2000}).status();
  EXPECT_EQ(ErrorReason(status), "BAD_RESPONSE") << status;
  EXPECT_EQ(taken, 2000u);
}

TEST_F(ProtocolTest, ADownloadIsComparedWithTheChecksumOfItsBuffer) {
  std::string out(fake_.data.size(), '\0');
  fake_.whole_checksum = Checksum();
  EXPECT_TRUE(client_.Download("x", absl::MakeSpan(out)).ok());
  fake_.whole_checksum = Checksum() ^ 1;
  const absl::Status status = client_.Download("x", absl::MakeSpan(out)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ErrorMetadata(status)["field"], "buffer.crc32c");
  // The whole array's checksum does not apply to a part.
  EXPECT_TRUE(client_.Download("x", absl::MakeSpan(out).subspan(100), {.offset = 100}).ok());
}

TEST_F(ProtocolTest, SealingTheWrongBufferIsAnErrorAndDeletesTheDraftAlone) {
  fake_.sealed_version = FakeBuffers::kDraft + 5;
  const auto renumbered = Upload(2);
  ASSERT_TRUE(renumbered.ok()) << renumbered.status();
  EXPECT_EQ(renumbered->version(), FakeBuffers::kDraft + 5);
  EXPECT_TRUE(fake_.deletes.empty());

  fake_.sealed_version = FakeBuffers::kOld;
  const absl::Status status = Upload(2).status();
  EXPECT_EQ(ErrorReason(status), "VERSION_MISMATCH") << status;
  EXPECT_EQ(ErrorMetadata(status)["expected"], "7");
  EXPECT_EQ(ErrorMetadata(status)["actual"], "3");
  EXPECT_THAT(fake_.deletes, ElementsAre(FakeBuffers::kDraft));
}

// A server that does not know versions may also have sealed another draft of the name, with
// another size.
TEST_F(ProtocolTest, NothingIsDeletedOnAServerThatDoesNotKnowVersions) {
  fake_.knows_versions = false;
  fake_.sealed_version = FakeBuffers::kOld;
  EXPECT_EQ(ErrorReason(Upload(2).status()), "VERSION_MISMATCH");
  EXPECT_EQ(ErrorReason(client_.DeleteBuffer("x", FakeBuffers::kDraft)), "VERSION_MISMATCH");
  fake_.sealed_version = FakeBuffers::kDraft + 5;
  fake_.sealed_bytes = 4;
  EXPECT_EQ(ErrorReason(Upload(2).status()), "VERSION_MISMATCH");
  EXPECT_TRUE(fake_.deletes.empty());
}

TEST_F(ProtocolTest, ARefusalWithADelayIsRepeatedWhateverTheCall) {
  const auto create = [&](grpc::Status refusal, int times) {
    fake_.refusal = std::move(refusal);
    fake_.refusals = times;
    fake_.creates = 0;
    return ErrorReason(client_.CreateBuffer("x", {}).status());
  };
  using grpc::StatusCode;
  const auto error = [](StatusCode code, const char* reason, int delay = 0) {
    return FakeBuffers::Error(code, reason, delay);
  };
  for (const char* reason : {"QUEUE_FULL", "HOST_MEMORY_EXHAUSTED", "SCRATCH_EXHAUSTED"}) {
    EXPECT_EQ(create(error(StatusCode::RESOURCE_EXHAUSTED, reason, 20), 2), "");
    EXPECT_EQ(fake_.creates, 3);
    // An error without a delay would not go away with time, so the call is not retried.
    EXPECT_EQ(create(error(StatusCode::RESOURCE_EXHAUSTED, reason), 2), reason);
    EXPECT_EQ(fake_.creates, 1);
  }
  EXPECT_EQ(create(error(StatusCode::UNAVAILABLE, "DRAINING"), 2), "");
  // It is unknown whether this call has made a buffer.
  EXPECT_EQ(create(grpc::Status(StatusCode::UNAVAILABLE, "gone"), 2), "CONNECTION_LOST");
  EXPECT_EQ(fake_.creates, 1);

  // The delay is longer than the call may take.
  ClientOptions options = FastOptions(served_.address);
  options.timeout = absl::Seconds(9);
  fake_.refusal = error(StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", 10'000);
  fake_.refusals = 1000;
  EXPECT_EQ(ErrorReason(Client(options).CreateBuffer("x", {}).status()), "QUEUE_FULL");
  options.timeout = absl::Seconds(20);
  options.retry_refused = false;
  fake_.creates = 0;
  EXPECT_EQ(ErrorReason(Client(options).CreateBuffer("x", {}).status()), "QUEUE_FULL");
  EXPECT_EQ(fake_.creates, 1);
}

// A service whose first response is a failure. It counts calls.
class FailingCompute final : public v1::ComputeService::Service {
 public:
  using Context = grpc::ServerContext;
#define ANSWERS(method, name)                                                                 \
  grpc::Status method(Context*, const v1::method##Request*, v1::method##Response*) override { \
    return Answer();                                                                          \
  }
  ANSWERS(GetServerInfo, none)
  TESSERA_OPERATION_METHODS(ANSWERS)
#undef ANSWERS
  grpc::Status Execute(Context*, const v1::ExecuteRequest* request,
                       v1::ExecuteResponse* response) override {
    for (int i = 0; i < request->steps_size() + more_results; ++i) response->add_results();
    return Answer();
  }

  // These are set before a call.
  int more_results = 0;  // Extra results in a program's response.
  grpc::Status failure;  // The result of the first call.
  int calls = 0;

 private:
  grpc::Status Answer() { return ++calls == 1 ? failure : grpc::Status::OK; }

  const Served served_{*this};

 public:
  Client client{FastOptions(served_.address)};
};

TEST(ExecuteTest, AResponseHasAResultForEveryStep) {
  FailingCompute server;
  Client& client = server.client;
  Program program;
  program.Dot("x", "x");
  program.Dot("x", "x");
  const std::pair<Operand, Operand> pairs[] = {{"x", "x"}, {"x", "x"}};
  const Operand operands[] = {"x", "x"};
  for (const int more : {-1, 1, 0}) {
    SCOPED_TRACE(more);
    server.more_results = more;
    std::promise<absl::Status> called;
    client.Async().Execute(program, {}, [&](const absl::StatusOr<v1::ExecuteResponse>& response) {
      called.set_value(response.status());
    });
    std::vector<absl::Status> statuses = {
        client.Execute(program).status(), ProgramResults::Execute(client, program).status(),
        client.Async().Execute(program).Get().status(), called.get_future().get()};
    if (more != 0) {
      for (const auto& dot : client.Dots(pairs)) statuses.push_back(dot.status());
      for (const auto& sum : client.Reduces(ReduceOp::kSum, operands))
        statuses.push_back(sum.status());
      EXPECT_THAT(statuses, SizeIs(8));
    }
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.code(), more == 0 ? absl::StatusCode::kOk : absl::StatusCode::kInternal);
      EXPECT_EQ(ErrorReason(status), more == 0 ? "" : "BAD_RESPONSE");
    }
  }
}

TEST(RepetitionTest, OfWhatABreakMayHavePrevented) {
  FailingCompute server;
  const auto calls = [&](grpc::Status failure) {
    server.failure = std::move(failure);
    server.calls = 0;
    const bool ok = server.client.GetServerInfo().ok();
    EXPECT_EQ(ok, server.calls == 2) << server.failure.error_message();
    return server.calls;
  };
  using grpc::StatusCode;
  const auto error = FakeBuffers::Error;
  EXPECT_EQ(calls({StatusCode::UNAVAILABLE, "gone"}), 2);
  EXPECT_EQ(calls(error(StatusCode::UNAVAILABLE, "DRAINING", 0)), 2);
  EXPECT_EQ(calls({StatusCode::CANCELLED, ""}), 2) << "the client has not cancelled it";
  EXPECT_EQ(calls(error(StatusCode::CANCELLED, "CANCELLED", 0)), 1);
  EXPECT_EQ(calls(FakeBuffers::Damaged()), 2);
  EXPECT_EQ(calls(error(StatusCode::UNAVAILABLE, "DEVICE_LOST", 0)), 1) << "its buffers are gone";
  EXPECT_EQ(calls(error(StatusCode::DATA_LOSS, "ANOTHER", 0)), 1);
  EXPECT_EQ(calls(error(StatusCode::INTERNAL, "CUDA_ERROR", 0)), 1);
  EXPECT_EQ(calls(error(StatusCode::FAILED_PRECONDITION, "BUFFER_NOT_READY", 0)), 1);
}

// If a call stores its result before its connection breaks, a repetition would store it twice.
TEST(RepetitionTest, NotOfOperationsThatStoreTheirResult) {
  FailingCompute server;
  server.failure = {grpc::StatusCode::UNAVAILABLE, "gone"};
  Client& client = server.client;
  OperationOptions options;
  for (const bool stored : {false, true}) {
    if (stored) options.target = ResultBuffer{.name = "y"};
    const auto expect = [&](const absl::Status& status) {
      EXPECT_EQ(ErrorReason(status), stored ? "CONNECTION_LOST" : "") << status;
      EXPECT_EQ(server.calls, stored ? 1 : 2);
      server.calls = 0;
    };
    expect(client.Reduce(ReduceOp::kSum, "x", {0}, false, options).status());
    expect(client.Matmul("x", "x", false, false, {}, options).status());
    expect(client.Add("x", "x", options).status());
    expect(client.WindowSum("x", 1, options).status());
    expect(client.TopK("x", 1, false, {}, options).status());
    expect(client.Scan(ReduceOp::kSum, "x", {}, false, false, options).status());
    expect(client.Sort("x", {}, false, Results::kValues, options).status());
    expect(client.Take("x", "i", {}, TakeMode::kError, false, options).status());
    expect(client.Select("x", "m", Results::kValues, options).status());
    expect(client.Histogram("x", IntegerBins{1}, options).status());
    expect(client.SearchSorted("x", "k", false, options).status());
    expect(client.SumByLabel("x", "l", 1, TakeMode::kError, options).status());
    expect(client.Linalg(LinalgFunction::kSolve, "x", "b", options).status());
    OperationOptions indices;
    indices.indices_target = options.target;
    expect(client.TopK("x", 1, false, {}, indices).status());
    Program largest;
    largest.TopK("x", 1, false, {}, indices);
    expect(client.Execute(largest).status());
    Program program;
    program.Dot("x", "x");
    program.Add("x", "x", options);
    expect(client.Execute(program).status());
  }
  EXPECT_TRUE(client.Dot("x", "x").ok()) << "it stores nothing";
  EXPECT_EQ(server.calls, 2);
  server.failure = {grpc::StatusCode::CANCELLED, ""};
  server.calls = 0;
  EXPECT_EQ(ErrorReason(client.Add("x", "x", options).status()), "CONNECTION_LOST");
  server.calls = 0;
  EXPECT_TRUE(client.Async().Dot("x", "x").Get().ok());
}

TEST(SharedMemoryTest, ATransferDoesNotWaitForAServerLongerThanItMay) {
  SilentSharedMemory silent;
  const Served served(silent);
  Client client({.server = served.address, .timeout = absl::InfiniteDuration()});
  const std::string data = Pattern(8 << 20);
  const auto upload = [&](const UploadOptions& options) {
    return client.Upload("x", DType::kF32, {2 << 20}, FromMemory(data), options).status();
  };
  std::stop_source stop;
  const std::jthread canceller([&] {
    silent.asked.acquire();
    stop.request_stop();
  });
  EXPECT_TRUE(absl::IsCancelled(upload({.cancel = stop.get_token()})));
  EXPECT_TRUE(Eventually([&] { return silent.left == 1; }));
  EXPECT_EQ(upload({.timeout = absl::Seconds(1)}),
            absl::DeadlineExceededError("no answer within 1s, the call's deadline"));
  // On a busy machine, the call may end before it reaches the server.
  if (silent.asked.try_acquire()) {
    EXPECT_TRUE(Eventually([&] { return silent.left == 2; }));
  }
}

}  // namespace
}  // namespace tessera
