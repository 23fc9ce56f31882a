// ComputeService as a client sees it: the numbers in errors and statistics, host memory, cancelled
// calls, and several devices. fuzz_model_test has random requests for every operation.

#include <algorithm>
#include <future>

#include "server/calls/unary_call.h"
#include "server/compute/operations.h"
#include "server/rpc/call_queues.h"
#include "server/rpc/convert.h"
#include "tests/service_fixture.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class ComputeServiceTest : public ServiceTest {};

// The time that decides where an operation runs includes the transfers of its messages to and from
// a GPU.
TEST(TravelMicrosecondsTest, CountsInlineArrays) {
  FakeDevice gpu("fake:0", "", Backend::kCuda), cpu;
  v1::AddRequest request;
  *request.mutable_a() = Inline<float>(v1::DTYPE_F32, {250'000}, std::vector<float>(250'000));
  request.mutable_b()->set_buffer("x");
  const ArrayType megabyte = *MakeArrayType(DType::kF32, {250'000});
  const ResultType array{.arrays = {megabyte}}, number{.scalar = true, .arrays = {megabyte}};
  const auto travel = [&](const ResultType* result, const Device& device) {
    const Operation add = *MakeOperation(request);
    Sources sources;
    for (const auto& named : add.operands) sources.push_back({.named = named, .type = megabyte});
    return TravelMicroseconds(sources, add.destinations, result, device);
  };
  EXPECT_DOUBLE_EQ(travel(nullptr, gpu), 100);
  EXPECT_DOUBLE_EQ(travel(&number, gpu), 100);
  EXPECT_DOUBLE_EQ(travel(&array, gpu), 200);
  EXPECT_DOUBLE_EQ(travel(&array, cpu), 0);
  request.mutable_result()->set_scratch(true);
  EXPECT_DOUBLE_EQ(travel(&array, gpu), 100);
  request.mutable_result()->mutable_buffer()->set_name("y");
  EXPECT_DOUBLE_EQ(travel(&array, gpu), 100);
}

TEST(RefusalTest, WhatMayHaveBeenDoneIsNotToBeRepeated) {
  EXPECT_FALSE(DetailsOf(ToGrpc(HostMemoryError())).retry);
  EXPECT_EQ(DetailsOf(ToGrpc(HostMemoryError())).reason, "HOST_MEMORY_EXHAUSTED");
}

// A client is told to retry only if the call can fit once other calls have ended.
TEST(RefusalTest, WhatFitsOnceOthersAreDoneIsWorthRepeating) {
  const auto may_repeat = [](const char* reason, int requested, bool sees_all = true) {
    const grpc::Status refused =
        ToGrpc(MakeError(absl::StatusCode::kResourceExhausted, reason, "there is no room",
                         {{"requested", absl::StrCat(requested)}, {"total", "100"}}),
               sees_all);
    EXPECT_EQ(refused.error_message().find("total") == std::string::npos, !sees_all);
    google::rpc::Status details;
    EXPECT_TRUE(details.ParseFromString(refused.error_details()));
    return std::any_of(details.details().begin(), details.details().end(), [](const auto& detail) {
      return detail.template Is<google::rpc::RetryInfo>();
    });
  };
  for (const char* reason : {"HOST_MEMORY_EXHAUSTED", "SCRATCH_EXHAUSTED"}) {
    EXPECT_TRUE(may_repeat(reason, 100)) << reason;
    EXPECT_FALSE(may_repeat(reason, 101)) << reason;
    // The test does not depend on whether the caller is told the free amount.
    EXPECT_TRUE(may_repeat(reason, 100, false)) << reason;
    EXPECT_FALSE(may_repeat(reason, 101, false)) << reason;
  }
  EXPECT_TRUE(may_repeat("QUEUE_FULL", 101));
  EXPECT_FALSE(may_repeat("QUOTA_EXCEEDED", 1));
}

TEST_F(ComputeServiceTest, ATimedCallHasStatistics) {
  v1::DotRequest request = DotOf(Inline<double>(v1::DTYPE_F64, {3}, {6, 4, 2}),
                                 Inline<double>(v1::DTYPE_F64, {3}, {1, 10, 100}));
  request.set_timing(true);
  const auto response = Good<v1::DotResponse>(request);
  EXPECT_EQ(response.value().real(), 246);
  EXPECT_GT(response.stats().kernel_us(), 0);
  EXPECT_GT(response.stats().bytes(), 0u);
  EXPECT_GT(response.stats().flops(), 0u);
  EXPECT_GT(response.stats().roundoff(), 0);
}

TEST_F(ComputeServiceTest, ErrorsHaveTheirNumbers) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
  const v1::Operand x = Named("x");
  ExpectError(Dot(x, Named("y")), "BUFFER_NOT_FOUND", {{"name", "y"}});
  ExpectError(Dot(x, v1::Operand()), "BAD_OPERAND", {{"field", "source"}});
  v1::Operand versioned = Inline<float>(v1::DTYPE_F32, {3}, {1, 2, 3});
  versioned.set_version(7);
  ExpectError(Dot(x, versioned), "BAD_OPERAND", {{"field", "version"}, {"value", "7"}});
  ExpectError(Dot(x, Inline<float>(v1::DTYPE_F32, {4}, {1, 2, 3})), "BAD_OPERAND",
              {{"field", "tensor.data"}, {"value", "12"}, {"expected", "16"}});
  ExpectError(Dot(x, Inline<float>(v1::DTYPE_F32, {2}, {1, 2})), "BAD_SHAPE",
              {{"a", "[3]"}, {"b", "[2]"}});
  ExpectError(Dot(x, Inline<double>(v1::DTYPE_F64, {3}, {1, 2, 3})), "BAD_DTYPE",
              {{"a", "f32"}, {"b", "f64"}});

  v1::DotRequest request = DotOf(x, x);
  request.set_strategy("fastest");
  const grpc::Status unknown = Call(request);
  ExpectError(unknown, "UNKNOWN_STRATEGY");
  EXPECT_THAT(DetailsOf(unknown).metadata["valid"], HasSubstr("cpu_serial"));
  request.set_strategy("cpu_serial");
  request.mutable_launch()->set_block_size(64);
  ExpectError(Call(request), "BAD_LAUNCH", {{"value", "64"}, {"range", "*"}});
  auto matmul = Of<v1::MatmulRequest>("strategy: 'cpu_library'");
  *matmul.mutable_a() = *matmul.mutable_b() = Inline<std::int32_t>(v1::DTYPE_I32, {1, 1}, {3});
  ExpectError(Call(matmul), "STRATEGY_UNSUPPORTED",
              {{"strategy", "cpu_library"}, {"dtype", "i32"}, {"needs", "operands of f32, f64"}});
  ExpectError(Call(Of<v1::ListStrategiesRequest>("backend: 'tpu'")), "BAD_OPERATION",
              {{"field", "backend"}, {"value", "tpu"}, {"valid", "cpu, cuda"}});

  const auto reduce = [&](const std::string& view, const std::string& text) {
    return Call(Of<v1::ReduceRequest>("x { buffer: 'x' " + view + " } " + text));
  };
  ExpectError(reduce("view { shape: 0 }", "op: REDUCE_OP_MIN"), "EMPTY_INPUT", {{"op", "min"}});
  ExpectError(reduce("", ""), "BAD_OPERATION", {{"field", "op"}, {"value", "0"}});
  ExpectError(reduce("", "op: REDUCE_OP_SUM axes: 1"), "BAD_AXES", {{"axis", "1"}, {"rank", "1"}});
  ExpectError(reduce("", "op: REDUCE_OP_SUM result { buffer { name: 'r' } }"), "BAD_AXES",
              {{"field", "axes"}});

  auto sums = Of<v1::SumByLabelRequest>("x { buffer: 'x' } length: -1");
  *sums.mutable_labels() = Inline<std::int32_t>(v1::DTYPE_I32, {3}, {0, 0, 0});
  ExpectError(Call(sums), "BAD_SHAPE", {{"field", "length"}, {"value", "-1"}});
  const auto histogram = [&](const std::string& even) {
    return Call(Of<v1::HistogramRequest>("x { buffer: 'x' } even { count: 3 " + even + " }"));
  };
  ExpectError(histogram("low: nan high: 1"), "BAD_BINS", {{"field", "even.low"}});
  ExpectError(histogram("low: 0 high: nan"), "BAD_BINS", {{"field", "even.high"}});
  const auto program = Good<v1::ExecuteResponse>(Of<v1::ExecuteRequest>(
      "steps { add { a { buffer: 'x' } b { buffer: 'x' } result { scratch: true } } }"
      "steps { dot { a { step: 0 version: 7 } b { buffer: 'x' } } }"));
  EXPECT_EQ(program.results(1).error().reason(), "BAD_OPERAND");
}

TEST_F(ComputeServiceTest, ResultsTooLargeForAResponse) {
  const auto add_of = [](std::int64_t n) {
    v1::AddRequest add;
    *add.mutable_a() = *add.mutable_b() =
        InView(Inline<double>(v1::DTYPE_F64, {}, {1}), 0, {n}, {0});
    return add;
  };
  ExpectError(Call(add_of(kMaxInlineResult / 8 + 1)), "RESULT_TOO_LARGE",
              {{"size", "4128776"}, {"limit", "4128768"}});
  const auto sum = Good<v1::AddResponse>(add_of(kMaxInlineResult / 8));
  EXPECT_EQ(Values<double>(sum.tensor().data()), std::vector<double>(kMaxInlineResult / 8, 2.0));
}

// Makes a program with statistics that has that many dots, and then one array in the response for
// each of these sizes.
v1::ExecuteRequest DotsAndArrays(int dots, const std::vector<std::int64_t>& sizes) {
  v1::ExecuteRequest request;
  request.set_stats(true);
  const auto dot = Of<v1::Step>("dot { a { buffer: 'x' } b { buffer: 'x' } }");
  for (int i = 0; i < dots; ++i) *request.add_steps() = dot;
  for (const std::int64_t size : sizes) {
    v1::AddRequest& add = *request.add_steps()->mutable_add();
    *add.mutable_a() = *add.mutable_b() =
        InView(Inline<double>(v1::DTYPE_F64, {}, {1}), 0, {size / 8}, {0});
  }
  return request;
}

TEST_F(ComputeServiceTest, AProgramsArraysLeaveRoomForItsOtherResults) {
  constexpr auto kMost = static_cast<std::int64_t>(kMaxInlineResult);
  ASSERT_TRUE(server_.Put<double>("x", v1::DTYPE_F64, {1}, {3}).ok());
  const auto run = [&](int dots, const std::vector<std::int64_t>& sizes) {
    const auto response = Good<v1::ExecuteResponse>(DotsAndArrays(dots, sizes));
    EXPECT_LE(response.ByteSizeLong(), std::size_t{4} << 20) << "what clients receive";
    std::vector<std::string> reasons;
    for (int i = 0; i < response.results_size(); ++i) {
      const v1::StepResult& result = response.results(i);
      if (i < dots) {
        EXPECT_EQ(result.dot().value().real(), 9) << i;
        continue;
      }
      reasons.push_back(result.error().reason());
      if (!result.has_error()) {
        EXPECT_EQ(static_cast<std::int64_t>(result.add().tensor().data().size()),
                  sizes[static_cast<std::size_t>(i - dots)]);
      }
    }
    return reasons;
  };
  const std::string refused = "RESULT_TOO_LARGE";
  EXPECT_THAT(run(4000, {kMost, 8}), ElementsAre(refused, ""));
  // A step takes 512 bytes. 64 KiB are reserved for steps in addition to the arrays.
  EXPECT_THAT(run(127, {kMost}), ElementsAre(""));
  EXPECT_THAT(run(128, {kMost}), ElementsAre(refused));
  EXPECT_THAT(run(128, {kMost - 512}), ElementsAre(""));
  // The limit applies to the sum of the arrays. A refused array takes nothing.
  EXPECT_THAT(run(0, {kMost / 2, kMost / 2 + 8, kMost / 2, 8}),
              ElementsAre("", refused, "", refused));
}

// Steps do not depend on adjacent steps, whether or not they are computed together.
TEST_F(ComputeServiceTest, ABatchIsOfOneOperationAndOneType) {
  ASSERT_TRUE(server_.Put<float>("f32", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
  ASSERT_TRUE(server_.Put<double>("f64", v1::DTYPE_F64, {3}, {4, 5, 7}).ok());
  v1::ExecuteRequest request;
  std::vector<double> expected;
  const auto add = [&](int times, const std::string& step, double value) {
    for (; times > 0; --times) {
      *request.add_steps() = Of<v1::Step>(step);
      expected.push_back(value);
    }
  };
  for (int round = 0; round < 3; ++round) {
    add(2, "dot { a { buffer: 'f32' } b { buffer: 'f32' } }", 14);
    add(2, "dot { a { buffer: 'f64' } b { buffer: 'f64' } }", 90);
    add(2, "reduce { op: REDUCE_OP_SUM x { buffer: 'f32' } }", 6);
    add(1, "reduce { op: REDUCE_OP_SUM x { buffer: 'f64' } }", 16);
    add(1, "reduce { op: REDUCE_OP_MAX x { buffer: 'f64' } }", 7);
    add(1, "reduce { op: REDUCE_OP_MAX x { buffer: 'f32' } }", 3);
    add(1, "reduce { op: REDUCE_OP_MIN x { buffer: 'f32' } }", 1);
  }
  const auto response = Good<v1::ExecuteResponse>(request);
  std::vector<double> found;
  for (const v1::StepResult& result : response.results())
    found.push_back(result.has_dot() ? result.dot().value().real()
                                     : result.reduce().value().real());
  EXPECT_EQ(found, expected);
}

TEST_F(ComputeServiceTest, EveryOperationHasOneDefaultStrategy) {
  const auto all = Good<v1::ListStrategiesResponse>(v1::ListStrategiesRequest());
  std::map<std::string, int> defaults;
  for (const v1::Strategy& one : all.strategies()) defaults[one.operation()] += one.default_();
  EXPECT_EQ(defaults.size(), 16u);
  EXPECT_THAT(defaults, testing::Each(testing::Pair(testing::_, 1)));
}

// --- Host memory ---------------------------------------------------------------------------------

v1::AddRequest AddInto(const std::string& name) {
  v1::AddRequest request;
  *request.mutable_a() = *request.mutable_b() = Inline<float>(v1::DTYPE_F32, {1}, {1});
  if (!name.empty()) request.mutable_result()->mutable_buffer()->set_name(name);
  return request;
}

// The host memory is too small for a response that describes a buffer.
using NoRoomForAnswers = Changed<ServiceTest, [](Options& options) { options.host_memory = 300; }>;

TEST_F(NoRoomForAnswers, WhatIsRefusedHasNotBeenDone) {
  ASSERT_TRUE(Call(AddInto("x")).ok());
  const auto link = Of<v1::CopyBufferRequest>("source: 'x' name: 'link' link: true");
  for (int i = 0; i < 2; ++i) {
    ExpectError(Create("draft", {1}), "HOST_MEMORY_EXHAUSTED");
    ExpectError(Call(link), "HOST_MEMORY_EXHAUSTED");
  }
  for (const char* name : {"draft", "link"}) EXPECT_TRUE(Call(AddInto(name)).ok()) << name;
  EXPECT_TRUE(Delete("x").ok()) << "an empty response needs no room";
}

// The name, the shape and the number of shards have their maximum sizes.
TEST(DescriptionTest, AnyBufferHasRoomInWhatIsCharged) {
  v1::CreateBufferResponse response;
  v1::Buffer& buffer = *response.mutable_buffer();
  buffer.set_name(std::string(128, 'x'));
  buffer.set_dtype(v1::DTYPE_F32);
  for (int axis = 0; axis < 8; ++axis) buffer.add_shape(std::int64_t{1} << 62);
  buffer.set_size_bytes(~std::uint64_t{0});
  buffer.set_committed_bytes(~std::uint64_t{0});
  buffer.set_version(~std::uint64_t{0});
  buffer.set_state(v1::Buffer::STATE_READY);
  buffer.set_crc32c(~std::uint32_t{0});
  *buffer.mutable_create_time() = *buffer.mutable_expire_time() =
      ToProto(absl::FromUnixSeconds(253402300799));
  for (std::size_t devices = 1; devices <= 16; ++devices) {
    v1::Shard& shard = *buffer.add_shards();
    shard.set_device("cuda:1234567890");
    shard.set_begin(~std::uint64_t{0});
    shard.set_end(~std::uint64_t{0});
    buffer.set_device(shard.device());
    EXPECT_LE(response.SpaceUsedLong() + response.ByteSizeLong(), DescriptionBytes(devices));
  }
}

using LittleRoomForAnswers =
    Changed<OnFakeDevice<ServiceTest>, [](Options& options) { options.host_memory = 16 << 10; }>;

TEST_F(LittleRoomForAnswers, AProgramWhoseAnswerHasNoRoomDoesNotBegin) {
  v1::ExecuteRequest request;
  v1::AddRequest& add = *request.add_steps()->mutable_add();
  add = AddInto("");
  *add.mutable_a() = InView(add.a(), 0, {4096}, {0});
  *add.mutable_b() = add.a();
  add.set_timing(true);  // Makes the step launch a kernel on the device.
  const int before = device_.Count(FakeDevice::Step::kLaunch);
  ExpectError(Call(request), "HOST_MEMORY_EXHAUSTED");
  EXPECT_EQ(device_.Count(FakeDevice::Step::kLaunch), before);
  add.mutable_result()->set_scratch(true);
  ASSERT_TRUE(Call(request).ok());
  EXPECT_GT(device_.Count(FakeDevice::Step::kLaunch), before);
}

// --- Callers that leave --------------------------------------------------------------------------

using OneWorker = Changed<OnFakeDevice<ServiceTest>, [](Options& options) { options.workers = 1; }>;

// The operands are deleted while the call runs, so the call frees their memory.
TEST_F(OneWorker, MemoryOfACancelledCallIsFreedByNoThreadThatTakesCalls) {
  std::atomic<int> freed{0}, by_queues{0};
  device_.OnFree([&] {
    const CallQueue::Leave leave;  // Only a thread of a queue gets it.
    by_queues += leave.granted();
    ++freed;
  });
  const auto cancel = [&](const auto& request) {
    ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
    device_.Close(FakeDevice::Step::kBegin);
    auto held = std::async(std::launch::async, [&] {
      const v1::Operand x = Inline<float>(v1::DTYPE_F32, {3}, {1, 2, 3});
      v1::DotRequest dot = DotOf(x, x);
      dot.set_strategy("cpu_serial");
      return Call(dot);
    });
    device_.WaitForBlocked(1);
    grpc::ClientContext context;
    auto cancelled = std::async(std::launch::async, [&] {
      grpc::ByteBuffer response;
      return server_.Call(request, &response, context);
    });
    ASSERT_TRUE(Eventually([&] { return server_.Info().waiting() == 1; }));
    ASSERT_TRUE(Delete("x").ok());
    const int before = freed;
    context.TryCancel();
    EXPECT_EQ(cancelled.get().error_code(), grpc::StatusCode::CANCELLED);
    EXPECT_TRUE(Eventually([&] { return freed > before; }));
    device_.Open();
    EXPECT_TRUE(held.get().ok());
  };
  cancel(Of<v1::ReduceRequest>("op: REDUCE_OP_SUM x { buffer: 'x' }"));
  cancel(Of<v1::ExecuteRequest>("steps { reduce { op: REDUCE_OP_SUM x { buffer: 'x' } } }"));
  cancel(Of<v1::CopyBufferRequest>("source: 'x' name: 'copy'"));
  EXPECT_EQ(by_queues, 0) << "of " << freed;
  device_.OnFree(nullptr);
}

TEST_F(TwoDevicesTest, AnOperandThatCannotBeFetchedFailsWhatNeedsIt) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2}, {1, 2}).ok());
  ASSERT_TRUE(server_.Put<float>("y", v1::DTYPE_F32, {2}, {3, 4}, false, "fake:1").ok());

  second_.Fail(FakeDevice::Step::kCopyToHost, DeviceError::Kind::kFailed);
  ExpectError(Dot(Named("x"), Named("y")), "CUDA_ERROR", {{"device", "fake:1"}, {"operand", "b"}});
  ASSERT_TRUE(Dot(Named("x"), Named("y")).ok());

  // Two steps use y once, and one step uses it twice. Then come steps that depend on these, and one
  // step that does not need y.
  const auto request = Of<v1::ExecuteRequest>(R"(
      steps { dot { a { buffer: 'x' } b { buffer: 'y' } } }
      steps { dot { a { buffer: 'y' } b { buffer: 'x' } } }
      steps { add { a { buffer: 'y' } b { buffer: 'y' } result { scratch: true } } }
      steps { dot { a { step: 2 } b { buffer: 'x' } } }
      steps { dot { a { buffer: 'x' } b { step: 2 } } }
      steps { dot { a { buffer: 'x' } b { buffer: 'x' } } })");
  second_.Fail(FakeDevice::Step::kCopyToHost, DeviceError::Kind::kFailed);
  const auto results = Good<v1::ExecuteResponse>(request);
  ASSERT_EQ(results.results_size(), 6);
  for (int i = 0; i < 5; ++i) {
    const v1::StepError& error = results.results(i).error();
    std::map<std::string, std::string> metadata(error.metadata().begin(), error.metadata().end());
    EXPECT_EQ(error.reason(), i < 3 ? "CUDA_ERROR" : "STEP_FAILED") << i;
    EXPECT_EQ(metadata["failed_step"], i < 3 ? "" : "2");
    if (i < 2) {
      EXPECT_EQ(metadata["operand"], i == 0 ? "b" : "a");
    }
  }
  EXPECT_EQ(results.results(5).dot().value().real(), 5);
}

TEST_F(TwoDevicesTest, InlineOperandsOfAProgramTravelAlone) {
  auto request = Of<v1::ExecuteRequest>(R"(
      steps { reduce { op: REDUCE_OP_SUM } }
      steps { add { result { scratch: true } } }
      steps { dot { a { step: 1 view { shape: 3 } } } })");
  *request.mutable_steps(0)->mutable_reduce()->mutable_x() =
      Inline<double>(v1::DTYPE_F64, {2}, {7, 8});
  v1::AddRequest& add = *request.mutable_steps(1)->mutable_add();
  *add.mutable_a() = InView(Inline<float>(v1::DTYPE_F32, {1}, {2}), 0, {1 << 20}, {0});
  *add.mutable_b() = InView(Inline<float>(v1::DTYPE_F32, {1}, {3}), 0, {1 << 20}, {0});
  *request.mutable_steps(2)->mutable_dot()->mutable_b() =
      Inline<float>(v1::DTYPE_F32, {3}, {1, 10, 100});
  const std::uint64_t before = first_.copied_to_device();
  const auto results = Good<v1::ExecuteResponse>(request);
  EXPECT_EQ(results.results(0).reduce().value().real(), 15);
  EXPECT_EQ(results.results(2).dot().value().real(), 555);
  EXPECT_LE(first_.copied_to_device() - before, 4096u)
      << "nothing of the 4 MiB of scratch memory between them";
}

TEST_F(TwoDevicesTest, StatisticsTellWhatMoved) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {6}, {1, 2, 3, 4, 5, 6}).ok());
  ASSERT_TRUE(
      server_.Put<float>("y", v1::DTYPE_F32, {6}, {1, 1, 1, 2, 2, 2}, false, "fake:1").ok());
  EXPECT_EQ(GoodDot(Named("x"), Named("x")).stats().moved_bytes(), 0u);
  // If the sizes are equal, the first operand stays where it is.
  EXPECT_EQ(GoodDot(Named("x"), Named("y")).stats().moved_bytes(), 24u);
  EXPECT_EQ(GoodDot(Named("x"), Named("y")).stats().device(), "fake:0");
  EXPECT_EQ(GoodDot(Inline<float>(v1::DTYPE_F32, {6}, std::vector<float>(6)), Named("y"))
                .stats()
                .device(),
            "fake:1");
  // The view of y spans its third to fifth elements, so 12 bytes move.
  const auto response = GoodDot(InView(Named("x"), 0, {2}, {5}), InView(Named("y"), 2, {2}, {2}));
  EXPECT_EQ(response.value().real(), 13);
  EXPECT_EQ(response.stats().moved_bytes(), 12u);

  const auto results = Good<v1::ExecuteResponse>(Of<v1::ExecuteRequest>(R"(stats: true
      steps { dot { a { buffer: 'x' } b { buffer: 'y' } } }
      steps { dot { a { buffer: 'x' } b { buffer: 'y' } } })"));
  EXPECT_EQ(results.results(0).dot().stats().moved_bytes(), 24u);
  EXPECT_EQ(results.results(1).dot().stats().moved_bytes(), 0u) << "it moves once";

  // An operand of two steps does not count twice when the device is chosen, either.
  ASSERT_TRUE(
      server_.Put<float>("z", v1::DTYPE_F32, {8}, std::vector<float>(8), false, "fake:1").ok());
  const auto chosen = Good<v1::ExecuteResponse>(Of<v1::ExecuteRequest>(R"(
      steps { dot { a { buffer: 'x' } b { buffer: 'x' } } }
      steps { reduce { op: REDUCE_OP_SUM x { buffer: 'z' } } })"));
  EXPECT_EQ(chosen.device(), "fake:1") << "where the larger one is";
}

TEST_F(TwoDevicesTest, CallsReuseTheStreamsOfOtherDevices) {
  using Step = FakeDevice::Step;
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2}, {1, 2}).ok());
  ASSERT_TRUE(server_.Put<float>("y", v1::DTYPE_F32, {2}, {3, 4}, false, "fake:1").ok());
  const auto dot = [&] { return GoodDot(Named("x"), Named("y")).value().real(); };
  const int before = second_.Count(Step::kStream);
  EXPECT_EQ(dot(), 11);
  EXPECT_EQ(dot(), 11);
  EXPECT_EQ(second_.Count(Step::kStream), before + 1);

  second_.Close(Step::kCopyToHost);
  std::thread other([&] { EXPECT_EQ(dot(), 11); });
  second_.WaitForBlocked(1);
  std::thread another([&] { EXPECT_EQ(dot(), 11); });
  second_.WaitForBlocked(2);
  second_.Open();
  other.join();
  another.join();
  EXPECT_EQ(dot(), 11);
  EXPECT_EQ(second_.Count(Step::kStream), before + 2) << "two at a time";

  second_.Fail(Step::kCopyToHost, DeviceError::Kind::kFailed);
  EXPECT_FALSE(Dot(Named("x"), Named("y")).ok());
  EXPECT_EQ(dot(), 11);
  EXPECT_EQ(second_.Count(Step::kStream), before + 2);
}

// A call fails because of the device that helps, not because of the one on which it runs.
TEST_F(TwoDevicesTest, ALossIsThatOfTheHelperAndAllDevicesAreThoseThatAreLeft) {
  constexpr std::int64_t kFloats = 16 * 4096 / 4;  // 16 rows of the fixed tree, in four chunks.
  const std::vector<float> ones(kFloats, 1);
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {kFloats}, ones).ok());
  ASSERT_TRUE(Call(Of<v1::CopyBufferRequest>("source: 'x' name: 's' placement: 'all'")).ok());
  EXPECT_EQ(GoodDot(Named("s"), Named("s")).stats().devices(), 2u);
  second_.Fail(FakeDevice::Step::kSynchronize, DeviceError::Kind::kLost);
  ExpectError(Dot(Named("s"), Named("s")), "DEVICE_LOST", {{"device", "fake:1"}});
  EXPECT_TRUE(Eventually([&] { return IsGone("s"); }));
  ExpectError(Call(Of<v1::CopyBufferRequest>(
                  "source: 'x' name: 't' placement: 'fake:0' placement: 'fake:1'")),
              "DEVICE_LOST", {{"device", "fake:1"}});
  const auto copied = Good<v1::CopyBufferResponse>(
      Of<v1::CopyBufferRequest>("source: 'x' name: 't' placement: 'all'"));
  EXPECT_EQ(copied.buffer().device(), "fake:0");
}

TEST_F(TwoDevicesTest, WithoutTheFirstDeviceTheSecondIsTheDefault) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2}, {1, 2}).ok());
  first_.Fail(FakeDevice::Step::kBegin, DeviceError::Kind::kLost);
  ExpectError(Dot(Named("x"), Named("x")), "DEVICE_LOST");
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2}, {3, 4}, true).ok());
  for (const v1::Operand& operand : {Named("x"), Inline<float>(v1::DTYPE_F32, {2}, {1, 1})})
    EXPECT_EQ(GoodDot(operand, operand).stats().device(), "fake:1");
}

}  // namespace
}  // namespace tessera
