// What the server does when things around it go wrong: devices that fail, stall and die, callers
// that leave, a full queue, a stop in the middle of work.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <future>

#include "grpc/health/v1/health.grpc.pb.h"
#include "server/clock.h"
#include "server/process.h"
#include "tests/test_server.h"

namespace tessera {
namespace {

using grpc::StatusCode;
using grpc::health::v1::HealthCheckResponse;
using Step = FakeDevice::Step;
using Kind = DeviceError::Kind;

void OneWorker(Options& options) {
  options.workers = 1;
  options.queue = 8;
  options.drain_timeout = absl::Seconds(10);
}

// Sets the longest time that a test's operations may take, which also decides when a device hangs.
// That takes more than a second, because the server does not notice that the process was stopped
// for less than that.
void Impatient(Options& options) {
  options.watchdog = absl::Milliseconds(700);
  options.max_operation_seconds = 0.1;
}

constexpr char kCompute[] = "tessera.v1.ComputeService";
constexpr char kBuffers[] = "tessera.v1.BufferService";

// Returns UNKNOWN if the server does not know the service.
HealthCheckResponse::ServingStatus HealthOf(const std::shared_ptr<grpc::Channel>& channel,
                                            const std::string& service) {
  grpc::ClientContext context;
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  HealthCheckResponse response;
  const auto stub = grpc::health::v1::Health::NewStub(channel);
  return stub->Check(&context, request, &response).ok() ? response.status()
                                                        : HealthCheckResponse::UNKNOWN;
}

class FaultTest : public testing::Test {
 protected:
  template <class... Changes>
  void StartServer(const Changes&... changes) {
    Options options = With(OneWorker);
    (changes(options), ...);
    device_ = new FakeDevice;
    server_ = std::make_unique<TestServer>(options, Only(device_));
    ASSERT_TRUE(server_->Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
  }
  void TearDown() override {
    if (device_ != nullptr) device_->Open();
  }

  grpc::Status Dot(double* value = nullptr) {
    v1::DotResponse response;
    const grpc::Status status = server_->Call(dot_, &response);
    if (value != nullptr) *value = response.value().real();
    return status;
  }
  std::future<grpc::Status> DotAsync(double* value = nullptr) {
    return std::async(std::launch::async, [this, value] { return Dot(value); });
  }
  // Like DotAsync, but the device blocks the call until the device is opened.
  std::future<grpc::Status> HoldWorker(double* value = nullptr) {
    device_->Close(Step::kBegin);
    auto held = DotAsync(value);
    device_->WaitForBlocked(1);
    return held;
  }
  // Makes a resident buffer with the sum x + x.
  grpc::Status AddInto(const std::string& name) {
    auto request = Of<v1::AddRequest>("a { buffer: 'x' } b { buffer: 'x' }");
    request.mutable_result()->mutable_buffer()->set_name(name);
    return server_->Call(request);
  }
  grpc::Status Delete(const std::string& name) {
    v1::DeleteBufferRequest request;
    request.set_name(name);
    return server_->Call(request);
  }
  // Stores 256 x 256 ones as "m".
  void PutMatrix() {
    const std::vector<float> ones(256 * 256, 1);
    ASSERT_TRUE(server_->Put<float>("m", v1::DTYPE_F32, {256, 256}, ones).ok());
  }
  void ExpectNothingServes() {
    for (const char* service : {"", kCompute, kBuffers}) EXPECT_FALSE(IsServing(service));
  }
  bool IsServing(const std::string& service = kCompute) {
    return HealthOf(server_->channel(), service) == HealthCheckResponse::SERVING;
  }

  void ExpectWorks() {
    double value = 0;
    const grpc::Status status = Dot(&value);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(value, 14);
  }

  // Waits until one operation is waiting for the worker.
  void WaitForQueued() {
    ASSERT_TRUE(Eventually([&] { return server_->Info().waiting() == 1; }));
  }

  // Returns whether the server ends because it has lost all its devices.
  bool AwaitEnd() {
    auto end = std::async(std::launch::async, [&] { return server_->server().Wait(); });
    const bool ends = end.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    if (!ends) server_->server().RequestStop();
    return end.get() == Server::Reason::kDevicesLost;
  }

  const v1::DotRequest dot_ = Of<v1::DotRequest>("a { buffer: 'x' } b { buffer: 'x' }");
  FakeDevice* device_ = nullptr;  // Owned by the server.
  std::unique_ptr<TestServer> server_;
};

// A stream that uploads one half of the buffer "slow", and the other half on demand.
class SlowUpload {
 public:
  SlowUpload(TestServer& server, const std::shared_ptr<grpc::Channel>& channel)
      : stub_(v1::BufferService::NewStub(channel)), upload_(*stub_) {
    const std::uint64_t before = server.used_bytes();
    upload_.Write(
        Of<v1::UploadRequest>("name: 'slow' spec { dtype: DTYPE_F32 shape: 2 } data: 'abcd'"));
    EXPECT_TRUE(Eventually([&] { return server.used_bytes() == before + Charged(8); }));
  }
  grpc::Status Finish() {
    upload_.Write(Of<v1::UploadRequest>("data: 'efgh'"));
    return upload_.Finish();
  }

 private:
  const std::unique_ptr<v1::BufferService::Stub> stub_;
  UploadStream upload_;
};

// --- The queue ----------------------------------------------------------------------------------

TEST_F(FaultTest, CallsThatEndWhileTheyWaitNeverReachTheDevice) {
  StartServer();
  auto first = HoldWorker();
  for (const bool cancel : {false, true}) {
    grpc::ClientContext context;
    if (!cancel) context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(50)));
    auto second = std::async(std::launch::async, [&] {
      grpc::ByteBuffer response;
      return server_->Call(dot_, &response, context);
    });
    if (cancel) {
      WaitForQueued();
      context.TryCancel();
    }
    EXPECT_EQ(second.get().error_code(),
              cancel ? StatusCode::CANCELLED : StatusCode::DEADLINE_EXCEEDED);
    EXPECT_TRUE(Eventually([&] { return server_->Info().waiting() == 0; })) << "its place is free";
  }
  device_->Open();
  EXPECT_TRUE(first.get().ok());
  ExpectWorks();
  EXPECT_EQ(device_->Count(Step::kBegin), 2);
}

// Short operations also run on the thread that receives them. A worker that has run an operation
// reports slightly late that it is idle.
TEST_F(FaultTest, ShortProgramsRunOnTheThreadThatReceivesThem) {
  StartServer();
  ASSERT_TRUE(server_->Put("wide", v1::DTYPE_F32, {1 << 19}, std::vector<float>(1 << 19)).ok());
  // Runs that many sums, each of the previous result. first: the operands of the first sum; more:
  // fields of all steps.
  const auto run = [&](int steps, const std::string& first = "buffer: 'x'",
                       const std::string& more = "") {
    std::string text;
    for (int i = 0; i < steps; ++i) {
      const std::string operand = i == 0 ? first : absl::StrCat("step: ", i - 1);
      absl::StrAppend(&text, "steps { add { a { ", operand, " } b { ", operand,
                      " } result { scratch: true } ", more, " } } ");
    }
    absl::StrAppend(&text, "steps { reduce { op: REDUCE_OP_SUM x { step: ", steps - 1, " } } }");
    const v1::StepResult last =
        server_->Good<v1::ExecuteResponse>(Of<v1::ExecuteRequest>(text)).results(steps);
    EXPECT_FALSE(last.has_error()) << last.error().message();
    if (first == "buffer: 'x'") {
      EXPECT_EQ(last.reduce().value().real(), 6 * (1 << steps));
    }
    return device_->ThreadOf(Step::kBegin);
  };
  const std::thread::id worker = run(1, "buffer: 'x'", "strategy: 'cpu'");
  EXPECT_TRUE(Eventually([&] { return run(2) != worker; }));
  EXPECT_TRUE(Eventually([&] { return run(15) != worker; }));
  EXPECT_EQ(run(16), worker) << "too many steps";
  EXPECT_EQ(run(1, "buffer: 'wide'"), worker);
  EXPECT_EQ(run(2, "buffer: 'x' view { shape: [1024, 1024] strides: [0, 0] }"), worker)
      << "the view is large";
  EXPECT_EQ(run(1, "buffer: 'x'", "timing: true"), worker) << "it is timed";
}

// --- Memory in use ------------------------------------------------------------------------------

TEST_F(FaultTest, ReplacedAndDeletedOperandsStayUntilTheirUsersEnd) {
  StartServer();
  double old_value = 0;
  auto running = HoldWorker(&old_value);
  ASSERT_TRUE(server_->Put<float>("x", v1::DTYPE_F32, {2}, {10, 20}, true).ok());
  std::string data;
  EXPECT_TRUE(server_->Fetch("x", &data).ok()) << "transfers do not wait for operations";
  EXPECT_EQ(data.size(), 8u);
  EXPECT_EQ(server_->used_bytes(), Charged(12) + Charged(8)) << "both are in memory";
  double new_value = 0;
  auto queued = DotAsync(&new_value);
  WaitForQueued();
  ASSERT_TRUE(Delete("x").ok());
  ExpectError(Dot(), "BUFFER_NOT_FOUND", {{"name", "x"}});
  EXPECT_EQ(server_->used_bytes(), Charged(12) + Charged(8));
  device_->Open();
  EXPECT_TRUE(running.get().ok());
  EXPECT_EQ(old_value, 14);
  EXPECT_TRUE(queued.get().ok());
  EXPECT_EQ(new_value, 500);
  EXPECT_TRUE(Eventually([&] { return server_->used_bytes() == 0; }));
  EXPECT_EQ(device_->allocations(), 0u);
}

// A client that has its response may delete the operands and rely on getting their memory.
TEST_F(FaultTest, AnswersComeWhenOperandsHaveBeenReleased) {
  StartServer();
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(AddInto("y").ok());
    ASSERT_TRUE(server_->Call(Of<v1::DotRequest>("a { buffer: 'y' } b { buffer: 'y' }")).ok());
    ASSERT_TRUE(Delete("y").ok());
    ASSERT_EQ(device_->allocations(), 1u) << "x alone, time " << i;
  }
}

TEST_F(FaultTest, DownloadOutlivesItsName) {
  StartServer();
  const std::vector<float> values(1 << 20, 1.5f);
  ASSERT_TRUE(server_->Put("big", v1::DTYPE_F32, {1 << 20}, values).ok());
  grpc::ClientContext context;
  auto reader = server_->buffers().Download(&context, Of<v1::DownloadRequest>("name: 'big'"));
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

// --- The device ---------------------------------------------------------------------------------

TEST_F(FaultTest, DeviceOutOfMemory) {
  StartServer();
  const std::map<std::string, std::string> figures = {
      {"requested", "12"}, {"free", "*"}, {"total", "*"}};
  device_->Fail(Step::kAllocate, Kind::kOutOfMemory);
  ExpectError(server_->Put<float>("y", v1::DTYPE_F32, {3}, {1, 2, 3}), "HOST_MEMORY_EXHAUSTED",
              figures);
  device_->Fail(Step::kAllocate, Kind::kOutOfMemory);
  ExpectError(AddInto("y"), "HOST_MEMORY_EXHAUSTED", figures);
  EXPECT_EQ(server_->used_bytes(), Charged(12));

  device_->Fail(Step::kScratch, Kind::kOutOfMemory);
  ExpectError(server_->Call(Of<v1::AddRequest>("a { buffer: 'x' } b { buffer: 'x' }")),
              "HOST_MEMORY_EXHAUSTED", figures);
  ExpectWorks();
}

// Returns that many equal values, as bytes.
std::string Row(std::size_t count, float value) { return Bytes(std::vector<float>(count, value)); }

// Multiplies a row of ones by every other element of every other row of "m", which has 256 x 256
// floats. The server keeps a copy of those elements.
v1::MatmulRequest ProductOfEveryOther() {
  auto request = Of<v1::MatmulRequest>(
      "a { tensor { dtype: DTYPE_F32 shape: [1, 128] } } "
      "b { buffer: 'm' view { shape: [128, 128] strides: [512, 2] } }");
  request.mutable_a()->mutable_tensor()->set_data(Row(128, 1));
  return request;
}

// The server frees memory that it keeps for prepared operands before it refuses a call.
TEST_F(FaultTest, ADeviceOutOfMemoryGivesUpWhatItKeepsOfOperands) {
  StartServer();
  PutMatrix();
  v1::ExecuteRequest program;
  *program.add_steps()->mutable_matmul() = ProductOfEveryOther();
  const auto multiply = [&](bool in_program) {
    const auto response = in_program
                              ? server_->Good<v1::ExecuteResponse>(program).results(0).matmul()
                              : server_->Good<v1::MatmulResponse>(program.steps(0).matmul());
    EXPECT_EQ(response.tensor().data(), Row(128, 128));
    return response.stats().prepared_bytes();
  };
  for (const bool in_program : {false, true}) {
    multiply(false);
    multiply(false);
    EXPECT_GT(multiply(false), 0u);
    ASSERT_GT(server_->Info().prepared_bytes(), 0u);
    device_->Fail(Step::kScratch, Kind::kOutOfMemory);
    EXPECT_EQ(multiply(in_program), 0u);
    EXPECT_EQ(device_->Relent(Step::kScratch), 0);
    EXPECT_EQ(server_->Info().prepared_bytes(), 0u);
  }
}

// Selects all of 128 x 128 elements of m into buffers.
v1::SelectRequest SelectionOfAll(const std::string& values, const std::string& indices = "") {
  auto request = Of<v1::SelectRequest>(
      "x { buffer: 'm' view { shape: [128, 128] } } "
      "mask { tensor { dtype: DTYPE_BOOL shape: [128, 128] } }");
  request.mutable_mask()->mutable_tensor()->set_data(std::string(128 * 128, '\1'));
  request.mutable_values()->mutable_buffer()->set_name(values);
  if (indices.empty()) {
    request.mutable_indices()->set_none(true);
  } else {
    request.mutable_indices()->mutable_buffer()->set_name(indices);
  }
  return request;
}

// Besides x and m, there is room for the values of one selection, or for one copy of as many bytes.
void RoomForOneSelection(Options& options) {
  options.memory_limit.bytes = Charged(3 * 4) + Charged(256 * 256 * 4) + Charged(128 * 128 * 4);
}

TEST_F(FaultTest, AProgramThatSelectsGivesUpWhatIsKeptOfOperands) {
  StartServer(RoomForOneSelection);
  PutMatrix();
  for (int i = 0; i < 2; ++i) server_->Good<v1::MatmulResponse>(ProductOfEveryOther());
  ASSERT_GT(server_->Info().prepared_bytes(), 0u);
  v1::ExecuteRequest program;
  *program.add_steps()->mutable_matmul() = ProductOfEveryOther();
  *program.add_steps()->mutable_select() = SelectionOfAll("y");
  const auto response = server_->Good<v1::ExecuteResponse>(program);
  EXPECT_EQ(response.results(0).matmul().tensor().data(), Row(128, 128));
  EXPECT_EQ(response.results(1).select().values_buffer().size_bytes(), 128 * 128 * 4)
      << response.ShortDebugString();
  EXPECT_EQ(server_->Info().prepared_bytes(), 0u);
}

TEST_F(FaultTest, ASelectionThatFindsTooLittleMemoryKeepsNone) {
  StartServer(RoomForOneSelection);
  PutMatrix();
  v1::ExecuteRequest program;
  *program.add_steps()->mutable_select() = SelectionOfAll("y", "z");
  *program.add_steps()->mutable_select() = SelectionOfAll("w");
  const auto response = server_->Good<v1::ExecuteResponse>(program);
  EXPECT_EQ(response.results(0).error().reason(), "QUOTA_EXCEEDED");
  EXPECT_TRUE(response.results(1).has_select()) << response.ShortDebugString();
}

TEST_F(FaultTest, ASelectionIsCheckedBeforeItsMaskIsCounted) {
  StartServer();
  PutMatrix();
  v1::SelectRequest unknown = SelectionOfAll("y"), late = SelectionOfAll("y");
  unknown.set_strategy("unknown");
  const int launches = device_->Count(Step::kLaunch);
  late.mutable_values()->mutable_buffer()->mutable_ttl()->set_seconds(-1);
  for (const auto& [request, reason] :
       {std::pair(SelectionOfAll("x"), "BUFFER_EXISTS"), std::pair(late, "BAD_TTL"),
        std::pair(unknown, "UNKNOWN_STRATEGY")}) {
    ExpectError(server_->Call(request), reason);
    v1::ExecuteRequest program;
    *program.add_steps()->mutable_select() = request;
    const auto response = server_->Good<v1::ExecuteResponse>(program);
    EXPECT_EQ(response.results(0).error().reason(), reason);
  }
  EXPECT_EQ(device_->Count(Step::kLaunch), launches);
}

TEST_F(FaultTest, WhatAFailedStepHasHalfMadeIsNotKept) {
  StartServer();
  PutMatrix();
  v1::ExecuteRequest program;
  *program.add_steps()->mutable_matmul() = ProductOfEveryOther();
  ASSERT_TRUE(server_->Call(program).ok());
  device_->Fail(Step::kLaunch, Kind::kFailed);  // the copy, which the second call is to keep
  const auto failed = server_->Good<v1::ExecuteResponse>(program);
  EXPECT_EQ(failed.results(0).error().reason(), "CUDA_ERROR");
  EXPECT_EQ(server_->Info().prepared_bytes(), 0u);
}

TEST_F(FaultTest, FailedCallsOfTheDevice) {
  StartServer();
  const std::map<std::string, std::string> figures = {{"call", "fakeCall(x)"},
                                                      {"error", "fakeErrorInvalidValue"}};
  for (const Step step : {Step::kBegin, Step::kSynchronize}) {
    device_->Fail(step, Kind::kFailed);
    ExpectError(Dot(), "CUDA_ERROR", figures);
    ExpectWorks();
  }
  device_->Fail(Step::kCopyToDevice, Kind::kFailed);
  ExpectError(server_->Put<float>("y", v1::DTYPE_F32, {3}, {1, 2, 3}), "CUDA_ERROR", figures);
  EXPECT_FALSE(device_->lost());
}

// The health service must report a lost device within this time, whether the device was in use or
// idle. The promised time is one second, and a busy machine adds to it. A device that does not
// answer would count as lost only after minutes.
constexpr std::chrono::seconds kSoon{60};

TEST_F(FaultTest, LostDeviceEndsTheServer) {
  StartServer();
  for (const char* service : {"", kCompute, kBuffers}) EXPECT_TRUE(IsServing(service)) << service;
  EXPECT_EQ(HealthOf(server_->channel(), "unknown"), HealthCheckResponse::UNKNOWN);

  auto first = HoldWorker();
  auto queued = DotAsync();
  WaitForQueued();
  device_->Fail(Step::kBegin, Kind::kLost);
  const auto begin = std::chrono::steady_clock::now();
  device_->Open();
  EXPECT_EQ(server_->server().Wait(), Server::Reason::kDevicesLost);
  ExpectNothingServes();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
  ExpectError(first.get(), "DEVICE_LOST",
              {{"device", "fake:0"}, {"error", "fakeErrorIllegalAddress"}});
  ExpectError(queued.get(), "DEVICE_LOST", {{"device", "fake:0"}});
  ExpectError(server_->Put<float>("y", v1::DTYPE_F32, {1}, {1}), "DEVICE_LOST",
              {{"device", "fake:0"}});
  std::string data;
  EXPECT_FALSE(server_->Fetch("x", &data).ok()) << "it goes with its device";
}

TEST_F(FaultTest, ADeviceThatIsLostWhileIdleIsNoticedWithoutACall) {
  StartServer();
  device_->Fail(Step::kProbe, Kind::kFailed);  // The device is not lost.
  const int asked = device_->Count(Step::kProbe);
  ASSERT_TRUE(Eventually([&] { return device_->Count(Step::kProbe) > asked + 1; }));
  EXPECT_TRUE(IsServing());
  const auto begin = std::chrono::steady_clock::now();
  device_->Fail(Step::kProbe, Kind::kLost);
  EXPECT_EQ(server_->server().Wait(), Server::Reason::kDevicesLost);
  ExpectNothingServes();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
}

TEST_F(FaultTest, ADeviceThatHangsIsLost) {
  StartServer(Impatient);
  auto running = HoldWorker();
  auto queued = DotAsync();
  EXPECT_TRUE(AwaitEnd());
  ExpectNothingServes();
  EXPECT_EQ(queued.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  device_->Open();
  ExpectError(queued.get(), "DEVICE_LOST", {{"device", "fake:0"}});
  ExpectError(server_->Put<float>("y", v1::DTYPE_F32, {1}, {1}), "DEVICE_LOST",
              {{"device", "fake:0"}});
  running.get();
}

TEST_F(FaultTest, MemoryThatIsNeverGivenEndsTheServer) {
  StartServer(Impatient);
  device_->Close(Step::kAllocate);
  auto creating = std::async(std::launch::async, [&] {
    return server_->Put<float>("y", v1::DTYPE_F32, {1 << 20}, std::vector<float>(1 << 20)).ok();
  });
  device_->WaitForBlocked(1);
  EXPECT_TRUE(AwaitEnd());
  ExpectNothingServes();
  EXPECT_TRUE(server_->server().devices_lost());
  device_->Open();
  creating.get();
}

TEST_F(FaultTest, AWorkerThatIsBusyForLongIsNotReadyUntilItIsFree) {
  // With so many workers, the device does not count as lost for a while.
  StartServer(Impatient, [](Options& options) { options.workers = 64; });
  auto running = HoldWorker();
  EXPECT_TRUE(Eventually([&] { return !IsServing(); }));
  EXPECT_TRUE(IsServing(""));
  device_->Open();
  // The operation had been told to stop earlier.
  ExpectError(running.get(), "OPERATION_TOO_LONG", {{"limit_seconds", "0.1"}});
  EXPECT_TRUE(Eventually([&] { return IsServing(); }));
}

// A long operation is no reason to stop serving while it is within its time limit and can be told
// to stop.
TEST_F(FaultTest, ALongOperationIsNoFault) {
  StartServer([](Options& options) {
    options.watchdog = absl::Milliseconds(100);
    options.max_operation_seconds = 3600;
  });
  auto running = HoldWorker();
  const int asked = device_->Count(Step::kProbe);
  for (int i = 0; i < 10; ++i) {
    AdvanceSteadyNow(absl::Milliseconds(500));
    absl::SleepFor(absl::Milliseconds(60));  // A longer pause would count as a suspension.
  }
  EXPECT_TRUE(Eventually([&] { return device_->Count(Step::kProbe) > asked + 1; }));
  // On a busy machine, a probe may take longer than the watchdog allows.
  EXPECT_TRUE(Eventually([&] { return IsServing(); }));
  device_->Open();
  EXPECT_TRUE(running.get().ok());
}

// The clock advances while the process is stopped. Interrupted calls and uploads continue
// afterwards.
TEST_F(FaultTest, TimeInWhichTheProcessWasStoppedIsNoFault) {
  StartServer([](Options& options) {
    options.watchdog = absl::Seconds(10);
    options.max_operation_seconds = 1;
  });
  SlowUpload upload(*server_, server_->channel());
  auto running = HoldWorker();
  for (int i = 0; i < 2; ++i) {
    server_->AwaitTurn();
    AdvanceSteadyNow(absl::Hours(1000));
    server_->AwaitTurn();
    EXPECT_TRUE(IsServing());
    EXPECT_FALSE(device_->lost());
  }
  EXPECT_TRUE(upload.Finish().ok());
  // Time counts only while the process runs. For work that begins later, all of the time counts.
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(Eventually([&] {
      AdvanceSteadyNow(absl::Milliseconds(100));
      return !IsServing();
    }));
    device_->Open();
    EXPECT_EQ(running.get().error_code(), StatusCode::FAILED_PRECONDITION);
    if (i == 1) break;
    EXPECT_TRUE(Eventually([&] { return IsServing(); }));
    running = HoldWorker();
  }
}

class TwoFaultyDevicesTest : public FaultTest {
 protected:
  template <class... Changes>
  void StartServer(const Changes&... changes) {
    Options options = TestOptions();
    (changes(options), ...);
    std::vector<std::unique_ptr<Device>> devices = FakeDevices(2);
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
  StartServer([](Options& options) { options.watchdog = absl::Milliseconds(100); });
  device_->Close(Step::kProbe);
  device_->WaitForBlocked(1);
  EXPECT_TRUE(Eventually([&] { return !IsServing(); }));
  second_->Fail(Step::kProbe, Kind::kLost);
  EXPECT_TRUE(Eventually([&] { return server_->Info(1).lost(); }));
  EXPECT_TRUE(IsServing(""));
  device_->Open();
  EXPECT_TRUE(Eventually([&] { return IsServing(); }));
}

TEST_F(TwoFaultyDevicesTest, OneThatHangsIsLostAndTheOtherServes) {
  StartServer(OneWorker, Impatient);
  ASSERT_TRUE(server_->Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}, false, "fake:1").ok());
  device_->Close(Step::kProbe);
  EXPECT_TRUE(Eventually([&] { return server_->Info(0).lost(); }));
  EXPECT_TRUE(Eventually([&] { return IsServing(); }));
  ExpectWorks();
  second_->Close(Step::kProbe);
  EXPECT_TRUE(AwaitEnd());
}

TEST_F(TwoFaultyDevicesTest, TransfersThatWaitForOneThatIsLostEnd) {
  StartServer([](Options& options) { options.transfer_workers = 1; });
  const auto put = [&](const std::string& name) {
    return std::async(std::launch::async,
                      [this, name] { return server_->Put<float>(name, v1::DTYPE_F32, {1}, {1}); });
  };
  device_->Close(Step::kCopyToDevice);
  auto hangs = put("x");
  device_->WaitForBlocked(1);
  auto waits = put("y");
  ASSERT_TRUE(Eventually([&] { return server_->used_bytes() == 2 * Charged(4); }));
  device_->MarkLost();
  EXPECT_EQ(waits.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  device_->Open();
  ExpectError(waits.get(), "DEVICE_LOST", {{"device", "fake:0"}});
  EXPECT_FALSE(hangs.get().ok());
}

TEST_F(TwoFaultyDevicesTest, MemoryThatCannotBeFreedHidesNoLoss) {
  StartServer();
  PutMatrix();
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(server_->Call(ProductOfEveryOther()).ok());
  ASSERT_GT(server_->Info().prepared_bytes(), 0u);
  device_->Close(Step::kFree);
  device_->MarkLost();
  device_->WaitForBlocked(1);
  second_->Fail(Step::kProbe, Kind::kLost);
  EXPECT_TRUE(AwaitEnd());
}

TEST_F(TwoFaultyDevicesTest, CallsThatHangWithOneDoNotStopTheOther) {
  constexpr int kCalls = 6;  // More than there are threads.
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

// --- The end ------------------------------------------------------------------------------------

TEST_F(FaultTest, DrainFinishesWhatWasAcceptedAndSendsClientsAway) {
  StartServer([](Options& options) {
    options.listen = {"127.0.0.1:0"};
    options.drain_timeout = absl::Minutes(10);
  });
  // Uses a socket, because connections inside the process are not told to go away.
  const auto dial = [&] {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // A separate connection.
    return grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(),
                                     arguments);
  };
  const auto dot = [this](const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    v1::DotResponse response;
    return v1::ComputeService::NewStub(channel)->Dot(&context, dot_, &response);
  };
  auto busy = dial();
  auto idle = dial();
  ASSERT_TRUE(dot(idle).ok());
  device_->Close(Step::kBegin);
  auto running = std::async(std::launch::async, dot, busy);
  device_->WaitForBlocked(1);
  auto queued = std::async(std::launch::async, dot, busy);
  WaitForQueued();
  SlowUpload upload(*server_, busy);

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
  EXPECT_TRUE(upload.Finish().ok());
  drained.get();
}

TEST(Admission, RefusesCallsAfterTheEndHasBegun) {
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

// The last call may end before or after the wait begins.
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

// A client that watches the health service would never end its call.
TEST_F(FaultTest, DrainDoesNotWaitForWatchers) {
  StartServer([](Options& options) {
    options.listen = {"127.0.0.1:0"};
    options.drain_timeout = absl::Minutes(10);
  });
  const auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto watcher = stub->Watch(&context, {});
  HealthCheckResponse heard;
  ASSERT_TRUE(watcher->Read(&heard));
  const auto begin = std::chrono::steady_clock::now();
  server_->server().Drain();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  while (watcher->Read(&heard)) continue;
  (void)watcher->Finish();
}

TEST_F(FaultTest, DrainDelayKeepsServing) {
  StartServer([](Options& options) { options.drain_delay = absl::Hours(1); });
  auto drained = std::async(std::launch::async, [&] { server_->server().Drain(); });
  EXPECT_TRUE(Eventually([&] { return !IsServing() && !IsServing(kBuffers); }));
  ExpectWorks();
  device_->MarkLost();  // Ends the delay.
  drained.get();
}

TEST_F(FaultTest, DrainTimeoutCancelsWhatIsLeft) {
  StartServer([](Options& options) { options.drain_timeout = absl::Milliseconds(100); });
  SlowUpload upload(*server_, server_->channel());
  server_->server().Drain();  // Otherwise the upload would not end.
  EXPECT_FALSE(upload.Finish().ok());
}

// --- The process --------------------------------------------------------------------------------

enum class End { kFailure, kLossOfWhatHangs, kHang, kLossInDrain };

// Runs in a separate process, without output.
[[noreturn]] void ServeOnADeviceThatIsLost(End end) {
  const bool hangs = end == End::kLossOfWhatHangs || end == End::kHang;
  SetUpLog("off", false);
  auto* const fake = new FakeDevice;
  Options options = With(OneWorker);
  if (end == End::kHang) Impatient(options);
  options.listen = {"unix:" + SocketPath("lost")};
  if (end == End::kLossInDrain) options.drain_delay = absl::Hours(1);
  if (hangs) fake->Close(Step::kBegin);
  std::thread([fake, hangs, end, address = options.listen[0]] {
    auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
    channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(60));
    if (end == End::kLossInDrain) {
      kill(getpid(), SIGTERM);
      if (!Eventually(
              [&] { return HealthOf(channel, kCompute) == HealthCheckResponse::NOT_SERVING; }))
        std::_Exit(1);
      fake->MarkLost();
      std::this_thread::sleep_for(std::chrono::seconds(60));
    }
    if (!hangs) fake->Fail(Step::kBegin, Kind::kLost);
    auto stub = v1::ComputeService::NewStub(channel);
    auto request = Of<v1::DotRequest>("a { tensor { dtype: DTYPE_F32 data: 'abcd' } }");
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
    // The clock runs faster, so that the drain's limit is reached soon.
    for (int i = 0; i < 1000; ++i) {
      AdvanceSteadyNow(absl::Milliseconds(500));
      absl::SleepFor(absl::Milliseconds(60));
    }
    std::_Exit(1);
  }).detach();
  std::_Exit(Serve(options, Only(fake)));
}

class ProcessDeathTest : public testing::TestWithParam<End> {};

TEST_P(ProcessDeathTest, ALostDeviceShowsInTheExitCode) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(ServeOnADeviceThatIsLost(GetParam()), testing::ExitedWithCode(kExitDeviceLost), "");
}

INSTANTIATE_TEST_SUITE_P(Ends, ProcessDeathTest,
                         testing::Values(End::kFailure, End::kLossOfWhatHangs, End::kHang,
                                         End::kLossInDrain));

}  // namespace
}  // namespace tessera
