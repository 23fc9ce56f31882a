// The client's asynchronous calls and the handles of buffers.
#include "client/async.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/program_results.h"
#include "client/resident_buffer.h"
#include "kernels/base/error.h"
#include "tests/client_fixture.h"
#include "tests/fake_device.h"
#include "tests/quiet.h"

namespace tessera {
namespace {

class AsyncTest : public ::testing::Test {
 protected:
  AsyncTest() : server_(TcpOptions()), client_(FastOptions(server_.address())) {
    EXPECT_TRUE(PutFloats(client_, "x", {1, 2, 3}).ok());
  }

  TestServer server_;
  Client client_;
};

TEST_F(AsyncTest, EveryCallAnswersInBothForms) {
  AsyncClient async = client_.Async();
  EXPECT_EQ(async.Dot("x", "x").Get()->value().real(), 14);
  EXPECT_EQ(async.Reduce(ReduceOp::kSum, "x").Get()->value().real(), 6);
  EXPECT_EQ(async.Add("x", "x").Get()->tensor().data(), Bytes<float>({2, 4, 6}));
  EXPECT_EQ(async.WindowSum("x", 1).Get()->tensor().data(), Bytes<float>({3, 6, 5}));
  const absl::StatusOr<v1::TopKResponse> largest = async.TopK("x", 1).Get();
  EXPECT_EQ(largest->values().data(), Bytes<float>({3}));
  EXPECT_EQ(largest->indices().data(), Bytes<std::int64_t>({2}));
  EXPECT_EQ(async.Scan(ReduceOp::kSum, "x").Get()->tensor().data(), Bytes<float>({1, 3, 6}));
  EXPECT_EQ(async.Sort("x", 0, /*descending=*/true).Get()->values().data(),
            Bytes<float>({3, 2, 1}));
  EXPECT_EQ(async.Take("x", Integers({2, 0})).Get()->tensor().data(), Bytes<float>({3, 1}));
  v1::Tensor mask;
  mask.set_dtype(v1::DTYPE_BOOL);
  mask.add_shape(3);
  mask.set_data(std::string("\0\1\1", 3));
  EXPECT_EQ(async.Select("x", mask).Get()->values().data(), Bytes<float>({2, 3}));
  EXPECT_EQ(async.Histogram("x", EvenBins{2, 1, 3}).Get()->tensor().data(),
            Bytes<std::int64_t>({1, 2}));
  EXPECT_EQ(async.SearchSorted("x", "x").Get()->tensor().data(), Bytes<std::int64_t>({0, 1, 2}));
  EXPECT_EQ(async.SumByLabel("x", Integers({1, 0, 1}), 2).Get()->tensor().data(),
            Bytes<float>({2, 4}));
  Operand row = "x";
  row.view = v1::View();
  for (int i = 0; i < 2; ++i) row.view->add_shape(1);
  EXPECT_EQ(async.Linalg(LinalgFunction::kSolve, row, row).Get()->tensor().data(),
            Bytes<float>({1}));
  EXPECT_EQ(async.Matmul("x", "x").Get()->tensor().data(), Bytes<float>({14}));
  EXPECT_EQ(async.Map({"x"}, Element(0) * Element(0)).Get()->tensor().data(),
            Bytes<float>({1, 4, 9}));
  EXPECT_EQ(async.GetBuffer("x").Get()->buffer().name(), "x");
  EXPECT_EQ(async.GetServerInfo().Get()->devices_size(), 1);
  Program program;
  program.Dot("x", "x");
  EXPECT_EQ(async.Execute(program).Get()->results(0).dot().value().real(), 14);

  const absl::Status blocking = client_.Dot("x", "nothing").status();
  const Traffic before = client_.traffic();
  EXPECT_EQ(client_.Async().Dot("x", "nothing").Get().status(), blocking);
  EXPECT_EQ(ErrorReason(blocking), "BUFFER_NOT_FOUND");
  EXPECT_GT(client_.traffic().sent_bytes, before.sent_bytes);
  EXPECT_GT(client_.traffic().received_bytes, before.received_bytes);
}

TEST_F(AsyncTest, BuffersAreCopiedAndDeleted) {
  const auto copy = client_.Async().CopyBuffer("x", {.name = "y"}, DType::kF64).Get();
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(copy->buffer().name(), "y");
  EXPECT_EQ(copy->buffer().dtype(), v1::DTYPE_F64);
  EXPECT_EQ(client_.Reduce(ReduceOp::kSum, "y")->value().real(), 6);
  const std::uint64_t version = copy->buffer().version();
  EXPECT_EQ(ErrorReason(client_.Async().DeleteBuffer("y", version + 1).Get().status()),
            ErrorReason(client_.DeleteBuffer("y", version + 1)));
  EXPECT_TRUE(client_.Async().DeleteBuffer("y", version).Get().ok());
  EXPECT_EQ(ErrorReason(client_.GetBuffer("y").status()), "BUFFER_NOT_FOUND");

  // A call that is refused before it is sent ends on the client's thread, like all calls.
  const Operand inline_operand = Floats({1});
  absl::Notification done;
  std::thread::id thread;
  absl::Status status;
  client_.Async().CopyBuffer(inline_operand, {.name = "z"}, std::nullopt, "", {},
                             [&](const absl::StatusOr<v1::CopyBufferResponse>& answer) {
                               thread = std::this_thread::get_id();
                               status = answer.status();
                               done.Notify();
                             });
  done.WaitForNotification();
  EXPECT_EQ(status, client_.CopyBuffer(inline_operand, {.name = "z"}).status());
  EXPECT_EQ(ErrorReason(status), "BAD_OPERAND");
  EXPECT_NE(thread, std::this_thread::get_id());
}

TEST_F(AsyncTest, ManyAtOnceFromManyThreads) {
  constexpr int kThreads = 16, kCalls = 200;
  std::atomic<int> right{0}, ended{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kCalls; ++i) {
        client_.Async().Dot("x", "x", {}, [&](const absl::StatusOr<v1::DotResponse>& answer) {
          if (answer.ok() && answer->value().real() == 14) ++right;
          ++ended;
        });
        if (i % 50 == 0) {
          EXPECT_TRUE(client_.Dot("x", "x").ok());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(Eventually([&] { return ended == kThreads * kCalls; }));
  EXPECT_EQ(right, kThreads * kCalls);
}

TEST_F(AsyncTest, ACallbackMayBeginTheNextCall) {
  absl::Notification done;
  int left = 100;
  Callback<v1::DotResponse> next = [&](const absl::StatusOr<v1::DotResponse>& answer) {
    if (!answer.ok() || --left == 0) return done.Notify();
    client_.Async().Dot("x", "x", {}, next);
  };
  client_.Async().Dot("x", "x", {}, next);
  done.WaitForNotification();
  EXPECT_EQ(left, 0);
}

TEST_F(AsyncTest, AnswersAreTakenOnceAndExceptionsOfCallbacksAreDropped) {
  Future<v1::DotResponse> dot = client_.Async().Dot("x", "x");
  EXPECT_TRUE(dot.Get().ok());
  EXPECT_TRUE(dot.IsReady());
  EXPECT_EQ(ErrorReason(dot.Get().status()), "ANSWER_TAKEN");
  Future<v1::DotResponse> other = client_.Async().Dot("x", "x");
  const Future<v1::DotResponse> moved = std::move(other);
  EXPECT_EQ(ErrorReason(other.Get().status()), "ANSWER_TAKEN");  // NOLINT(bugprone-use-after-move)

  absl::Notification called;
  client_.Async().Dot("x", "x", {}, [&](const absl::StatusOr<v1::DotResponse>&) {
    called.Notify();
    throw std::runtime_error("nobody catches this");
  });
  called.WaitForNotification();
  client_.Async().Dot("x", "x", {}, nullptr);
  Program program;
  program.Dot("x", "x");
  client_.Async().Execute(program, {}, nullptr);
  EXPECT_TRUE(client_.Async().Dot("x", "x").Get().ok());
}

TEST(AsyncWithoutServer, EndsAfterItsConnectTimeoutOrWhenItIsCancelled) {
  ClientOptions options = FastOptions("127.0.0.1:" + std::to_string(FreePort()));
  options.connect_timeout = absl::Milliseconds(300);
  Client client(options);
  EXPECT_EQ(ErrorReason(client.Async().Dot("x", "x").Get().status()), "UNREACHABLE");

  options.connect_timeout = absl::Seconds(60);
  Client patient(options);
  Future<v1::DotResponse> dot = patient.Async().Dot("x", "x");
  dot.Cancel();
  EXPECT_EQ(dot.Get().status(), absl::CancelledError("the caller cancelled the call"));
}

class BusyAsyncTest : public WithABusyServer {};

TEST_F(BusyAsyncTest, ACallEndsAtItsDeadline) {
  const OperationOptions options = {.timeout = absl::Milliseconds(200)};
  for (const auto& answer :
       {client_->Dot("x", "x", options), client_->Async().Dot("x", "x", options).Get()})
    EXPECT_EQ(answer.status(),
              absl::DeadlineExceededError("no answer within 200ms, the call's deadline"));
}

TEST_F(BusyAsyncTest, ACallIsCancelledOnTheServerToo) {
  Future<v1::DotResponse> running = client_->Async().Dot("x", "x");
  device_->WaitForBlocked(1);
  Future<v1::DotResponse> waiting = client_->Async().Dot("x", "x");
  ASSERT_TRUE(Eventually([&] { return server_->Info().waiting() == 1; }));
  waiting.Cancel();
  EXPECT_EQ(waiting.Get().status(), absl::CancelledError("the caller cancelled the call"));
  EXPECT_TRUE(Eventually([&] { return server_->Info().waiting() == 0; }));
  device_->Open();
  EXPECT_TRUE(running.Get().ok());
}

TEST_F(BusyAsyncTest, ARefusedCallIsRepeatedWhenThereIsRoom) {
  std::vector<Future<v1::DotResponse>> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(client_->Async().Dot("x", "x"));
  ASSERT_TRUE(Eventually([&] { return server_->Info().waiting() == 1; }));
  const std::uint64_t sent = client_->traffic().sent_bytes;
  EXPECT_TRUE(Eventually([&] { return client_->traffic().sent_bytes > sent; }))
      << "one is repeated";
  device_->Open();
  for (auto& call : calls) EXPECT_TRUE(call.Get().ok());
}

TEST_F(BusyAsyncTest, ManyDotsEndWhenAStopIsRequested) {
  const std::vector<std::pair<Operand, Operand>> pairs(5500, {"x", "x"});
  std::stop_source stop;
  const std::jthread canceller([&] {
    device_->WaitForBlocked(1);
    stop.request_stop();
  });
  const auto expect_cancelled = [&] {
    const auto dots = client_->Dots(pairs, {.cancel = stop.get_token()});
    EXPECT_EQ(dots.size(), pairs.size());
    for (const auto& dot : dots) ASSERT_TRUE(absl::IsCancelled(dot.status())) << dot.status();
  };
  expect_cancelled();
  const std::uint64_t sent = client_->traffic().sent_bytes;
  expect_cancelled();
  EXPECT_EQ(client_->traffic().sent_bytes, sent);
}

// One call is running, and one is waiting for capacity.
TEST_F(BusyAsyncTest, TheEndOfTheClientCancelsWhatIsUnderWay) {
  std::atomic<int> cancelled{0};
  for (int i = 0; i < 4; ++i) {
    client_->Async().Dot("x", "x", {}, [&](const absl::StatusOr<v1::DotResponse>& answer) {
      absl::SleepFor(absl::Milliseconds(20));
      // The call was cancelled, or it was refused earlier and is not retried.
      if (!answer.ok()) ++cancelled;
    });
  }
  ASSERT_TRUE(Eventually([&] { return server_->Info().waiting() == 1; }));
  client_.reset();
  EXPECT_EQ(cancelled, 4) << "every callback has returned";
}

// --- Programs ------------------------------------------------------------------------------------

class ProgramResultsTest : public AsyncTest {};

TEST_F(ProgramResultsTest, AnswersByStepAndByName) {
  Program program;
  const ProgramStep twice = program.Name("twice", program.Add("x", "x"));
  program.Name("length", program.Dot("x", twice));
  const ProgramStep last = program.Reduce(ReduceOp::kArgMax, "x");
  const ProgramStep first = program.Reduce(ReduceOp::kArgMin, "x");
  const ProgramStep all = program.Reduce(ReduceOp::kAll, "x");
  const ProgramStep kept = program.Add("x", "x", {.target = ResultBuffer{"kept"}});
  program.Name("wrong", program.Dot("x", "nothing"));
  const auto results = ProgramResults::Execute(client_, program);
  ASSERT_TRUE(results.ok()) << results.status();

  EXPECT_THAT(*results->Values<float>("twice"), ::testing::ElementsAre(2, 4, 6));
  EXPECT_EQ(results->Tensor(twice)->shape(0), 3);
  EXPECT_EQ(*results->Real("length"), 28);
  EXPECT_EQ(*results->Index(last), 2);
  EXPECT_EQ(*results->Index(first), 0);
  EXPECT_EQ(*results->Real(last), 3);
  EXPECT_EQ(*results->Integer(all), 1);
  EXPECT_EQ(*results->Real(all), 1);
  EXPECT_EQ(results->Buffer(kept)->name(), "kept");
  EXPECT_TRUE(results->StatusOf(kept).ok());

  EXPECT_EQ(ErrorReason(results->StatusOf("wrong")), "BUFFER_NOT_FOUND");
  EXPECT_EQ(ErrorReason(results->Real("wrong").status()), "BUFFER_NOT_FOUND");
  EXPECT_EQ(ErrorReason(results->Real("who").status()), "UNKNOWN_STEP");
  EXPECT_EQ(ErrorReason(results->Real(ProgramStep{7}).status()), "UNKNOWN_STEP");
  for (const absl::Status& status :
       {results->Real(twice).status(), results->Integer("length").status(),
        results->Index(twice).status(), results->Index(all).status(),
        results->Values<double>(twice).status(), results->Values<float>(kept).status(),
        results->Buffer(twice).status(), results->Tensor("length").status()}) {
    EXPECT_EQ(ErrorReason(status), "OTHER_RESULT") << status;
  }
}

TEST_F(ProgramResultsTest, StepsInExpressions) {
  const Expr difference = Element(0) - Element(1);
  Program program;
  const ProgramStep mean = program.Reduce(ReduceOp::kMean, "x");
  program.Name("deviations", program.Reduce(ReduceOp::kSum, "x", {}, false,
                                            {.expression = (difference * difference).ToMessage(),
                                             .with = {mean}}));
  program.Name("above", program.Reduce(ReduceOp::kSum, "x", {}, false,
                                       {.expression = (Element(0) > 1.5).ToMessage()}));
  const auto results = ProgramResults::Execute(client_, program);
  ASSERT_TRUE(results.ok()) << results.status();
  EXPECT_EQ(*results->Real("deviations"), 2);  // The deviations of 1, 2 and 3.
  EXPECT_EQ(*results->Integer("above"), 2);
}

TEST_F(ProgramResultsTest, TheTwoResultsOfTopK) {
  Program program;
  const ProgramStep doubled = program.Map({"x"}, Element(0) * 2, {.scratch = true});
  const ProgramStep best =
      program.TopK(doubled, 2, false, 0, {.scratch = true, .indices_scratch = true});
  const ProgramStep less = program.Name("less", program.Map({best}, Element(0) - 1));
  program.Name("places", program.Map({best.indices()}, Element(0) * 10));
  const ProgramStep smallest = program.TopK("x", 2, true);
  program.Name("where", smallest.indices());
  EXPECT_FALSE(program.has_target());
  const ProgramStep stored = program.TopK(
      "x", 1, false, std::nullopt,
      {.target = ResultBuffer{"kept/values"}, .indices_target = ResultBuffer{"kept/indices"}});
  EXPECT_TRUE(program.has_target());
  const auto results = ProgramResults::Execute(client_, program);
  ASSERT_TRUE(results.ok()) << results.status();

  EXPECT_THAT(*results->Values<float>(less), ::testing::ElementsAre(5, 3));
  EXPECT_THAT(*results->Values<std::int64_t>("places"), ::testing::ElementsAre(20, 10));
  EXPECT_THAT(*results->Values<float>(smallest), ::testing::ElementsAre(1, 2));
  EXPECT_THAT(*results->Values<std::int64_t>("where"), ::testing::ElementsAre(0, 1));
  EXPECT_EQ(results->Buffer(stored)->name(), "kept/values");
  EXPECT_EQ(results->Buffer(stored.indices())->name(), "kept/indices");
  for (const absl::Status& status :
       {results->Tensor(best).status(), results->Tensor(best.indices()).status(),
        results->Buffer("where").status(), results->Real(smallest).status()}) {
    EXPECT_EQ(ErrorReason(status), "OTHER_RESULT") << status;
  }
}

// There are more operations of each kind than one call can have.
TEST_F(ProgramResultsTest, ManyDotsAndReduces) {
  constexpr int kCount = 5500;
  std::vector<std::pair<Operand, Operand>> pairs;
  std::vector<Operand> operands;
  for (int i = 0; i < kCount; ++i) {
    const Operand mine = Floats({static_cast<float>(i), 1, 1});
    pairs.emplace_back(i == 17 ? Operand("nothing") : mine, "x");
    operands.push_back(i == 23 ? Operand("nothing") : mine);
  }
  const auto dots = client_.Dots(pairs);
  const auto sums = client_.Reduces(ReduceOp::kSum, operands);
  ASSERT_EQ(dots.size(), pairs.size());
  ASSERT_EQ(sums.size(), operands.size());
  for (int i = 0; i < kCount; ++i) {
    const auto k = static_cast<std::size_t>(i);
    EXPECT_EQ(ErrorReason(dots[k].status()), i == 17 ? "BUFFER_NOT_FOUND" : "");
    EXPECT_EQ(ErrorReason(sums[k].status()), i == 23 ? "BUFFER_NOT_FOUND" : "");
    EXPECT_EQ(dots[k].ok() ? dots[k]->value().real() : i + 5, i + 5);
    EXPECT_EQ(sums[k].ok() ? sums[k]->value().real() : i + 2, i + 2);
  }
  // There is more data than fits in a message.
  const Operand large = Floats(std::vector<float>(1 << 17, 1));
  for (const auto& sum : client_.Reduces(ReduceOp::kSum, std::vector<Operand>(20, large))) {
    ASSERT_TRUE(sum.ok()) << sum.status();
    EXPECT_EQ(sum->value().real(), 1 << 17);
  }
  EXPECT_TRUE(client_.Dots({}).empty());
  // A deadline that has only just expired would leave gRPC the rest of a millisecond.
  for (const auto& dot : client_.Dots(pairs, {.timeout = -absl::Milliseconds(10)})) {
    EXPECT_FALSE(dot.ok());
  }
}

// --- Handles -------------------------------------------------------------------------------------

class HandleTest : public AsyncTest {
 protected:
  ResidentBuffer Make(const std::string& name, bool delete_with_handle) {
    const auto buffer = PutFloats(client_, name, {1, 2});
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return client_.Hold(*buffer, {.delete_with_handle = delete_with_handle});
  }
  bool Exists(const std::string& name) { return client_.GetBuffer(name).ok(); }
};

TEST_F(HandleTest, MeansItsOwnVersionAndNoOther) {
  {
    const ResidentBuffer handle = Make("y", true);
    ASSERT_TRUE(PutFloats(client_, "y", {5}).ok());
    EXPECT_EQ(ErrorReason(client_.Dot(handle, handle).status()), "VERSION_MISMATCH");
  }
  Client(FastOptions(server_.address()));
  AwaitQuiet();
  EXPECT_TRUE(Exists("y"));
}

TEST_F(HandleTest, Moves) {
  ResidentBuffer first = Make("a", true);
  EXPECT_EQ(client_.Dot(first, first)->value().real(), 5);
  ResidentBuffer second = std::move(first);
  EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(second.name(), "a");
  second = Make("kept", false);
  second = Make("b", true);
  EXPECT_TRUE(Eventually([&] { return !Exists("a"); }));
  EXPECT_TRUE(Exists("kept"));
  EXPECT_TRUE(Exists("b"));
  const v1::Buffer released = second.Release();
  EXPECT_FALSE(second);
  EXPECT_EQ(released.name(), "b");
  second = Make("c", false);
  EXPECT_TRUE(Exists("b"));
  EXPECT_TRUE(second.Delete().ok());
  EXPECT_FALSE(second);
  EXPECT_FALSE(Exists("c"));
  EXPECT_EQ(ErrorReason(second.Delete()), "EMPTY_HANDLE");
}

TEST_F(HandleTest, MayOutliveItsClient) {
  ResidentBuffer handle;
  {
    Client client(FastOptions(server_.address()));
    const auto buffer = PutFloats(client, "y", {1});
    ASSERT_TRUE(buffer.ok());
    handle = client.Hold(*buffer, {.delete_with_handle = true});
  }
  EXPECT_TRUE(Exists("y"));
  handle = {};
  EXPECT_FALSE(Exists("y")) << "the end of the connections has waited for it";
}

}  // namespace
}  // namespace tessera
