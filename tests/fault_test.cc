// What the server does when things go wrong around it: devices that fail, stall and die, callers
// that leave, a full queue, a stop in the middle of work.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <future>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "grpcpp/generic/generic_stub.h"
#include "server/clock.h"
#include "server/process.h"
#include "tests/test_server.h"

extern char** environ;

namespace tessera {
namespace {

using grpc::StatusCode;
using testing::HasSubstr;
using Step = FakeDevice::Step;
using Kind = DeviceError::Kind;

Options OneWorker(std::uint32_t queue) {
  Options options = TestOptions();
  options.workers = 1;
  options.queue = queue;
  return options;
}

class FaultTest : public testing::Test {
 protected:
  void StartServer(const Options& options = OneWorker(8)) {
    auto device = std::make_unique<FakeDevice>();
    device_ = device.get();
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(std::move(device));
    server_ = std::make_unique<TestServer>(options, std::move(devices));
    ASSERT_TRUE(server_->Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
  }
  void TearDown() override {
    if (device_ != nullptr) device_->Open();
  }

  grpc::Status Dot(grpc::ClientContext& context, double* value = nullptr,
                   const std::string& name = "x") {
    v1::DotRequest request;
    request.mutable_a()->set_buffer(name);
    request.mutable_b()->set_buffer(name);
    v1::DotResponse response;
    const grpc::Status status = server_->compute().Dot(&context, request, &response);
    if (value != nullptr) *value = response.value().real();
    return status;
  }
  grpc::Status Dot(double* value = nullptr) {
    grpc::ClientContext context;
    return Dot(context, value);
  }
  grpc::Status Dot(const std::string& name) {
    grpc::ClientContext context;
    return Dot(context, nullptr, name);
  }
  // The sum of x and x, as a resident buffer.
  grpc::Status AddInto(const std::string& name) {
    grpc::ClientContext context;
    v1::AddRequest request;
    request.mutable_a()->set_buffer("x");
    request.mutable_b()->set_buffer("x");
    request.mutable_result()->mutable_buffer()->set_name(name);
    v1::AddResponse response;
    return server_->compute().Add(&context, request, &response);
  }
  std::future<grpc::Status> DotAsync(double* value = nullptr) {
    return std::async(std::launch::async, [this, value] { return Dot(value); });
  }
  grpc::Status Delete(const std::string& name) {
    grpc::ClientContext context;
    v1::DeleteBufferRequest request;
    request.set_name(name);
    v1::DeleteBufferResponse response;
    return server_->buffers().DeleteBuffer(&context, request, &response);
  }

  void ExpectWorks() {
    double value = 0;
    const grpc::Status status = Dot(&value);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(value, 14);
  }

  // Waits until one operation waits for the worker.
  void WaitForQueued() {
    ASSERT_TRUE(Eventually([&] { return server_->Info().waiting() == 1; }));
  }

  // Whether the server ends because it has lost all its devices.
  bool AwaitEnd() {
    auto end = std::async(std::launch::async, [&] { return server_->server().Wait(); });
    const bool ends = end.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    if (!ends) server_->server().RequestStop();
    return end.get() == Server::Reason::kDevicesLost;
  }

  FakeDevice* device_ = nullptr;  // the server's
  std::unique_ptr<TestServer> server_;
};

// Health as a client asks for it, in the wire format of grpc.health.v1: a request with the name as
// field 1, an answer with the state as field 1.
enum class Serving { kUnknown, kServing, kNotServing };
Serving HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  grpc::GenericStub stub(channel);
  std::string request;
  if (!service.empty()) {
    request = {'\x0a', static_cast<char>(service.size())};
    request += service;
  }
  grpc::Slice slice(request);
  grpc::ByteBuffer send(&slice, 1);
  grpc::ByteBuffer receive;
  grpc::ClientContext context;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &send, &receive,
                 [&](grpc::Status status) { done.set_value(std::move(status)); });
  if (!done.get_future().get().ok()) return Serving::kUnknown;
  std::vector<grpc::Slice> slices;
  (void)receive.Dump(&slices);
  std::string bytes;
  for (const grpc::Slice& part : slices) {
    bytes.append(reinterpret_cast<const char*>(part.begin()), part.size());
  }
  if (bytes.size() != 2 || bytes[0] != 8) return Serving::kUnknown;
  return bytes[1] == 1 ? Serving::kServing : Serving::kNotServing;
}

constexpr char kCompute[] = "tessera.v1.ComputeService";
constexpr char kBuffers[] = "tessera.v1.BufferService";

// --- The queue ----------------------------------------------------------------------------------

TEST_F(FaultTest, FullQueueRefusesAtOnce) {
  StartServer(OneWorker(2));
  device_->Close(Step::kBegin);
  std::vector<std::future<grpc::Status>> accepted;
  accepted.push_back(DotAsync());
  device_->WaitForBlocked(1);
  std::atomic<int> refused{0};
  // Of the next four, two find a place.
  for (int i = 0; i < 4; ++i) {
    accepted.push_back(std::async(std::launch::async, [&] {
      const grpc::Status status = Dot();
      if (!status.ok()) ++refused;
      return status;
    }));
  }
  EXPECT_TRUE(Eventually([&] { return refused == 2; }));
  const grpc::Status status = Dot();
  ExpectError(status, StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL",
              {{"limit", "2"}, {"device", "fake:0"}});
  EXPECT_TRUE(DetailsOf(status).retry);
  device_->Open();
  int ok = 0;
  for (auto& future : accepted) ok += future.get().ok();
  EXPECT_EQ(ok, 3);
  ExpectWorks();
}

TEST_F(FaultTest, LateCallsNeverReachTheDevice) {
  StartServer();
  device_->Close(Step::kBegin);
  auto first = DotAsync();
  device_->WaitForBlocked(1);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  EXPECT_EQ(Dot(context).error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(Eventually([&] { return server_->Info().waiting() == 0; })) << "its place is free";
  device_->Open();
  EXPECT_TRUE(first.get().ok());
  ExpectWorks();
  EXPECT_EQ(device_->Count(Step::kBegin), 2);
}

TEST_F(FaultTest, CancelledCallsNeverReachTheDevice) {
  StartServer();
  device_->Close(Step::kBegin);
  auto first = DotAsync();
  device_->WaitForBlocked(1);
  grpc::ClientContext context;
  auto second = std::async(std::launch::async, [&] { return Dot(context); });
  WaitForQueued();
  context.TryCancel();
  EXPECT_EQ(second.get().error_code(), StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return server_->Info().waiting() == 0; }));
  device_->Open();
  EXPECT_TRUE(first.get().ok());
  ExpectWorks();
  EXPECT_EQ(device_->Count(Step::kBegin), 2);
}

// As short operations do, of which the worker, once it has begun to run one, is a moment late to say
// that it has nothing to do.
TEST_F(FaultTest, ShortProgramsRunOnTheThreadThatReceivesThem) {
  StartServer();
  ASSERT_TRUE(server_->Put("wide", v1::DTYPE_F32, {1 << 19}, std::vector<float>(1 << 19)).ok());
  const auto run = [&](int steps, const std::string& strategy = "", const std::string& name = "x",
                       const std::vector<std::int64_t>& repeated = {}, bool timing = false) {
    v1::ExecuteRequest request;
    v1::ExecuteResponse response;
    for (int i = 0; i < steps; ++i) {
      v1::AddRequest& add = *request.add_steps()->mutable_add();
      for (v1::Operand* operand : {add.mutable_a(), add.mutable_b()}) {
        if (i > 0) {
          operand->set_step(static_cast<std::uint32_t>(i - 1));
          continue;
        }
        operand->set_buffer(name);
        for (const std::int64_t extent : repeated) {
          operand->mutable_view()->add_shape(extent);
          operand->mutable_view()->add_strides(0);
        }
      }
      add.set_strategy(strategy);
      add.set_timing(timing);
      add.mutable_result()->set_scratch(true);
    }
    v1::ReduceRequest& sum = *request.add_steps()->mutable_reduce();
    sum.mutable_x()->set_step(static_cast<std::uint32_t>(steps - 1));
    sum.set_op(v1::REDUCE_OP_SUM);
    grpc::ClientContext context;
    EXPECT_TRUE(server_->compute().Execute(&context, request, &response).ok());
    const v1::StepResult& last = response.results(steps);
    EXPECT_FALSE(last.has_error()) << last.error().message();
    if (name == "x" && repeated.empty()) {
      EXPECT_EQ(last.reduce().value().real(), 6 * (1 << steps));
    }
    return device_->ThreadOf(Step::kBegin);
  };
  const std::thread::id worker = run(1, "cpu");
  EXPECT_TRUE(Eventually([&] { return run(2) != worker; }));
  EXPECT_TRUE(Eventually([&] { return run(15) != worker; }));
  EXPECT_EQ(run(16), worker) << "of too many steps";
  EXPECT_EQ(run(1, "", "wide"), worker);
  EXPECT_EQ(run(2, "", "x", {1 << 10, 1 << 10}), worker) << "of a view that is large";
  EXPECT_EQ(run(1, "", "x", {}, true), worker) << "that is timed";
}

TEST_F(FaultTest, TransfersDoNotWaitForOperations) {
  StartServer();
  device_->Close(Step::kBegin);
  auto first = DotAsync();
  device_->WaitForBlocked(1);
  EXPECT_TRUE(server_->Put<float>("y", v1::DTYPE_F32, {2}, {5, 6}).ok());
  std::string data;
  EXPECT_TRUE(server_->Fetch("y", &data).ok());
  EXPECT_EQ(data.size(), 8u);
  device_->Open();
  EXPECT_TRUE(first.get().ok());
}

// --- Memory in use ------------------------------------------------------------------------------

TEST_F(FaultTest, ReplacedAndDeletedOperandsStayUntilTheirUsersEnd) {
  StartServer();
  device_->Close(Step::kBegin);
  double old_value = 0;
  auto running = DotAsync(&old_value);
  device_->WaitForBlocked(1);
  ASSERT_TRUE(server_->Put<float>("x", v1::DTYPE_F32, {2}, {10, 20}, true).ok());
  EXPECT_EQ(server_->used_bytes(), Charged(12) + Charged(8)) << "both are in memory";
  double new_value = 0;
  auto queued = DotAsync(&new_value);
  WaitForQueued();
  ASSERT_TRUE(Delete("x").ok());
  ExpectError(Dot(), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND", {{"name", "x"}});
  EXPECT_EQ(server_->used_bytes(), Charged(12) + Charged(8));
  device_->Open();
  EXPECT_TRUE(running.get().ok());
  EXPECT_EQ(old_value, 14);
  EXPECT_TRUE(queued.get().ok());
  EXPECT_EQ(new_value, 500);
  EXPECT_TRUE(Eventually([&] { return server_->used_bytes() == 0; }));
  EXPECT_EQ(device_->allocations(), 0u);
}

// A client that has its answer counts on the memory of the operands that it deletes.
TEST_F(FaultTest, AnswersComeWhenOperandsHaveBeenReleased) {
  StartServer();
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(AddInto("y").ok());
    ASSERT_TRUE(Dot("y").ok());
    ASSERT_TRUE(Delete("y").ok());
    ASSERT_EQ(device_->allocations(), 1u) << "x alone, time " << i;
  }
}

TEST_F(FaultTest, DownloadOutlivesItsName) {
  StartServer();
  const std::vector<float> values(1 << 20, 1.5f);
  ASSERT_TRUE(server_->Put("big", v1::DTYPE_F32, {1 << 20}, values).ok());
  grpc::ClientContext context;
  v1::DownloadRequest request;
  request.set_name("big");
  auto reader = server_->buffers().Download(&context, request);
  v1::DownloadResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.buffer().name(), "big");
  std::size_t received = response.data().size();
  ASSERT_TRUE(Delete("big").ok());
  while (reader->Read(&response)) {
    EXPECT_FALSE(response.has_buffer());
    received += response.data().size();
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(received, std::size_t{4} << 20);
  EXPECT_TRUE(Eventually([&] { return server_->used_bytes() == Charged(12); }));
}

TEST_F(FaultTest, AbandonedDownloadGivesItsBufferBack) {
  StartServer();
  const std::vector<float> values(1 << 20, 1.5f);
  ASSERT_TRUE(server_->Put("big", v1::DTYPE_F32, {1 << 20}, values).ok());
  {
    grpc::ClientContext context;
    v1::DownloadRequest request;
    request.set_name("big");
    auto reader = server_->buffers().Download(&context, request);
    v1::DownloadResponse response;
    ASSERT_TRUE(reader->Read(&response));
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
  }
  ASSERT_TRUE(Delete("big").ok());
  EXPECT_TRUE(Eventually([&] { return server_->used_bytes() == Charged(12); }));
}

// --- The device ---------------------------------------------------------------------------------

TEST_F(FaultTest, DeviceOutOfMemory) {
  StartServer();
  const std::map<std::string, std::string> figures = {
      {"requested", "12"}, {"free", "*"}, {"total", "*"}};
  device_->Fail(Step::kAllocate, Kind::kOutOfMemory);
  ExpectError(server_->Put<float>("y", v1::DTYPE_F32, {3}, {1, 2, 3}),
              StatusCode::RESOURCE_EXHAUSTED, "HOST_MEMORY_EXHAUSTED", figures);
  device_->Fail(Step::kAllocate, Kind::kOutOfMemory);
  ExpectError(AddInto("y"), StatusCode::RESOURCE_EXHAUSTED, "HOST_MEMORY_EXHAUSTED", figures);
  EXPECT_EQ(server_->used_bytes(), Charged(12));

  device_->Fail(Step::kScratch, Kind::kOutOfMemory);
  grpc::ClientContext context;
  v1::AddRequest request;
  request.mutable_a()->set_buffer("x");
  request.mutable_b()->set_buffer("x");
  v1::AddResponse response;
  ExpectError(server_->compute().Add(&context, request, &response), StatusCode::RESOURCE_EXHAUSTED,
              "HOST_MEMORY_EXHAUSTED", figures);
  ExpectWorks();
}

// A row of ones times every other element of every other row of "m", which has side x side floats: the
// server keeps a copy of those.
v1::MatmulRequest ProductOfEveryOther(std::int64_t side) {
  v1::MatmulRequest request;
  v1::Tensor& ones = *request.mutable_a()->mutable_tensor();
  ones.set_dtype(v1::DTYPE_F32);
  ones.add_shape(1);
  ones.add_shape(side / 2);
  const std::vector<float> values(static_cast<std::size_t>(side / 2), 1);
  ones.set_data(values.data(), values.size() * sizeof(float));
  request.mutable_b()->set_buffer("m");
  v1::View& every_other = *request.mutable_b()->mutable_view();
  every_other.add_shape(side / 2);
  every_other.add_shape(side / 2);
  every_other.add_strides(2 * side);
  every_other.add_strides(2);
  return request;
}

// What the server keeps of operands is no reason to refuse a call.
TEST_F(FaultTest, ADeviceOutOfMemoryGivesUpWhatItKeepsOfOperands) {
  StartServer();
  constexpr std::int64_t kSide = 256;
  // So many times the same, as bytes.
  const auto row = [](float value) {
    const std::vector<float> values(kSide / 2, value);
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  };
  ASSERT_TRUE(
      server_
          ->Put<float>("m", v1::DTYPE_F32, {kSide, kSide}, std::vector<float>(kSide * kSide, 1.0f))
          .ok());
  const v1::MatmulRequest request = ProductOfEveryOther(kSide);
  const auto multiply = [&] {
    grpc::ClientContext context;
    v1::MatmulResponse response;
    const grpc::Status status = server_->compute().Matmul(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.tensor().data(), row(kSide / 2));
    return response.stats().prepared_bytes();
  };
  const auto multiply_in_program = [&] {
    grpc::ClientContext context;
    v1::ExecuteRequest program;
    *program.add_steps()->mutable_matmul() = request;
    v1::ExecuteResponse response;
    const grpc::Status status = server_->compute().Execute(&context, program, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(response.results_size(), 1);
    EXPECT_EQ(response.results(0).matmul().tensor().data(), row(kSide / 2));
  };
  for (int round = 0; round < 2; ++round) {
    multiply();
    multiply();
    EXPECT_GT(multiply(), 0u);
    ASSERT_GT(server_->Info().prepared_bytes(), 0u);
    device_->Fail(Step::kScratch, Kind::kOutOfMemory);
    if (round == 0) {
      EXPECT_EQ(multiply(), 0u);
    } else {
      multiply_in_program();
    }
    EXPECT_EQ(device_->Relent(Step::kScratch), 0);
    EXPECT_EQ(server_->Info().prepared_bytes(), 0u);
  }
}

TEST_F(FaultTest, FailedCallsOfTheDevice) {
  StartServer();
  const std::map<std::string, std::string> figures = {{"call", "fakeCall(x)"},
                                                      {"error", "fakeErrorInvalidValue"}};
  for (const Step step : {Step::kBegin, Step::kSynchronize}) {
    device_->Fail(step, Kind::kFailed);
    ExpectError(Dot(), StatusCode::INTERNAL, "CUDA_ERROR", figures);
    ExpectWorks();
  }
  device_->Fail(Step::kSynchronize, Kind::kFailed);
  ExpectError(AddInto("y"), StatusCode::INTERNAL, "CUDA_ERROR", figures);
  for (const Step step : {Step::kCopyToDevice, Step::kSynchronize}) {
    device_->Fail(step, Kind::kFailed);
    ExpectError(server_->Put<float>("y", v1::DTYPE_F32, {3}, {1, 2, 3}), StatusCode::INTERNAL,
                "CUDA_ERROR", figures);
  }
  device_->Fail(Step::kCopyToHost, Kind::kFailed);
  std::string data;
  ExpectError(server_->Fetch("x", &data), StatusCode::INTERNAL, "CUDA_ERROR", figures);
  EXPECT_EQ(server_->used_bytes(), Charged(12)) << "no failed upload or result stays";
  EXPECT_FALSE(device_->lost());
  ExpectWorks();
}

// What operators are promised of a loss, used or idle: the health service says so by then. Devices are
// asked five times a second.
constexpr std::chrono::seconds kSoon{1};

TEST_F(FaultTest, LostDeviceEndsTheServer) {
  StartServer();
  EXPECT_EQ(HealthOf(server_->channel(), ""), Serving::kServing);
  EXPECT_EQ(HealthOf(server_->channel(), kCompute), Serving::kServing);
  EXPECT_EQ(HealthOf(server_->channel(), kBuffers), Serving::kServing);
  EXPECT_EQ(HealthOf(server_->channel(), "unknown"), Serving::kUnknown);

  device_->Close(Step::kBegin);
  auto first = DotAsync();
  device_->WaitForBlocked(1);
  auto queued = DotAsync();
  WaitForQueued();
  device_->Fail(Step::kBegin, Kind::kLost);
  const auto begin = std::chrono::steady_clock::now();
  device_->Open();
  EXPECT_EQ(server_->server().Wait(), Server::Reason::kDevicesLost);
  for (const char* service : {"", kCompute, kBuffers}) {
    EXPECT_EQ(HealthOf(server_->channel(), service), Serving::kNotServing) << service;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
  ExpectError(first.get(), StatusCode::UNAVAILABLE, "DEVICE_LOST",
              {{"device", "fake:0"}, {"error", "fakeErrorIllegalAddress"}});
  ExpectError(queued.get(), StatusCode::UNAVAILABLE, "DEVICE_LOST", {{"device", "fake:0"}});
  ExpectError(server_->Put<float>("y", v1::DTYPE_F32, {1}, {1}), StatusCode::UNAVAILABLE,
              "DEVICE_LOST", {{"device", "fake:0"}});
  std::string data;
  EXPECT_FALSE(server_->Fetch("x", &data).ok()) << "it goes with its device";
  server_->server().Drain();
}

TEST_F(FaultTest, ADeviceThatIsLostWhileIdleIsNoticedWithoutACall) {
  StartServer();
  device_->Fail(Step::kProbe, Kind::kFailed);  // which is no loss
  const int asked = device_->Count(Step::kProbe);
  ASSERT_TRUE(Eventually([&] { return device_->Count(Step::kProbe) > asked + 1; }));
  EXPECT_EQ(HealthOf(server_->channel(), kCompute), Serving::kServing);
  const auto begin = std::chrono::steady_clock::now();
  device_->Fail(Step::kProbe, Kind::kLost);
  EXPECT_EQ(server_->server().Wait(), Server::Reason::kDevicesLost);
  EXPECT_EQ(HealthOf(server_->channel(), kCompute), Serving::kNotServing);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
  server_->server().Drain();
}

// The longest that a test's operations may take, and with it when a device hangs.
Options Impatient() {
  Options options = OneWorker(8);
  options.watchdog = absl::Milliseconds(100);
  options.max_operation_seconds = options.max_slow_operation_seconds = 0.1;
  return options;
}

TEST_F(FaultTest, ADeviceThatHangsIsLost) {
  StartServer(Impatient());
  device_->Close(Step::kBegin);
  auto running = DotAsync();
  device_->WaitForBlocked(1);
  auto queued = DotAsync();
  EXPECT_TRUE(AwaitEnd());
  for (const char* service : {"", kCompute, kBuffers}) {
    EXPECT_EQ(HealthOf(server_->channel(), service), Serving::kNotServing) << service;
  }
  EXPECT_EQ(queued.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  device_->Open();
  ExpectError(queued.get(), StatusCode::UNAVAILABLE, "DEVICE_LOST", {{"device", "fake:0"}});
  ExpectError(server_->Put<float>("y", v1::DTYPE_F32, {1}, {1}), StatusCode::UNAVAILABLE,
              "DEVICE_LOST", {{"device", "fake:0"}});
  running.get();
  server_->server().Drain();
}

TEST_F(FaultTest, MemoryThatIsNeverGivenEndsTheServer) {
  StartServer(Impatient());
  device_->Close(Step::kAllocate);
  auto creating = std::async(std::launch::async, [&] {
    return server_->Put<float>("y", v1::DTYPE_F32, {1 << 20}, std::vector<float>(1 << 20)).ok();
  });
  device_->WaitForBlocked(1);
  EXPECT_TRUE(AwaitEnd());
  EXPECT_EQ(HealthOf(server_->channel(), ""), Serving::kNotServing);
  EXPECT_TRUE(server_->server().devices_lost());
  device_->Open();
  creating.get();
  server_->server().Drain();
}

TEST_F(FaultTest, AWorkerThatIsBusyForLongIsNotReadyUntilItIsFree) {
  Options options = Impatient();
  options.max_slow_operation_seconds = 3600;
  StartServer(options);
  device_->Close(Step::kBegin);
  auto running = DotAsync();
  EXPECT_TRUE(
      Eventually([&] { return HealthOf(server_->channel(), kCompute) == Serving::kNotServing; }));
  EXPECT_EQ(HealthOf(server_->channel(), ""), Serving::kServing);
  device_->Open();
  // It had been told to stop before.
  ExpectError(running.get(), StatusCode::FAILED_PRECONDITION, "OPERATION_TOO_LONG",
              {{"limit_seconds", "0.1"}});
  EXPECT_TRUE(
      Eventually([&] { return HealthOf(server_->channel(), kCompute) == Serving::kServing; }));
}

// That holds while it is within its time limit and can be told to stop.
TEST_F(FaultTest, AnOperationThatTakesLongIsNobodysFault) {
  Options options = Impatient();
  options.max_operation_seconds = 3600;
  StartServer(options);
  device_->Close(Step::kBegin);
  auto running = DotAsync();
  device_->WaitForBlocked(1);
  const int asked = device_->Count(Step::kProbe);
  for (int i = 0; i < 10; ++i) {
    AdvanceSteadyNow(absl::Milliseconds(500));
    absl::SleepFor(
        absl::Milliseconds(60));  // a jump of more than a second would count as an absence
  }
  EXPECT_TRUE(Eventually([&] { return device_->Count(Step::kProbe) > asked + 1; }));
  EXPECT_EQ(HealthOf(server_->channel(), kCompute), Serving::kServing);
  device_->Open();
  EXPECT_TRUE(running.get().ok());
}

// While it is, the clock goes on. Calls and uploads that it interrupts go on afterwards.
TEST_F(FaultTest, TimeInWhichTheProcessWasStoppedIsNobodysFault) {
  Options options = OneWorker(8);
  options.watchdog = absl::Seconds(10);
  options.max_operation_seconds = 1;
  StartServer(options);
  // Returns when the server has looked at everything since the call.
  const auto await_turn = [&] {
    for (int i = 0; i < 2; ++i) {
      grpc::ClientContext context;
      v1::UploadResponse response;
      auto writer = server_->buffers().Upload(&context, &response);
      v1::UploadRequest message;
      message.set_name("moment");
      message.mutable_spec()->set_dtype(v1::DTYPE_F32);
      message.mutable_spec()->mutable_ttl()->set_nanos(1);
      message.set_data("abcd");
      writer->Write(message);
      writer->WritesDone();
      ASSERT_TRUE(writer->Finish().ok());
      ASSERT_TRUE(Eventually([&] { return server_->used_bytes() == Charged(12) + Charged(8); }));
    }
  };
  grpc::ClientContext context;
  v1::UploadResponse uploaded;
  auto writer = server_->buffers().Upload(&context, &uploaded);
  v1::UploadRequest message;
  message.set_name("slow");
  message.mutable_spec()->set_dtype(v1::DTYPE_F32);
  message.mutable_spec()->add_shape(2);
  message.set_data("abcd");
  writer->Write(message);
  ASSERT_TRUE(Eventually([&] { return server_->used_bytes() == Charged(12) + Charged(8); }));
  device_->Close(Step::kBegin);
  auto running = DotAsync();
  device_->WaitForBlocked(1);
  for (int i = 0; i < 2; ++i) {
    await_turn();
    AdvanceSteadyNow(absl::Hours(1000));
    await_turn();
    EXPECT_EQ(HealthOf(server_->channel(), kCompute), Serving::kServing);
    EXPECT_FALSE(device_->lost());
  }
  message.Clear();
  message.set_data("efgh");
  writer->Write(message);
  writer->WritesDone();
  EXPECT_TRUE(writer->Finish().ok());
  // What the worker takes while the process runs counts.
  EXPECT_TRUE(Eventually([&] {
    AdvanceSteadyNow(absl::Milliseconds(100));
    return HealthOf(server_->channel(), kCompute) == Serving::kNotServing;
  }));
  device_->Open();
  EXPECT_EQ(running.get().error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(
      Eventually([&] { return HealthOf(server_->channel(), kCompute) == Serving::kServing; }));
  // So does the whole of what begins later.
  device_->Close(Step::kBegin);
  running = DotAsync();
  device_->WaitForBlocked(1);
  EXPECT_TRUE(Eventually([&] {
    AdvanceSteadyNow(absl::Milliseconds(100));
    return HealthOf(server_->channel(), kCompute) == Serving::kNotServing;
  }));
  device_->Open();
  EXPECT_EQ(running.get().error_code(), StatusCode::FAILED_PRECONDITION);
}

class TwoFaultyDevicesTest : public FaultTest {
 protected:
  void StartServer(const Options& options = TestOptions()) {
    std::vector<std::unique_ptr<Device>> devices = TwoDevices();
    device_ = static_cast<FakeDevice*>(devices[0].get());
    second_ = static_cast<FakeDevice*>(devices[1].get());
    server_ = std::make_unique<TestServer>(options, std::move(devices));
  }
  void TearDown() override {
    FaultTest::TearDown();
    if (second_ != nullptr) second_->Open();
  }

  FakeDevice* second_ = nullptr;
};

TEST_F(TwoFaultyDevicesTest, OneThatDoesNotAnswerHidesNoLossOfTheOther) {
  Options options = TestOptions();
  options.watchdog = absl::Milliseconds(100);
  StartServer(options);
  device_->Close(Step::kProbe);
  device_->WaitForBlocked(1);
  EXPECT_TRUE(
      Eventually([&] { return HealthOf(server_->channel(), kCompute) == Serving::kNotServing; }));
  second_->Fail(Step::kProbe, Kind::kLost);
  EXPECT_TRUE(Eventually([&] { return server_->Info(1).lost(); }));
  EXPECT_EQ(HealthOf(server_->channel(), ""), Serving::kServing);
  device_->Open();
  EXPECT_TRUE(
      Eventually([&] { return HealthOf(server_->channel(), kCompute) == Serving::kServing; }));
}

TEST_F(TwoFaultyDevicesTest, OneThatHangsIsLostAndTheOtherServes) {
  StartServer(Impatient());
  ASSERT_TRUE(server_->Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}, false, "fake:1").ok());
  device_->Close(Step::kProbe);
  EXPECT_TRUE(Eventually([&] { return server_->Info(0).lost(); }));
  EXPECT_TRUE(
      Eventually([&] { return HealthOf(server_->channel(), kCompute) == Serving::kServing; }));
  ExpectWorks();
  second_->Close(Step::kProbe);
  EXPECT_TRUE(AwaitEnd());
  device_->Open();
  second_->Open();
  server_->server().Drain();
}

TEST_F(TwoFaultyDevicesTest, MemoryThatCannotBeFreedHidesNoLoss) {
  StartServer();
  constexpr std::int64_t kSide = 256;
  ASSERT_TRUE(
      server_->Put("m", v1::DTYPE_F32, {kSide, kSide}, std::vector<float>(kSide * kSide)).ok());
  for (int i = 0; i < 3; ++i) {
    grpc::ClientContext context;
    v1::MatmulResponse response;
    ASSERT_TRUE(server_->compute().Matmul(&context, ProductOfEveryOther(kSide), &response).ok());
  }
  ASSERT_GT(server_->Info().prepared_bytes(), 0u);
  device_->Close(Step::kFree);
  device_->MarkLost();
  device_->WaitForBlocked(1);
  second_->Fail(Step::kProbe, Kind::kLost);
  EXPECT_TRUE(AwaitEnd());
  device_->Open();
  server_->server().Drain();
}

TEST_F(TwoFaultyDevicesTest, CallsThatHangWithOneDoNotStopTheOther) {
  constexpr int kCalls = 12;
  StartServer();
  device_->Close(Step::kAllocate);
  std::vector<std::future<grpc::Status>> blocked;
  for (int i = 0; i < kCalls; ++i) {
    blocked.push_back(std::async(std::launch::async, [&, i] {
      return server_->Put<float>("x" + std::to_string(i), v1::DTYPE_F32, {3}, {1, 2, 3});
    }));
  }
  device_->WaitForBlocked(4);
  auto other = std::async(std::launch::async, [&] {
    return server_->Put<float>("y", v1::DTYPE_F32, {3}, {1, 2, 3}, false, "fake:1");
  });
  EXPECT_EQ(other.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(device_->Count(Step::kAllocate), kCalls);
  device_->Open();
  EXPECT_TRUE(other.get().ok());
  for (auto& put : blocked) EXPECT_TRUE(put.get().ok());
}

TEST_F(FaultTest, TheServerStopsWhenItHasLostItsLastDevice) {
  std::vector<std::unique_ptr<Device>> devices = TwoDevices();
  const Device &first = *devices[0], &second = *devices[1];
  TestServer server(TestOptions(), std::move(devices));
  ASSERT_TRUE(server.Put<float>("b", v1::DTYPE_F32, {1}, {2}, false, "fake:1").ok());
  first.MarkLost();
  ASSERT_TRUE(Eventually([&] { return server.Info(0).lost(); }));
  EXPECT_EQ(HealthOf(server.channel(), kCompute), Serving::kServing);
  std::string data;
  EXPECT_TRUE(server.Fetch("b", &data).ok());
  second.MarkLost();
  EXPECT_EQ(server.server().Wait(), Server::Reason::kDevicesLost);
  EXPECT_EQ(HealthOf(server.channel(), kCompute), Serving::kNotServing);
  server.server().Drain();
}

// --- The end ------------------------------------------------------------------------------------

TEST_F(FaultTest, DrainFinishesWhatWasAcceptedAndSendsClientsAway) {
  Options options = OneWorker(8);
  options.listen = {"127.0.0.1:0"};
  StartServer(options);
  // Over a socket: connections inside the process know no farewell.
  const auto dial = [&] {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    return grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(),
                                     arguments);
  };
  const auto dot = [](const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    v1::DotRequest request;
    request.mutable_a()->set_buffer("x");
    request.mutable_b()->set_buffer("x");
    v1::DotResponse response;
    return v1::ComputeService::NewStub(channel)->Dot(&context, request, &response);
  };
  auto busy = dial();
  auto idle = dial();
  ASSERT_TRUE(dot(idle).ok());
  device_->Close(Step::kBegin);
  auto running = std::async(std::launch::async, dot, busy);
  device_->WaitForBlocked(1);
  auto queued = std::async(std::launch::async, dot, busy);
  WaitForQueued();
  auto buffers = v1::BufferService::NewStub(busy);
  grpc::ClientContext upload_context;
  v1::UploadResponse uploaded;
  auto writer = buffers->Upload(&upload_context, &uploaded);
  v1::UploadRequest message;
  message.set_name("slow");
  message.mutable_spec()->set_dtype(v1::DTYPE_F32);
  message.mutable_spec()->add_shape(2);
  message.set_data("abcd");
  writer->Write(message);
  ASSERT_TRUE(Eventually([&] { return server_->used_bytes() == Charged(12) + Charged(8); }));

  server_->server().RequestStop();
  EXPECT_EQ(server_->server().Wait(), Server::Reason::kStopRequested);
  auto drained = std::async(std::launch::async, [&] { server_->server().Drain(); });
  EXPECT_TRUE(Eventually([&] { return idle->GetState(false) != GRPC_CHANNEL_READY; }));
  EXPECT_TRUE(Eventually([&] { return busy->GetState(false) != GRPC_CHANNEL_READY; }));
  for (const auto& channel : {idle, busy, dial()}) {
    EXPECT_EQ(dot(channel).error_code(), StatusCode::UNAVAILABLE);
  }
  device_->Open();
  EXPECT_TRUE(running.get().ok());
  EXPECT_TRUE(queued.get().ok());
  message.Clear();
  message.set_data("efgh");
  writer->Write(message);
  writer->WritesDone();
  EXPECT_TRUE(writer->Finish().ok());
  drained.get();
}

TEST(Admission, RefusesWhoComesAfterTheEndHasBegun) {
  Admission admission;
  {
    auto ticket = admission.Enter();
    ASSERT_TRUE(ticket.ok());
    admission.Close();
    const absl::Status refused = admission.Enter().status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(ErrorReason(refused), "DRAINING");
    EXPECT_FALSE(admission.WaitIdle(absl::ZeroDuration()));
  }
  EXPECT_TRUE(admission.WaitIdle(absl::ZeroDuration()));
}

// Whether it ends before the wait begins or after that.
TEST(Admission, TheWaitEndsWithTheLastCall) {
  const absl::Time give_up = absl::Now() + absl::Seconds(30);
  for (int us = 0; us < 200 && absl::Now() < give_up; ++us) {
    Admission admission;
    auto ticket = admission.Enter();
    ASSERT_TRUE(ticket.ok());
    admission.Close();
    std::thread caller([&] {
      absl::SleepFor(absl::Microseconds(us));
      ticket = absl::CancelledError();
    });
    EXPECT_TRUE(admission.WaitIdle(absl::Minutes(1)));
    caller.join();
  }
  EXPECT_LT(absl::Now(), give_up);
}

// A client that watches the health service would stay for ever.
TEST_F(FaultTest, DrainDoesNotWaitForWatchers) {
  Options options = OneWorker(8);
  options.listen = {"127.0.0.1:0"};
  options.drain_timeout = absl::Minutes(10);
  StartServer(options);
  grpc::GenericStub stub(
      grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  struct Watcher : grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
    void OnReadDone(bool ok) override {
      if (ok) heard.set_value();
    }
    void OnDone(const grpc::Status&) override { ended.set_value(); }
    std::promise<void> heard;
    std::promise<void> ended;
  } watcher;
  grpc::Slice slice("");
  grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  stub.PrepareBidiStreamingCall(&context, "/grpc.health.v1.Health/Watch", grpc::StubOptions(),
                                &watcher);
  watcher.StartWriteLast(&request, grpc::WriteOptions());
  watcher.StartRead(&response);
  watcher.StartCall();
  watcher.heard.get_future().get();
  const auto begin = std::chrono::steady_clock::now();
  server_->server().Drain();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  watcher.ended.get_future().get();
}

TEST_F(FaultTest, DrainDelayKeepsServing) {
  Options options = OneWorker(8);
  options.drain_delay = absl::Hours(1);
  StartServer(options);
  auto drained = std::async(std::launch::async, [&] { server_->server().Drain(); });
  EXPECT_TRUE(Eventually([&] {
    return HealthOf(server_->channel(), kCompute) == Serving::kNotServing &&
           HealthOf(server_->channel(), kBuffers) == Serving::kNotServing;
  }));
  ExpectWorks();
  device_->MarkLost();  // which ends the delay
  drained.get();
}

TEST_F(FaultTest, DrainTimeoutCancelsWhatIsLeft) {
  Options options = OneWorker(8);
  options.drain_timeout = absl::Milliseconds(100);
  StartServer(options);
  grpc::ClientContext context;
  v1::UploadResponse uploaded;
  auto writer = server_->buffers().Upload(&context, &uploaded);
  v1::UploadRequest message;
  message.set_name("slow");
  message.mutable_spec()->set_dtype(v1::DTYPE_F32);
  message.mutable_spec()->add_shape(2);
  writer->Write(message);
  ASSERT_TRUE(Eventually([&] { return server_->used_bytes() == Charged(12) + Charged(8); }));
  server_->server().Drain();  // or it would not end
  EXPECT_FALSE(writer->Finish().ok());
}

// --- The process --------------------------------------------------------------------------------

class Process {
 public:
  Process(const std::string& name, std::vector<std::string> arguments)
      : log_(testing::TempDir() + "/fault_test_" + name + "_" + std::to_string(getpid()) + ".log") {
    arguments.insert(arguments.begin(), TESSERA_SERVER);
    arguments.insert(arguments.end(), {"--device", "cpu", "--memory-limit", "64Mi"});
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 2, log_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    EXPECT_EQ(posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Process() {
    if (!ended_) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    unlink(log_.c_str());
  }

  bool WaitForLog(const std::string& text) {
    for (int i = 0; i < 1000; ++i) {
      if (log().find(text) != std::string::npos) return true;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return false;
  }
  void Signal(int signal) { kill(pid_, signal); }
  // The exit code; -1 when it was killed or does not end.
  int Wait(absl::Duration timeout = absl::Seconds(20)) {
    for (const absl::Time end = absl::Now() + timeout; absl::Now() < end;) {
      int status = 0;
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        ended_ = true;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
    return -1;
  }
  std::string log() {
    std::ostringstream text;
    text << std::ifstream(log_).rdbuf();
    return text.str();
  }

 private:
  const std::string log_;
  pid_t pid_ = -1;
  bool ended_ = false;
};

std::string SocketPath(const std::string& name) {
  return testing::TempDir() + "/tessera_" + name + "_" + std::to_string(getpid()) + ".sock";
}

TEST(ProcessTest, StopsOnSignalsUnderLoadWithoutAFailedCall) {
  for (const int signal : {SIGTERM, SIGINT}) {
    const std::string path = SocketPath("stop");
    Process server("stop", {"--listen", "unix:" + path, "--drain-delay", "2s"});
    ASSERT_TRUE(server.WaitForLog("listening on")) << server.log();
    std::atomic<bool> stop{false};
    std::atomic<int> calls{0};
    std::atomic<int> failed{0};
    std::vector<std::thread> callers;
    for (int t = 0; t < 4; ++t) {
      callers.emplace_back([&] {
        auto stub = v1::ComputeService::NewStub(
            grpc::CreateChannel("unix:" + path, grpc::InsecureChannelCredentials()));
        v1::DotRequest request;
        request.mutable_a()->mutable_tensor()->set_dtype(v1::DTYPE_F32);
        request.mutable_a()->mutable_tensor()->set_data("abcd");
        *request.mutable_b() = request.a();
        while (!stop) {
          grpc::ClientContext context;
          v1::DotResponse response;
          ++calls;
          if (!stub->Dot(&context, request, &response).ok()) ++failed;
        }
      });
    }
    EXPECT_TRUE(Eventually([&] { return calls >= 100; }));
    const auto watcher = grpc::CreateChannel("unix:" + path, grpc::InsecureChannelCredentials());
    server.Signal(signal);
    // A client that watches the health service leaves within the drain delay.
    EXPECT_TRUE(Eventually([&] { return HealthOf(watcher, kCompute) == Serving::kNotServing; }));
    stop = true;
    for (std::thread& caller : callers) caller.join();
    EXPECT_EQ(server.Wait(), 0) << server.log();
    EXPECT_EQ(failed, 0);
    EXPECT_NE(access(path.c_str(), F_OK), 0) << "the socket file is gone";
  }
}

TEST(ProcessTest, SecondSignalStopsAtOnce) {
  const std::string path = SocketPath("second");
  Process server("second", {"--listen", "unix:" + path, "--drain-delay", "1h"});
  ASSERT_TRUE(server.WaitForLog("listening on")) << server.log();
  server.Signal(SIGTERM);
  ASSERT_TRUE(server.WaitForLog("draining"));
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(absl::Seconds(5)), 128 + SIGTERM);
  EXPECT_NE(access(path.c_str(), F_OK), 0);
}

TEST(ProcessTest, AddressInUse) {
  const std::string path = SocketPath("taken");
  Process first("first", {"--listen", "127.0.0.1:0", "--listen", "unix:" + path});
  ASSERT_TRUE(first.WaitForLog("listening on unix:")) << first.log();
  const std::string log = first.log();
  const std::string key = "listening on 127.0.0.1:";
  const std::size_t at = log.find(key);
  ASSERT_NE(at, log.npos);
  const std::string port = log.substr(at + key.size(), log.find('\n', at) - at - key.size());
  EXPECT_NE(port, "0");

  Process same_port("same_port", {"--listen", "127.0.0.1:" + port});
  EXPECT_EQ(same_port.Wait(), 1);
  EXPECT_THAT(same_port.log(), HasSubstr("cannot listen on 127.0.0.1:" + port));
  Process same_path("same_path", {"--listen", "unix:" + path});
  EXPECT_EQ(same_path.Wait(), 1);
  EXPECT_THAT(same_path.log(), HasSubstr("cannot listen on unix:" + path));
  EXPECT_EQ(access(path.c_str(), F_OK), 0) << "the first one's socket is untouched";

  first.Signal(SIGKILL);
  EXPECT_EQ(first.Wait(), -1);
  Process next("next", {"--listen", "unix:" + path});
  EXPECT_TRUE(next.WaitForLog("listening on")) << "a dead server's socket file is no obstacle";
  next.Signal(SIGTERM);
  EXPECT_EQ(next.Wait(), 0);
}

enum class End { kFailure, kLossOfWhatHangs, kHang, kLossInDrain };

// In a process of its own, which says nothing.
[[noreturn]] void ServeOnADeviceThatIsLost(End end) {
  const bool hangs = end == End::kLossOfWhatHangs || end == End::kHang;
  SetUpLog("off", false);
  auto device = std::make_unique<FakeDevice>();
  FakeDevice* fake = device.get();
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::move(device));
  Options options = end == End::kHang ? Impatient() : TestOptions();
  options.listen = {"unix:" + SocketPath("lost")};
  if (end == End::kLossInDrain) options.drain_delay = absl::Seconds(20);
  if (hangs) fake->Close(Step::kBegin);
  std::thread([fake, hangs, end, address = options.listen[0]] {
    auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
    channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10));
    if (end == End::kLossInDrain) {
      kill(getpid(), SIGTERM);
      if (!Eventually([&] { return HealthOf(channel, kCompute) == Serving::kNotServing; }))
        std::_Exit(1);
      fake->MarkLost();
      std::this_thread::sleep_for(std::chrono::seconds(60));
    }
    if (!hangs) fake->Fail(Step::kBegin, Kind::kLost);
    auto stub = v1::ComputeService::NewStub(channel);
    v1::DotRequest request;
    request.mutable_a()->mutable_tensor()->set_dtype(v1::DTYPE_F32);
    request.mutable_a()->mutable_tensor()->set_data("abcd");
    *request.mutable_b() = request.a();
    std::thread caller([&] {
      grpc::ClientContext context;
      v1::DotResponse response;
      const grpc::Status status = stub->Dot(&context, request, &response);
      if (!hangs && DetailsOf(status).reason != "DEVICE_LOST") std::_Exit(1);
    });
    if (end == End::kLossOfWhatHangs) {
      fake->WaitForBlocked(1);
      fake->MarkLost();
    }
    std::this_thread::sleep_for(std::chrono::seconds(60));
    std::_Exit(1);
  }).detach();
  std::_Exit(Serve(options, std::move(devices)));
}

TEST(ProcessDeathTest, LostDeviceEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(ServeOnADeviceThatIsLost(End::kFailure), testing::ExitedWithCode(kExitDeviceLost),
              "");
}

TEST(ProcessDeathTest, LostDeviceThatNeverAnswersEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(ServeOnADeviceThatIsLost(End::kLossOfWhatHangs),
              testing::ExitedWithCode(kExitDeviceLost), "");
}

TEST(ProcessDeathTest, AKernelThatHangsEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(ServeOnADeviceThatIsLost(End::kHang), testing::ExitedWithCode(kExitDeviceLost), "");
}

TEST(ProcessDeathTest, ADeviceThatIsLostInADrainShowsInTheExitCode) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(ServeOnADeviceThatIsLost(End::kLossInDrain), testing::ExitedWithCode(kExitDeviceLost),
              "");
}

TEST(ProcessTest, OneDeviceTwice) {
  Process server("twice", {"--listen", "127.0.0.1:0", "--device", "cpu"});
  EXPECT_EQ(server.Wait(), 1);
  EXPECT_THAT(server.log(), HasSubstr("named twice"));
}

TEST(ProcessTest, BadDeviceAndJsonLog) {
  Process server("bad_device",
                 {"--listen", "127.0.0.1:0", "--device", "q\"uote", "--log-format", "json"});
  EXPECT_EQ(server.Wait(), 1);
  EXPECT_THAT(server.log(), HasSubstr("\"level\":\"error\""));
  EXPECT_THAT(server.log(), HasSubstr("q\\\"uote"));
}

}  // namespace
}  // namespace tessera
