// The client library against a real server in this process, over loopback TCP.
#include "client/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/arrays.h"
#include "client/async.h"
#include "client/npy.h"
#include "client/ring_client.h"
#include "client/rpc/address.h"
#include "client/rpc/connection.h"
#include "kernels/base/error.h"
#include "tests/client_fixture.h"
#include "tests/fake_device.h"
#include "tests/temporary_file.h"

namespace tessera {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::SizeIs;

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() : server_(TcpOptions()), client_(FastOptions(server_.address())) {}

  void Put(const std::string& name, const std::vector<float>& values,
           std::vector<std::int64_t> shape = {}) {
    if (shape.empty()) shape = {static_cast<std::int64_t>(values.size())};
    const std::string bytes = Bytes(values);
    const auto buffer = client_.Upload(name, DType::kF32, shape, FromMemory(bytes));
    ASSERT_TRUE(buffer.ok()) << buffer.status();
  }

  TestServer server_;
  Client client_;
};

// --- Transfers -----------------------------------------------------------------------------------

TEST_F(ClientTest, RoundTripsOfEveryTypeSizeAndNumberOfStreams) {
  for (DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kU8}) {
    for (std::int64_t elements : {0, 1, 511, 512, 2048, 2049, 10007}) {
      for (int streams : {1, 4}) {
        const std::string data = Pattern(static_cast<std::size_t>(elements) * SizeOf(dtype));
        std::uint64_t sent = 0;
        const UploadOptions options = {.replace = true,
                                       .chunk_bytes = 4096,
                                       .streams = streams,
                                       .progress = [&](std::uint64_t bytes) { sent = bytes; }};
        const auto buffer = client_.Upload("x", dtype, {elements}, FromMemory(data), options);
        ASSERT_TRUE(buffer.ok()) << buffer.status();
        EXPECT_EQ(buffer->state(), v1::Buffer::STATE_READY);
        EXPECT_EQ(buffer->size_bytes(), data.size());
        EXPECT_EQ(sent, data.size());
        EXPECT_EQ(Get(client_, "x"), data);
      }
    }
  }
}

TEST_F(ClientTest, UploadOptions) {
  const std::string data = Pattern(4000);
  UploadOptions options;
  options.ttl = absl::Minutes(10);
  options.device = "cpu";
  auto buffer = client_.Upload("a/b", DType::kF32, {10, 100}, FromMemory(data), options);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_TRUE(buffer->has_expire_time());
  EXPECT_EQ(buffer->device(), "cpu");
  EXPECT_THAT(buffer->shape(), ElementsAre(10, 100));
  buffer = client_.UpdateBuffer("a/b", std::nullopt);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_FALSE(buffer->has_expire_time());
  buffer = client_.UpdateBuffer("a/b", absl::Seconds(100));
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_TRUE(buffer->has_expire_time());
  buffer = client_.UpdateBuffer("a/b", absl::InfiniteDuration());
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_FALSE(buffer->has_expire_time());
  options.replace = true;
  options.ttl = absl::InfiniteDuration();
  buffer = client_.Upload("a/b", DType::kF32, {10, 100}, FromMemory(data), options);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_GT(buffer->expire_time().seconds(), absl::ToUnixSeconds(absl::Now()) + 3'000'000'000);

  const auto reason = [&](std::int64_t elements, const UploadOptions& with) {
    const auto zeros = [](std::uint64_t, absl::Span<char> out) {
      std::fill(out.begin(), out.end(), 0);
      return absl::OkStatus();
    };
    return ErrorReason(client_.Upload("a/b", DType::kF32, {elements}, zeros, with).status());
  };
  EXPECT_EQ(reason(1000, {}), "BUFFER_EXISTS");
  EXPECT_EQ(reason(1000, {.replace = true}), "");
  EXPECT_EQ(reason(1000, {.replace = true, .device = "cuda:99"}), "BAD_DEVICE");
  EXPECT_EQ(reason(-1, {}), "BAD_SHAPE");
  EXPECT_EQ(reason(1000, {.chunk_bytes = 100}), "BAD_OPTION");
  EXPECT_EQ(reason(1000, {.chunk_bytes = (4 << 20) + 64}), "BAD_OPTION");
  EXPECT_EQ(reason(2 << 20, {.replace = true, .chunk_bytes = 4 << 20}), "");
}

TEST_F(ClientTest, SourcesOfAnotherSizeAreRefusedBeforeAnythingIsSent) {
  const std::string bytes = Pattern(4000);
  const TemporaryFile file(MakeNpyHeader(DType::kF32, {1000}) + bytes);
  const auto npy = NpyFile::Open(file.path());
  ASSERT_TRUE(npy.ok()) << npy.status();
  const auto read = [&](std::uint64_t offset, absl::Span<char> out) {
    return npy->Read(offset, out);
  };
  for (const Source& source : {FromMemory(bytes), Source(read, npy->header().data_bytes)}) {
    for (const int streams : {1, 4}) {
      const UploadOptions options = {.replace = true, .chunk_bytes = 1024, .streams = streams};
      for (const std::int64_t elements : {999, 1001, 0}) {
        const Traffic before = client_.traffic();
        const absl::Status status =
            client_.Upload("x", DType::kF32, {elements}, source, options).status();
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_EQ(ErrorReason(status), "BAD_RANGE") << status;
        EXPECT_EQ(ErrorMetadata(status)["needed"], std::to_string(4 * elements));
        EXPECT_EQ(ErrorMetadata(status)["given"], "4000");
        EXPECT_EQ(client_.traffic().sent_bytes, before.sent_bytes);
      }
      EXPECT_TRUE(client_.Upload("x", DType::kF32, {1000}, source, options).ok());
    }
  }
  std::string out(8, '\0');
  EXPECT_EQ(ErrorReason(FromMemory("1234")(0, absl::MakeSpan(out))), "BAD_RANGE");
  EXPECT_EQ(ErrorReason(FromMemory("1234")(~std::uint64_t{0}, absl::MakeSpan(out))), "BAD_RANGE");
}

TEST_F(ClientTest, WhatFunctionsOfTheCallerThrowEndsTheTransfer) {
  const std::string bytes = Pattern(400'000);
  for (const int streams : {1, 4}) {
    // The draft of an upload that failed may last a little longer.
    UploadOptions options = {.replace = true, .chunk_bytes = 1024, .streams = streams};
    const auto thrown = [](std::uint64_t, absl::Span<char>) -> absl::Status {
      throw std::runtime_error("the disk is on fire");
    };
    absl::Status status = client_.Upload("x", DType::kF32, {100'000}, thrown, options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(ErrorReason(status), "CALLER_EXCEPTION");
    EXPECT_THAT(std::string(status.message()), HasSubstr("the disk is on fire"));
    options.progress = [](std::uint64_t) { throw 1; };
    status = client_.Upload("x", DType::kF32, {100'000}, FromMemory(bytes), options).status();
    EXPECT_EQ(ErrorReason(status), "CALLER_EXCEPTION");
    // The server notices the end of a stream shortly afterwards.
    EXPECT_TRUE(Eventually(
        [&] { return ErrorReason(client_.GetBuffer("x").status()) == "BUFFER_NOT_FOUND"; }));
    EXPECT_EQ(ErrorReason(client_.Upload("x", DType::kF32, {100'000}, nullptr, options).status()),
              "BAD_OPTION");
  }
  Put("y", {1, 2, 3});
  const Sink throwing = [](const v1::Buffer&, std::string_view) -> absl::Status { throw 1; };
  EXPECT_EQ(ErrorReason(client_.Download("y", throwing).status()), "CALLER_EXCEPTION");
  EXPECT_EQ(ErrorReason(client_.Download("y", Sink()).status()), "BAD_OPTION");
  EXPECT_EQ(ErrorReason(client_.DownloadRanges("y", nullptr).status()), "BAD_OPTION");
}

// The error may be that of another call, and then has a reason and a delay that the transfer would
// otherwise take for its own.
TEST_F(ClientTest, AnErrorOfASinkOrSourceEndsTheTransferUnchanged) {
  constexpr std::uint64_t kSize = 16 << 20, kBegin = 2 << 20, kLimit = 3 << 20;
  const std::string data = Pattern(kSize);
  ASSERT_TRUE(client_.Upload("x", DType::kU8, {kSize}, FromMemory(data)).ok());
  using Code = absl::StatusCode;
  for (const absl::Status& error : {
           MakeError(Code::kUnavailable, "CONNECTION_LOST", "mine"),
           MakeError(Code::kUnavailable, "DRAINING", "mine"),
           MakeError(Code::kResourceExhausted, "QUEUE_FULL", "mine", {{"retry_delay_ms", "1"}}),
           MakeError(Code::kDataLoss, "BAD_CHECKSUM", "mine"),
           MakeError(Code::kFailedPrecondition, "VERSION_MISMATCH", "mine"),
           MakeError(Code::kNotFound, "BUFFER_NOT_FOUND", "mine"),
           absl::DeadlineExceededError("mine"),
           absl::UnavailableError("mine"),
           absl::CancelledError("mine"),
       }) {
    std::string got;
    const Sink sink = [&](const v1::Buffer&, std::string_view bytes) {
      if (got.size() >= kBegin) return error;
      got += bytes;
      return absl::OkStatus();
    };
    EXPECT_EQ(client_.Download("x", sink, {.limit = kLimit}).status(), error);
    EXPECT_TRUE(got == data.substr(0, got.size()));
    for (const int streams : {1, 2}) {
      std::atomic<int> refused = 0;
      const RangeSink ranges = [&](const v1::Buffer&, std::uint64_t offset, std::string_view) {
        if (offset != kBegin) return absl::OkStatus();
        ++refused;
        return error;
      };
      EXPECT_EQ(client_.DownloadRanges("x", ranges, {.streams = streams}).status(), error);
      EXPECT_EQ(refused, 1);
      std::atomic<int> asked = 0;
      const auto source = [&](std::uint64_t offset, absl::Span<char> out) {
        if (offset != kBegin) return FromMemory(data)(offset, out);
        ++asked;
        return error;
      };
      const UploadOptions options = {.replace = true, .streams = streams};
      EXPECT_EQ(client_.Upload("y", DType::kU8, {kSize}, source, options).status(), error);
      EXPECT_EQ(asked, 1);
    }
  }
}

TEST_F(ClientTest, DownloadsByRanges) {
  const std::string data = Pattern((32 << 20) + 12);
  ASSERT_TRUE(client_
                  .Upload("x", DType::kI32, {static_cast<std::int64_t>(data.size() / 4)},
                          FromMemory(data), {.streams = 2})
                  .ok());
  for (const int streams : {1, 3, 100}) {
    std::string out(data.size(), '\0');
    std::atomic<std::size_t> bytes{0};
    const auto buffer = client_.DownloadRanges(
        "x",
        [&](const v1::Buffer&, std::uint64_t offset, std::string_view part) {
          std::copy(part.begin(), part.end(), out.begin() + static_cast<std::ptrdiff_t>(offset));
          bytes += part.size();
          return absl::OkStatus();
        },
        {.streams = streams});
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(bytes, data.size());
    EXPECT_TRUE(out == data) << streams;
    std::string part(data.size() - 12, '\0');
    const auto window = client_.Download("x", absl::MakeSpan(part),
                                         {.offset = 8, .limit = part.size(), .streams = streams});
    ASSERT_TRUE(window.ok()) << window.status();
    EXPECT_TRUE(part == data.substr(8, part.size()));
  }
  std::atomic<int> calls{0};
  const auto refusing = [&](const v1::Buffer&, std::uint64_t, std::string_view) {
    return calls++ < 3 ? absl::OkStatus() : absl::DataLossError("the disk broke");
  };
  EXPECT_EQ(client_.DownloadRanges("x", refusing, {.streams = 4}).status(),
            absl::DataLossError("the disk broke"));
  std::string out(data.size(), '\0');
  const auto reason = [&](const char* name, const DownloadOptions& window) {
    return ErrorReason(client_.Download(name, absl::MakeSpan(out), window).status());
  };
  EXPECT_EQ(reason("x", {.limit = 7}), "BAD_RANGE");
  EXPECT_EQ(reason("x", {.offset = data.size() + 1}), "BAD_RANGE");
  EXPECT_EQ(reason("y", {}), "BUFFER_NOT_FOUND");
  const ResidentBuffer held = client_.Hold(client_.GetBuffer("x")->buffer());
  EXPECT_TRUE(client_.Download(held, absl::MakeSpan(out), {.streams = 2}).ok());
  ASSERT_TRUE(PutFloats(client_, "x", {1}).ok());
  for (const int streams : {1, 2}) {
    EXPECT_EQ(
        ErrorReason(client_.Download(held, absl::MakeSpan(out), {.streams = streams}).status()),
        "VERSION_MISMATCH");
  }
  EXPECT_EQ(ErrorReason(client_.CopyBuffer(held, {.name = "z"}).status()), "VERSION_MISMATCH");
}

TEST_F(ClientTest, ArraysOfCppTypes) {
  const std::vector<double> values = {1, 2, 3, 4, 5, 6};
  ASSERT_TRUE(Upload<double>(client_, "x", values, {2, 3}).ok());
  EXPECT_EQ(ErrorReason(Upload<double>(client_, "y", values, {2, 2}).status()), "BAD_RANGE");
  EXPECT_EQ(*Download<double>(client_, "x"), values);
  EXPECT_EQ(*Download<double>(client_, "x", {.offset = 8, .limit = 16}),
            (std::vector<double>{2, 3}));
  EXPECT_EQ(ErrorReason(Download<float>(client_, "x").status()), "BAD_DTYPE");
  const Traffic before = client_.traffic();
  for (const DownloadOptions& part : {DownloadOptions{.offset = 4}, DownloadOptions{.limit = 12}}) {
    const absl::Status status = Download<double>(client_, "x", part).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorReason(status), "BAD_RANGE") << status;
  }
  EXPECT_EQ(client_.traffic().sent_bytes, before.sent_bytes);
  const auto sum = client_.Add("x", Inline<double>(values, {2, 3}));
  ASSERT_TRUE(sum.ok()) << sum.status();
  EXPECT_EQ(*Elements<double>(sum->tensor()), (std::vector<double>{2, 4, 6, 8, 10, 12}));
  EXPECT_EQ(ErrorReason(Elements<std::int32_t>(sum->tensor()).status()), "BAD_DTYPE");
  const bool truth[] = {true, false};
  ASSERT_TRUE(Upload<bool>(client_, "b", truth, {2}).ok());
  const ResidentBuffer held = client_.Hold(client_.GetBuffer("x")->buffer());
  EXPECT_EQ(*Download<double>(client_, held), values);
}

// --- Moves ---------------------------------------------------------------------------------------

template <class... T>
inline constexpr bool kMoveOnly = ((!std::is_copy_constructible_v<T> &&
                                    !std::is_copy_assignable_v<T> &&
                                    std::is_nothrow_move_constructible_v<T>)&&...);
static_assert(kMoveOnly<Client, ResidentBuffer, RingClient, Future<v1::DotResponse>, SharedMemory,
                        NpyFile, NpyWriter>);

TEST_F(ClientTest, AClientMovesWithItsCallsAndLeavesNothing) {
  Put("x", {1, 2, 3});
  AsyncClient async = client_.Async();
  Future<v1::DotResponse> begun = async.Dot("x", "x");
  Client moved = std::move(client_);
  EXPECT_TRUE(begun.Get().ok());
  EXPECT_TRUE(async.Dot("x", "x").Get().ok());
  EXPECT_EQ(moved.Dot("x", "x")->value().real(), 14);
  const auto fails = [](const absl::Status& status) {
    return status.code() == absl::StatusCode::kFailedPrecondition &&
           ErrorReason(status) == "MOVED_FROM";
  };
  std::string out(12, '\0');
  // NOLINTBEGIN(bugprone-use-after-move): this is the behaviour under test
  EXPECT_TRUE(fails(client_.Dot("x", "x").status()));
  EXPECT_TRUE(fails(client_.Async().Dot("x", "x").Get().status()));
  EXPECT_TRUE(fails(PutFloats(client_, "x", {1}).status()));
  EXPECT_TRUE(fails(client_.Download("x", absl::MakeSpan(out)).status()));
  EXPECT_TRUE(fails(client_.MakeSharedMemory(1).status()));
  EXPECT_FALSE(client_.Hold(moved.GetBuffer("x")->buffer()));
  EXPECT_EQ(client_.traffic().sent_bytes, 0u);
  // NOLINTEND(bugprone-use-after-move)
  client_ = std::move(moved);
  EXPECT_TRUE(client_.Dot("x", "x").ok());

  RingClient ring(*Ring::Parse("a " + server_.address()));
  const RingClient other = std::move(ring);
  EXPECT_TRUE(other.For("x").Dot("x", "x").ok());
  EXPECT_TRUE(fails(ring.For("x").Dot("x", "x").status()));  // NOLINT(bugprone-use-after-move)
}

// --- Buffers -------------------------------------------------------------------------------------

TEST_F(ClientTest, ABufferByHand) {
  v1::BufferSpec spec;
  spec.set_dtype(v1::DTYPE_F32);
  spec.add_shape(4);
  const auto created = client_.CreateBuffer("x", spec);
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(created->state(), v1::Buffer::STATE_WRITING);
  EXPECT_THAT(client_.GetBuffer("x")->missing(), SizeIs(1));
  EXPECT_THAT(ErrorMetadata(client_.SealBuffer("x").status()), Contains(Key("missing")));
  EXPECT_TRUE(client_.DeleteBuffer("x").ok());
  EXPECT_EQ(client_.DeleteBuffer("x").code(), absl::StatusCode::kNotFound);
}

TEST_F(ClientTest, ListsEveryPage) {
  constexpr int kBuffers = 1203;  // More than the largest page.
  for (int i = 0; i < kBuffers; ++i) Put("many/" + std::to_string(i), {1});
  Put("other", {1});
  const auto all = client_.ListBuffers();
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->size(), kBuffers + 1u);
  EXPECT_TRUE(std::is_sorted(all->begin(), all->end(),
                             [](const auto& a, const auto& b) { return a.name() < b.name(); }));
  EXPECT_THAT(*client_.ListBuffers("other"), SizeIs(1));
  EXPECT_THAT(*client_.ListBuffers("none"), SizeIs(0));
}

// --- Operations ----------------------------------------------------------------------------------
// cli_test has every operation with every argument.

TEST_F(ClientTest, Programs) {
  Put("x", {3, 9, 2, 1, 5, 7}, {2, 3});
  Program program;
  const ProgramStep squares =
      program.Matmul("x", "x", false, true, std::nullopt, {.scratch = true});
  program.Reduce(ReduceOp::kArgMax, squares, {1});
  const ProgramStep mask = program.Map({"x"}, Element(0) > 6, {.scratch = true});
  EXPECT_FALSE(program.has_target());
  const ProgramStep selected =
      program.Select("x", mask, Results::kValues, {.target = ResultBuffer{.name = "y"}});
  EXPECT_TRUE(program.has_target());
  program.Reduce(ReduceOp::kSum, selected);
  const ProgramStep picked =
      program.Take("x", Integers({1, 7}), 1, TakeMode::kError, false, {.scratch = true});
  program.Reduce(ReduceOp::kSum, picked);
  program.Reduce(ReduceOp::kSum, program.Take("x", Integers({1, 0}), 0));
  program.WindowSum("x", 1);
  program.WantStats();
  const auto answer = client_.Execute(program);
  ASSERT_TRUE(answer.ok()) << answer.status();
  std::vector<std::string> reasons;
  for (const v1::StepResult& result : answer->results())
    reasons.push_back(ErrorReason(Client::StatusOf(result)));
  // No step can use the result of a selection. An error applies to its step and to the steps that
  // need its result.
  EXPECT_THAT(reasons, ElementsAre("", "", "", "", "BAD_OPERAND", "BAD_INDEX", "STEP_FAILED", "",
                                   "", "BAD_SHAPE"));
  EXPECT_THAT(Values<std::int64_t>(answer->results(1).reduce().tensor()), ElementsAre(0, 1));
  EXPECT_EQ(answer->results(3).select().values_buffer().name(), "y");
  EXPECT_EQ(Get(client_, "y"), Bytes<float>({9, 7}));
  EXPECT_EQ(answer->results(8).reduce().value().real(), 27);
  EXPECT_NE(answer->results(8).reduce().stats().strategy(), "");
}

TEST_F(ClientTest, HealthOfServices) {
  EXPECT_TRUE(*client_.CheckHealth());
  EXPECT_TRUE(*client_.CheckHealth("tessera.v1.ComputeService"));
  const absl::Status unknown = client_.CheckHealth("no.such.Service").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorReason(unknown), "UNKNOWN_SERVICE");
  EXPECT_EQ(ErrorMetadata(unknown)["service"], "no.such.Service");
}

// gRPC itself would refuse them without a reason.
TEST_F(ClientTest, MessagesThatNoServerAcceptsAreNotSent) {
  const std::vector<float> many((9 << 20) / sizeof(float));
  const std::string name(9 << 20, 'x'), data = Pattern(4000);
  const Traffic before = client_.traffic();
  const auto none = [](const v1::Buffer&, std::string_view) { return absl::OkStatus(); };
  for (const absl::Status& status :
       {client_.Dot(Floats(many), "x").status(),
        client_.Async().Dot(Floats(many), "x").Get().status(), client_.GetBuffer(name).status(),
        client_.Download(name, none).status(),
        client_.Upload(name, DType::kF32, {1000}, FromMemory(data)).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ErrorReason(status), "BAD_MESSAGE");
    EXPECT_EQ(ErrorMetadata(status)["limit"], std::to_string(TestOptions().max_message));
    EXPECT_GT(std::stoi(ErrorMetadata(status)["value"]), 9 << 20);
  }
  EXPECT_EQ(client_.traffic().sent_bytes, before.sent_bytes);
}

TEST_F(ClientTest, ACallWithoutTimeToConnectMissesItsDeadline) {
  for (const int seconds : {0, -1}) {
    const absl::Duration timeout = absl::Seconds(seconds);
    const absl::Status missed = absl::DeadlineExceededError(
        absl::StrCat("no answer within ", absl::FormatDuration(timeout), ", the call's deadline"));
    EXPECT_EQ(Client({.server = server_.address(), .timeout = timeout}).GetServerInfo().status(),
              missed);
    Client client(FastOptions(server_.address()));
    EXPECT_EQ(client.Async().GetServerInfo({.timeout = timeout}).Get().status(), missed);
    const auto none = [](const v1::Buffer&, std::string_view) { return absl::OkStatus(); };
    EXPECT_EQ(client.Download("x", none, {.timeout = timeout}).status(), missed);
  }
}

// --- Deadlines and cancelled calls ---------------------------------------------------------------

TEST(RetryTest, PausesAsLongAsTheServerAsksForWithinBounds) {
  ClientOptions options;
  options.retry_refused = true;
  const auto pause = [&](std::string_view delay_ms) {
    Connection connection(options);
    absl::Status refusal = MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL", "",
                                     {{Attempts::kRetryDelay, std::string(delay_ms)}});
    const absl::Duration forever = absl::InfiniteDuration();
    return Attempts(connection, {.timeout = forever, .patience = forever}).Pause(refusal);
  };
  const auto short_pause = pause("3000"), long_pause = pause("3600000");
  ASSERT_TRUE(short_pause.has_value() && long_pause.has_value());
  EXPECT_GE(*short_pause, absl::Seconds(3));
  EXPECT_LE(*short_pause, absl::Seconds(3.75));
  EXPECT_GE(*long_pause, absl::Seconds(10));
  EXPECT_LE(*long_pause, absl::Seconds(12.5));
}

class BusyServerTest : public WithABusyServer {};

TEST_F(BusyServerTest, ACallIsCancelledFromElsewhere) {
  std::stop_source source;
  std::thread caller([&] {
    const absl::Status status = client_->Dot("x", "x", {.cancel = source.get_token()}).status();
    EXPECT_EQ(status, absl::CancelledError("the caller cancelled the call"));
  });
  device_->WaitForBlocked(1);
  source.request_stop();
  caller.join();
  // A call that was cancelled before it began fails immediately, even if it would otherwise wait
  // for a server.
  EXPECT_TRUE(absl::IsCancelled(client_->Dot("x", "x", {.cancel = source.get_token()}).status()));
  EXPECT_TRUE(absl::IsCancelled(client_->GetServerInfo({.cancel = source.get_token()}).status()));
}

// --- Tokens --------------------------------------------------------------------------------------

TEST(ClientTokenTest, EveryKindOfCallSendsTheToken) {
  const TemporaryFile tokens(
      "1f6076e3a47ba1ded08025ffe06e57af217c14f9407f33fba50f99b1c7019387 write a\n");
  Options options = TcpOptions();
  options.tokens = tokens.path();
  TestServer server(options);
  const TemporaryFile file("a-token\n");
  ClientOptions by_value = FastOptions(server.address()), by_file = by_value, marked = by_value;
  by_value.token = "a-token";
  by_file.token_file = file.path();
  marked.server = "\xEF\xBB\xBF" + server.address() + "\n";
  marked.token =
      "\xEF\xBB\xBF"
      "a-token\r\n";
  for (const ClientOptions& with : {by_value, by_file, marked}) {
    Client client(with);
    ASSERT_TRUE(PutFloats(client, "x", {1, 2, 3}).ok());
    const auto dot = client.Dot("x", "x");
    ASSERT_TRUE(dot.ok()) << dot.status();
    EXPECT_EQ(dot->value().real(), 14);
    EXPECT_TRUE(client.Async().Dot("x", "x").Get().ok());
    EXPECT_THAT(*Download<float>(client, "x"), ElementsAre(1, 2, 3));
  }
  Client without(FastOptions(server.address()));
  EXPECT_EQ(ErrorReason(without.Dot("x", "x").status()), "BAD_TOKEN");
  EXPECT_EQ(ErrorReason(PutFloats(without, "x", {1}).status()), "BAD_TOKEN");
  EXPECT_EQ(ErrorReason(without.Async().Dot("x", "x").Get().status()), "BAD_TOKEN");
}

TEST(ClientTokenTest, TokensStayOnThisHostWithoutTls) {
  for (const auto& [address, reason] : {std::pair("127.0.0.1:1,127.8.9.10:2", "UNREACHABLE"),
                                        std::pair("127.0.0.1:1,gpu:2", "BAD_CREDENTIALS")}) {
    ClientOptions options = FastOptions(address);
    options.connect_timeout = absl::Milliseconds(1);
    options.token = "secret";
    const absl::Status status = Client(options).Dot("x", "x").status();
    EXPECT_EQ(ErrorReason(status), reason) << address;
    EXPECT_THAT(std::string(status.message()), ::testing::Not(HasSubstr("secret")));
  }
}

// The Python client is tested with the same file.
TEST(Addresses, AreLoopbackOrNot) {
  std::ifstream cases(TESSERA_LOOPBACK_CASES);
  std::string line;
  int count = 0;
  while (std::getline(cases, line)) {
    std::istringstream words(line);
    std::string stays, address;
    words >> stays;
    for (; stays != "#" && words >> address; ++count)
      EXPECT_EQ(StaysHere(address), stays == "yes") << address;
  }
  EXPECT_GT(count, 80);
}

TEST(Addresses, ThatAreNoneAreRefusedAtOnce) {
  for (const char* none :
       {"", " ", "no such host:x", "http://127.0.0.1:50051", "localhost:http", "localhost",
        "localhost:", ":1", "localhost:65536", "localhost:0", "::1:50051", "[::1]", "[gpu]:1",
        "unix:", "127.0.0.1:1,localhost:http", "user@gpu:1", "gpu:1/x", "ipv4:127.0.0.1"}) {
    ClientOptions options = FastOptions(none);
    options.connect_timeout = absl::Hours(1);
    const absl::Status status = Client(options).GetServerInfo().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << none;
    EXPECT_EQ(ErrorReason(status), "BAD_ADDRESS") << none;
  }
  for (const char* some : {"gpu:1", "gpu-1.cluster_2.local:50051", "[::1]:1", "[fe80::1%eth0]:1",
                           "unix:x", "unix:///a b", "unix-abstract:x", "dns:///gpu:1",
                           "dns://8.8.8.8/gpu:1", "ipv6:[::1]:1", "xds:///gpu"})
    EXPECT_TRUE(CheckAddress(some).ok()) << CheckAddress(some);
}

TEST(Addresses, OfSocketsMayHaveAnyCharacter) {
  const TemporaryFile path;
  for (const char* name : {"a%20b", "a b", "a?b#c", "%", "\xc3\xa4"}) {
    Options options = TestOptions();
    options.listen = {"unix:" + path.path() + name};
    TestServer server(options);
    const absl::Status status = Client(FastOptions(options.listen[0])).GetServerInfo().status();
    EXPECT_TRUE(status.ok()) << name << ": " << status;
  }
}

TEST(Addresses, AProxyIsNamedWithoutItsPassword) {
  for (const char* url : {"http://user:s@cret@proxy:1", "user:secret@proxy:1", "http://proxy:1"}) {
    ::setenv("https_proxy", url, 1);
    const std::optional<Proxy> found = ProxyFor("gpu:1");
    ::unsetenv("https_proxy");
    EXPECT_EQ(found->value, url[0] == 'u' ? "proxy:1" : "http://proxy:1");
  }
}

TEST(Addresses, NetworksOfNoProxyAreHonoured) {
  const auto proxy = [](const char* exceptions, const char* address) {
    ::setenv("https_proxy", "http://proxy:1", 1);
    ::setenv("no_proxy", exceptions, 1);
    const std::optional<Proxy> found = ProxyFor(address);
    ::unsetenv("https_proxy");
    ::unsetenv("no_proxy");
    return found && !found->excepted;
  };
  EXPECT_TRUE(proxy("", "10.1.2.3:1"));
  EXPECT_FALSE(proxy("", "unix:/x"));
  EXPECT_FALSE(proxy("10.0.0.0/8", "10.1.2.3:1"));
  EXPECT_FALSE(proxy("a, 10.1.2.0/23 ", "10.1.3.3:1"));
  EXPECT_TRUE(proxy("10.1.2.0/23", "10.1.4.3:1"));
  EXPECT_TRUE(proxy("10.0.0.0/8", "gpu:1"));
  EXPECT_TRUE(proxy("10.0.0.0/x,10.0.0.0/33,/,//", "11.1.2.3:1"));
  EXPECT_FALSE(proxy("0.0.0.0/0", "11.1.2.3:1"));
  EXPECT_TRUE(proxy("0.0.0.0/0", "[2001:db8::7]:1"));
  EXPECT_FALSE(proxy("2001:db8::/32", "[2001:db8::7]:1"));
  EXPECT_FALSE(proxy("example.org", "gpu.example.org:1"));
}

// gRPC itself only logs that it cannot use such credentials.
TEST(Credentials, ThatCannotBeUsedAreRefusedAtOnce) {
  const TemporaryFile garbage("no certificate\n"), mark("\xEF\xBB\xBF  a-token \r\n");
  ClientOptions options = FastOptions("127.0.0.1:1");
  options.connect_timeout = absl::Milliseconds(1);
  options.token_file = mark.path();
  EXPECT_EQ(ErrorReason(Client(options).GetServerInfo().status()), "UNREACHABLE");
  options.tls_ca = garbage.path();
  options.connect_timeout = absl::Hours(1);
  const absl::Status status = Client(options).GetServerInfo().status();
  EXPECT_EQ(ErrorReason(status), "BAD_CREDENTIALS");
  EXPECT_EQ(ErrorMetadata(status)["file"], garbage.path());
}

}  // namespace
}  // namespace tessera
