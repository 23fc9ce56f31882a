// ComputeService as a client sees it, each error with its code, reason and figures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kernels/base/element.h"
#include "kernels/base/error.h"
#include "server/call_queues.h"
#include "server/convert.h"
#include "server/operations.h"
#include "server/unary_call.h"
#include "tests/service_fixture.h"

namespace tessera {
namespace {

using grpc::StatusCode;
using testing::ElementsAre;
using testing::HasSubstr;

class ComputeServiceTest : public ServiceTest {};

// The time that decides where an operation runs counts what its messages carry to a GPU and back.
TEST(LeastMicrosecondsTest, InlineArraysTravelToAGpu) {
  FakeDevice gpu("fake:0", "", Backend::kCuda), cpu;
  v1::AddRequest request;
  *request.mutable_a() = Inline<float>(v1::DTYPE_F32, {250'000}, std::vector<float>(250'000));
  request.mutable_b()->set_buffer("x");
  const ArrayType megabyte = *MakeArrayType(DType::kF32, {250'000});
  Sources sources;
  for (const auto& named : OperandsOf(request))
    sources.push_back({.named = named, .type = megabyte, .view = WholeView(megabyte, nullptr)});
  EXPECT_DOUBLE_EQ(LeastMicroseconds(request, sources, gpu), 2 + 100);
  EXPECT_DOUBLE_EQ(LeastMicroseconds(request, sources, cpu), 500);

  const ResultType result{.scalar = false, .arrays = {megabyte}};
  const Destinations destinations = DestinationsOf(request);
  EXPECT_DOUBLE_EQ(AnswerMicroseconds(destinations, result, gpu), 100);
  EXPECT_DOUBLE_EQ(AnswerMicroseconds(destinations, result, cpu), 0);
  EXPECT_DOUBLE_EQ(AnswerMicroseconds(destinations, {.scalar = true, .arrays = {}}, gpu), 0);
  for (const bool scratch : {true, false}) {
    if (scratch) request.mutable_result()->set_scratch(true);
    if (!scratch) request.mutable_result()->mutable_buffer()->set_name("y");
    EXPECT_DOUBLE_EQ(AnswerMicroseconds(DestinationsOf(request), result, gpu), 0);
  }
}

TEST(RefusalTest, WhatMayHaveBeenDoneIsNotToBeRepeated) {
  EXPECT_FALSE(DetailsOf(ToGrpc(HostMemoryError())).retry);
  EXPECT_EQ(DetailsOf(ToGrpc(HostMemoryError())).reason, "HOST_MEMORY_EXHAUSTED");
}

// A client is asked to come back only for what there can be room for.
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
    // Nor does it matter whether he is told how much room there is.
    EXPECT_TRUE(may_repeat(reason, 100, false)) << reason;
    EXPECT_FALSE(may_repeat(reason, 101, false)) << reason;
  }
  EXPECT_TRUE(may_repeat("QUEUE_FULL", 101));
  EXPECT_FALSE(may_repeat("QUOTA_EXCEEDED", 1));
}

TEST_F(ComputeServiceTest, DotOfResidentInlineAndViewedOperands) {
  ASSERT_TRUE(server_.Put<double>("x", v1::DTYPE_F64, {2, 3}, {1, 2, 3, 4, 5, 6}).ok());
  v1::DotRequest request;
  *request.mutable_a() = InView(Named("x"), 5, {3}, {-2});
  *request.mutable_b() = Inline<double>(v1::DTYPE_F64, {3}, {1, 10, 100});
  request.set_strategy("cpu_serial");
  request.set_timing(true);
  v1::DotResponse response;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Dot, request, &response).ok());
  EXPECT_EQ(response.value().real(), 6 + 40 + 200);
  EXPECT_EQ(response.stats().strategy(), "cpu_serial");
  EXPECT_EQ(response.stats().device(), "cpu");
  EXPECT_GT(response.stats().kernel_us(), 0);
  EXPECT_GT(response.stats().bytes(), 0u);
  EXPECT_GT(response.stats().flops(), 0u);
  EXPECT_GT(response.stats().roundoff(), 0);
}

TEST_F(ComputeServiceTest, ReduceToScalars) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2, 2}, {3, -4, 1, 2}).ok());
  const std::map<v1::ReduceOp, double> expected = {{v1::REDUCE_OP_SUM, 2},
                                                   {v1::REDUCE_OP_PRODUCT, -24},
                                                   {v1::REDUCE_OP_MIN, -4},
                                                   {v1::REDUCE_OP_MAX, 3},
                                                   {v1::REDUCE_OP_ARGMIN, -4},
                                                   {v1::REDUCE_OP_ARGMAX, 3},
                                                   {v1::REDUCE_OP_MEAN, 0.5},
                                                   {v1::REDUCE_OP_NORM_L1, 10},
                                                   {v1::REDUCE_OP_NORM_L2, std::sqrt(30)},
                                                   {v1::REDUCE_OP_SUM_SQUARES, 30},
                                                   {v1::REDUCE_OP_VARIANCE, 7.25},
                                                   {v1::REDUCE_OP_STD, std::sqrt(7.25)}};
  for (const auto& [op, value] : expected) {
    v1::ReduceRequest request;
    *request.mutable_x() = Named("x");
    request.set_op(op);
    v1::ReduceResponse response;
    ASSERT_TRUE(Call(&v1::ComputeService::Stub::Reduce, request, &response).ok()) << op;
    EXPECT_DOUBLE_EQ(response.value().real(), value) << op;
    EXPECT_EQ(response.index(), op == v1::REDUCE_OP_ARGMIN ? 1 : 0) << op;
  }
}

TEST_F(ComputeServiceTest, LogicalReductionsAndIntegers) {
  const auto reduce = [&](const v1::Operand& x, v1::ReduceOp op) {
    v1::ReduceRequest request;
    *request.mutable_x() = x;
    request.set_op(op);
    v1::ReduceResponse response;
    const grpc::Status status = Call(&v1::ComputeService::Stub::Reduce, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.value();
  };
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const v1::Operand some = Inline<float>(v1::DTYPE_F32, {3}, {0, kNan, -0.0f});
  const v1::Operand every = Inline<float>(v1::DTYPE_F32, {2}, {kNan, 1e-45f});
  const v1::Operand none = Inline<float>(v1::DTYPE_F32, {0}, {});
  using testing::Pair;
  const auto logical = [&](const v1::Operand& x) {
    return std::make_pair(reduce(x, v1::REDUCE_OP_ALL).integer(),
                          reduce(x, v1::REDUCE_OP_ANY).integer());
  };
  EXPECT_THAT(logical(some), Pair(0, 1));
  EXPECT_THAT(logical(every), Pair(1, 1));
  EXPECT_THAT(logical(none), Pair(1, 0));
  EXPECT_EQ(reduce(some, v1::REDUCE_OP_ALL).value_case(), v1::Scalar::kInteger);

  const v1::Operand i = Inline<std::int32_t>(v1::DTYPE_I32, {3}, {2'000'000'000, 2'000'000'000, 2});
  EXPECT_EQ(reduce(i, v1::REDUCE_OP_SUM).integer(), 4'000'000'002);
  EXPECT_EQ(reduce(i, v1::REDUCE_OP_MAX).integer(), 2'000'000'000);
  EXPECT_EQ(reduce(i, v1::REDUCE_OP_MEAN).value_case(), v1::Scalar::kReal);
  EXPECT_DOUBLE_EQ(reduce(i, v1::REDUCE_OP_MEAN).real(), 4'000'000'002.0 / 3);
}

TEST_F(ComputeServiceTest, OperationsOfEveryDtype) {
  const auto check = [&](v1::Dtype dtype, const std::string& name, auto one, auto two, auto three,
                         auto five) {
    SCOPED_TRACE(v1::Dtype_Name(dtype));
    using T = decltype(one);
    ASSERT_TRUE(server_.Put<T>(name, dtype, {1, 2}, {one, two}).ok());
    const bool integer = dtype == v1::DTYPE_I32 || dtype == v1::DTYPE_I64;
    v1::DotResponse dot;
    ASSERT_TRUE(Dot(Named(name), Named(name), &dot).ok());
    EXPECT_EQ(integer ? static_cast<double>(dot.value().integer()) : dot.value().real(), 5);
    v1::AddRequest add;
    *add.mutable_a() = Named(name);
    *add.mutable_b() = InView(Named(name), 1, {1, 2}, {2, -1});
    v1::AddResponse sum;
    ASSERT_TRUE(Call(&v1::ComputeService::Stub::Add, add, &sum).ok());
    EXPECT_EQ(sum.tensor().dtype(), dtype);
    EXPECT_EQ(sum.tensor().data(), Bytes<T>({three, three}));
    v1::MatmulRequest matmul;
    *matmul.mutable_a() = *matmul.mutable_b() = Named(name);
    matmul.set_transpose_b(true);
    v1::MatmulResponse product;
    const grpc::Status status = Call(&v1::ComputeService::Stub::Matmul, matmul, &product);
    if (dtype == v1::DTYPE_I64) {
      ExpectError(status, StatusCode::INVALID_ARGUMENT, "BAD_DTYPE", {{"dtype", "i64"}});
    } else {
      ASSERT_TRUE(status.ok()) << status.error_message();
      EXPECT_EQ(product.tensor().data(), Bytes<T>({five}));
    }
    v1::WindowSumRequest window;
    *window.mutable_x() = InView(Named(name), 0, {2});
    window.set_radius(1);
    v1::WindowSumResponse sums;
    ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, window, &sums).ok());
    if (integer) {
      EXPECT_EQ(sums.tensor().dtype(), v1::DTYPE_I64);
      EXPECT_THAT(Values<std::int64_t>(sums.tensor().data()), ElementsAre(3, 3));
    } else {
      EXPECT_EQ(sums.tensor().dtype(), dtype);
      EXPECT_EQ(sums.tensor().data(), Bytes<T>({three, three}));
    }
  };
  check(v1::DTYPE_F32, "f32", 1.0f, 2.0f, 3.0f, 5.0f);
  check(v1::DTYPE_F64, "f64", 1.0, 2.0, 3.0, 5.0);
  check(v1::DTYPE_F16, "f16", Half(1), Half(2), Half(3), Half(5));
  check(v1::DTYPE_BF16, "bf16", BFloat16(1), BFloat16(2), BFloat16(3), BFloat16(5));
  check(v1::DTYPE_I32, "i32", std::int32_t{1}, std::int32_t{2}, std::int32_t{3}, std::int32_t{5});
  check(v1::DTYPE_I64, "i64", std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{5});
}

TEST_F(ComputeServiceTest, WindowSumOfViewsAndIntoBuffers) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2, 3}, {1, 2, 3, 4, 5, 6}).ok());
  v1::WindowSumRequest request;
  *request.mutable_x() = InView(Named("x"), 5, {6}, {-1});
  request.set_radius(2);
  request.set_strategy("cpu");
  request.set_timing(true);
  v1::WindowSumResponse response;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, request, &response).ok());
  EXPECT_THAT(response.tensor().shape(), ElementsAre(6));
  EXPECT_THAT(Values<float>(response.tensor().data()), ElementsAre(15, 18, 20, 15, 10, 6));
  EXPECT_EQ(response.stats().strategy(), "cpu");
  EXPECT_GT(response.stats().kernel_us(), 0);
  // Far wider than the array, and the narrowest.
  request.set_radius(std::numeric_limits<std::int64_t>::max());
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, request, &response).ok());
  EXPECT_THAT(Values<float>(response.tensor().data()), testing::Each(21));
  request.set_radius(0);
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, request, &response).ok());
  EXPECT_THAT(Values<float>(response.tensor().data()), ElementsAre(6, 5, 4, 3, 2, 1));

  // Into the buffer it reads.
  v1::BufferTarget* target = request.mutable_result()->mutable_buffer();
  target->set_name("x");
  ExpectError(Call(&v1::ComputeService::Stub::WindowSum, request, &response),
              StatusCode::ALREADY_EXISTS, "BUFFER_EXISTS", {{"name", "x"}});
  target->set_replace(true);
  response.Clear();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, request, &response).ok());
  EXPECT_FALSE(response.has_tensor());
  std::string data;
  ASSERT_TRUE(server_.Fetch("x", &data).ok());
  EXPECT_THAT(Values<float>(data), ElementsAre(6, 5, 4, 3, 2, 1));

  *request.mutable_x() = Inline<double>(v1::DTYPE_F64, {0}, {});
  request.clear_result();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::WindowSum, request, &response).ok());
  EXPECT_EQ(response.tensor().data(), "");
}

TEST_F(ComputeServiceTest, ErrorsOfWindowSum) {
  v1::WindowSumRequest request;
  v1::WindowSumResponse response;
  const auto call = [&] { return Call(&v1::ComputeService::Stub::WindowSum, request, &response); };
  *request.mutable_x() = Inline<float>(v1::DTYPE_F32, {2}, {1, 2});
  request.set_radius(-1);
  ExpectError(call(), StatusCode::INVALID_ARGUMENT, "BAD_RADIUS", {{"value", "-1"}});
  request.set_radius(1);
  request.set_strategy("widest");
  ExpectError(call(), StatusCode::INVALID_ARGUMENT, "UNKNOWN_STRATEGY", {{"valid", "*"}});
  request.clear_strategy();
  *request.mutable_x() = Inline<float>(v1::DTYPE_F32, {1, 2}, {1, 2});
  ExpectError(call(), StatusCode::INVALID_ARGUMENT, "BAD_SHAPE");
  *request.mutable_x() = Named("none");
  ExpectError(call(), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND", {{"name", "none"}});
  *request.mutable_x() =
      InView(Inline<double>(v1::DTYPE_F64, {}, {1}), 0, {(4 << 20) / 8 + 1}, {0});
  ExpectError(call(), StatusCode::INVALID_ARGUMENT, "RESULT_TOO_LARGE", {{"limit", "4128768"}});
  request.mutable_x()->mutable_view()->set_shape(0, std::int64_t{1} << 30);
  request.mutable_result()->mutable_buffer()->set_name("huge");
  ExpectError(call(), StatusCode::RESOURCE_EXHAUSTED, "SCRATCH_EXHAUSTED",
              {{"requested", std::to_string(std::int64_t{8} << 30)}});
}

TEST_F(ComputeServiceTest, ReduceAlongAxes) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2, 3}, {1, 2, 3, 4, 5, 6}).ok());
  v1::ReduceRequest request;
  *request.mutable_x() = Named("x");
  request.set_op(v1::REDUCE_OP_SUM);
  request.add_axes(1);
  request.set_keep_dims(true);
  v1::ReduceResponse response;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Reduce, request, &response).ok());
  EXPECT_THAT(response.tensor().shape(), ElementsAre(2, 1));
  EXPECT_THAT(Values<float>(response.tensor().data()), ElementsAre(6, 15));
  EXPECT_FALSE(response.has_value());

  request.set_op(v1::REDUCE_OP_ARGMAX);
  request.set_axes(0, -2);
  request.set_keep_dims(false);
  request.mutable_result()->mutable_buffer()->set_name("winners");
  response.Clear();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Reduce, request, &response).ok());
  EXPECT_EQ(response.buffer().name(), "winners");
  EXPECT_EQ(response.buffer().dtype(), v1::DTYPE_I64);
  std::string data;
  ASSERT_TRUE(server_.Fetch("winners", &data).ok());
  EXPECT_THAT(Values<std::int64_t>(data), ElementsAre(1, 1, 1));
}

TEST_F(ComputeServiceTest, MatmulAndAddIntoBuffersThatMayBeTheirOperands) {
  ASSERT_TRUE(server_.Put<float>("a", v1::DTYPE_F32, {2, 3}, {1, 2, 3, 4, 5, 6}).ok());
  v1::MatmulRequest matmul;
  *matmul.mutable_a() = Named("a");
  *matmul.mutable_b() = Named("a");
  matmul.set_transpose_b(true);
  v1::MatmulResponse product;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Matmul, matmul, &product).ok());
  EXPECT_THAT(product.tensor().shape(), ElementsAre(2, 2));
  EXPECT_THAT(Values<float>(product.tensor().data()), ElementsAre(14, 32, 32, 77));

  matmul.mutable_result()->mutable_buffer()->set_name("a");
  ExpectError(Call(&v1::ComputeService::Stub::Matmul, matmul, &product), StatusCode::ALREADY_EXISTS,
              "BUFFER_EXISTS", {{"name", "a"}});
  matmul.mutable_result()->mutable_buffer()->set_replace(true);
  product.Clear();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Matmul, matmul, &product).ok());
  EXPECT_EQ(product.buffer().state(), v1::Buffer::STATE_READY);

  v1::AddRequest add;
  *add.mutable_a() = Named("a");
  *add.mutable_b() = InView(Inline<float>(v1::DTYPE_F32, {2}, {100, 200}), 0, {2, 2}, {0, 1});
  add.mutable_result()->set_inline_(true);
  v1::AddResponse sum;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Add, add, &sum).ok());
  EXPECT_THAT(Values<float>(sum.tensor().data()), ElementsAre(114, 232, 132, 277));
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes() == Charged(16); }))
      << "the old a is gone";
}

TEST_F(ComputeServiceTest, FailedOperationLeavesNoBuffer) {
  v1::AddRequest add;
  *add.mutable_a() = Inline<float>(v1::DTYPE_F32, {2}, {1, 2});
  *add.mutable_b() = Inline<float>(v1::DTYPE_F32, {2}, {1, 2});
  add.set_strategy("nope");
  v1::BufferTarget* target = add.mutable_result()->mutable_buffer();
  target->set_name("sum");
  v1::AddResponse sum;
  ExpectError(Call(&v1::ComputeService::Stub::Add, add, &sum), StatusCode::INVALID_ARGUMENT,
              "UNKNOWN_STRATEGY", {{"valid", "*"}});
  v1::GetBufferResponse got;
  ExpectError(Get("sum", &got), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND");
  EXPECT_EQ(server_.used_bytes(), 0u);
  add.clear_strategy();
  target->mutable_ttl()->set_seconds(-4);
  ExpectError(Call(&v1::ComputeService::Stub::Add, add, &sum), StatusCode::INVALID_ARGUMENT,
              "BAD_TTL");
  target->mutable_ttl()->set_seconds(40);
  target->set_name("not a name");
  ExpectError(Call(&v1::ComputeService::Stub::Add, add, &sum), StatusCode::INVALID_ARGUMENT,
              "BAD_NAME", {{"value", "not a name"}});
  target->set_name("sum");
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Add, add, &sum).ok());
  EXPECT_TRUE(sum.buffer().has_expire_time());
}

TEST_F(ComputeServiceTest, ErrorsOfOperands) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
  const v1::Operand x = Named("x");
  v1::DotResponse response;
  ExpectError(Dot(x, Named("y"), &response), StatusCode::NOT_FOUND, "BUFFER_NOT_FOUND",
              {{"name", "y"}});
  ExpectError(Dot(x, v1::Operand(), &response), StatusCode::INVALID_ARGUMENT, "BAD_OPERAND",
              {{"field", "source"}});
  ExpectError(Dot(x, Inline<float>(v1::DTYPE_F32, {4}, {1, 2, 3}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_OPERAND",
              {{"field", "tensor.data"}, {"value", "12"}, {"expected", "16"}});
  ExpectError(Dot(x, Inline<float>(v1::DTYPE_UNSPECIFIED, {3}, {1, 2, 3}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_DTYPE");
  ExpectError(Dot(x, Inline<float>(v1::DTYPE_F32, {-3}, {}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_SHAPE");
  ExpectError(Dot(x, Inline<float>(v1::DTYPE_F32, {2}, {1, 2}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_SHAPE", {{"a", "[3]"}, {"b", "[2]"}});
  ExpectError(Dot(x, Inline<double>(v1::DTYPE_F64, {3}, {1, 2, 3}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_DTYPE", {{"a", "f32"}, {"b", "f64"}});
  ExpectError(Dot(x, InView(x, 1, {3}), &response), StatusCode::INVALID_ARGUMENT, "BAD_VIEW",
              {{"field", "*"}, {"value", "*"}, {"limit", "*"}});
  ExpectError(Dot(x, InView(x, 0, {3}, {std::numeric_limits<std::int64_t>::max()}), &response),
              StatusCode::INVALID_ARGUMENT, "BAD_VIEW");
  ExpectError(Dot(x, InView(x, 0, {3}, {1, 1}), &response), StatusCode::INVALID_ARGUMENT,
              "BAD_VIEW");
}

TEST_F(ComputeServiceTest, ErrorsOfStrategies) {
  const v1::Operand x = Inline<float>(v1::DTYPE_F32, {3}, {1, 2, 3});
  v1::DotResponse response;
  const grpc::Status unknown = Dot(x, x, &response, "fastest");
  ExpectError(unknown, StatusCode::INVALID_ARGUMENT, "UNKNOWN_STRATEGY", {{"valid", "*"}});
  EXPECT_THAT(DetailsOf(unknown).metadata["valid"], HasSubstr("cpu_serial"));
  const std::string long_name(100'000, 's');
  ExpectError(Dot(x, x, &response, long_name), StatusCode::INVALID_ARGUMENT, "UNKNOWN_STRATEGY");

  v1::MatmulRequest matmul;
  *matmul.mutable_a() = *matmul.mutable_b() = Inline<std::int32_t>(v1::DTYPE_I32, {1, 1}, {3});
  matmul.set_strategy("cpu_library");
  v1::MatmulResponse product;
  ExpectError(Call(&v1::ComputeService::Stub::Matmul, matmul, &product),
              StatusCode::FAILED_PRECONDITION, "STRATEGY_UNSUPPORTED",
              {{"strategy", "cpu_library"}, {"dtype", "i32"}, {"needs", "operands of f32, f64"}});

  v1::DotRequest request;
  *request.mutable_a() = x;
  *request.mutable_b() = x;
  request.set_strategy("cpu_serial");
  request.mutable_launch()->set_block_size(64);
  ExpectError(Call(&v1::ComputeService::Stub::Dot, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_LAUNCH", {{"value", "64"}, {"range", "*"}});
}

TEST_F(ComputeServiceTest, ErrorsOfReductions) {
  v1::ReduceRequest request;
  v1::ReduceResponse response;
  *request.mutable_x() = Inline<float>(v1::DTYPE_F32, {0}, {});
  request.set_op(v1::REDUCE_OP_MIN);
  ExpectError(Call(&v1::ComputeService::Stub::Reduce, request, &response),
              StatusCode::INVALID_ARGUMENT, "EMPTY_INPUT", {{"op", "min"}});
  *request.mutable_x() = Inline<float>(v1::DTYPE_F32, {2}, {1, 2});
  request.clear_op();
  ExpectError(Call(&v1::ComputeService::Stub::Reduce, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_OPERATION", {{"field", "op"}, {"value", "0"}});
  request.set_op(v1::REDUCE_OP_SUM);
  request.add_axes(1);
  ExpectError(Call(&v1::ComputeService::Stub::Reduce, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_AXES", {{"axis", "1"}, {"rank", "1"}});
  request.set_axes(0, 0);
  request.add_axes(-1);
  ExpectError(Call(&v1::ComputeService::Stub::Reduce, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_AXES");
  request.clear_axes();
  request.mutable_result()->mutable_buffer()->set_name("r");
  ExpectError(Call(&v1::ComputeService::Stub::Reduce, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_AXES", {{"field", "axes"}});
}

TEST_F(ComputeServiceTest, ResultsTooLargeForAResponse) {
  v1::AddRequest add;
  *add.mutable_a() =
      InView(Inline<double>(v1::DTYPE_F64, {}, {1}), 0, {kMaxInlineResult / 8 + 1}, {0});
  *add.mutable_b() = add.a();
  v1::AddResponse sum;
  ExpectError(Call(&v1::ComputeService::Stub::Add, add, &sum), StatusCode::INVALID_ARGUMENT,
              "RESULT_TOO_LARGE", {{"size", "4128776"}, {"limit", "4128768"}});
  add.mutable_a()->mutable_view()->set_shape(0, kMaxInlineResult / 8);
  *add.mutable_b() = add.a();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Add, add, &sum).ok());
  EXPECT_EQ(Values<double>(sum.tensor().data()), std::vector<double>(kMaxInlineResult / 8, 2.0));
  v1::MatmulRequest matmul;
  *matmul.mutable_a() = InView(Inline<float>(v1::DTYPE_F32, {}, {1}), 0, {1 << 14, 0}, {0, 0});
  *matmul.mutable_b() = InView(Inline<float>(v1::DTYPE_F32, {}, {1}), 0, {0, 1 << 14}, {0, 0});
  matmul.mutable_result()->mutable_buffer()->set_name("huge");
  v1::MatmulResponse product;
  ExpectError(Call(&v1::ComputeService::Stub::Matmul, matmul, &product),
              StatusCode::RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED",
              {{"requested", std::to_string(std::int64_t{1} << 30)}});
}

// That many dots with statistics, and then arrays in the response, one of each of these sizes.
v1::ExecuteRequest DotsAndArrays(int dots, const std::vector<std::int64_t>& sizes) {
  v1::ExecuteRequest request;
  request.set_stats(true);
  for (int i = 0; i < dots; ++i) {
    v1::DotRequest& dot = *request.add_steps()->mutable_dot();
    *dot.mutable_a() = *dot.mutable_b() = Named("x");
  }
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
    v1::ExecuteResponse response;
    EXPECT_TRUE(
        Call(&v1::ComputeService::Stub::Execute, DotsAndArrays(dots, sizes), &response).ok());
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
  // 512 bytes a step, of which 64 KiB are reserved in addition to the arrays.
  EXPECT_THAT(run(127, {kMost}), ElementsAre(""));
  EXPECT_THAT(run(128, {kMost}), ElementsAre(refused));
  EXPECT_THAT(run(128, {kMost - 512}), ElementsAre(""));
  // Arrays together; what is refused takes nothing.
  EXPECT_THAT(run(0, {kMost / 2, kMost / 2 + 8, kMost / 2, 8}),
              ElementsAre("", refused, "", refused));
}

// Neither what is computed together nor what is not depends on its neighbours.
TEST_F(ComputeServiceTest, ABatchIsOfOneOperationAndOneType) {
  ASSERT_TRUE(server_.Put<float>("f32", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
  ASSERT_TRUE(server_.Put<double>("f64", v1::DTYPE_F64, {3}, {4, 5, 7}).ok());
  v1::ExecuteRequest request;
  std::vector<double> expected;
  const auto dot = [&](const std::string& name, double value) {
    v1::DotRequest& step = *request.add_steps()->mutable_dot();
    *step.mutable_a() = *step.mutable_b() = Named(name);
    expected.push_back(value);
  };
  const auto reduce = [&](v1::ReduceOp op, const std::string& name, double value) {
    v1::ReduceRequest& step = *request.add_steps()->mutable_reduce();
    step.set_op(op);
    *step.mutable_x() = Named(name);
    expected.push_back(value);
  };
  for (int round = 0; round < 3; ++round) {
    for (int twice = 0; twice < 2; ++twice) dot("f32", 14);
    for (int twice = 0; twice < 2; ++twice) dot("f64", 90);
    for (int twice = 0; twice < 2; ++twice) reduce(v1::REDUCE_OP_SUM, "f32", 6);
    reduce(v1::REDUCE_OP_SUM, "f64", 16);
    reduce(v1::REDUCE_OP_MAX, "f64", 7);
    reduce(v1::REDUCE_OP_MAX, "f32", 3);
    reduce(v1::REDUCE_OP_MIN, "f32", 1);
  }
  v1::ExecuteResponse response;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Execute, request, &response).ok());
  std::vector<double> found;
  for (const v1::StepResult& result : response.results())
    found.push_back(result.has_dot() ? result.dot().value().real()
                                     : result.reduce().value().real());
  EXPECT_EQ(found, expected);
}

TEST_F(ComputeServiceTest, ListStrategiesFilters) {
  v1::ListStrategiesRequest request;
  v1::ListStrategiesResponse response;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::ListStrategies, request, &response).ok());
  const int all = response.strategies_size();
  int defaults = 0;
  for (const v1::Strategy& row : response.strategies()) {
    EXPECT_FALSE(row.name().empty());
    EXPECT_GT(row.dtypes_size(), 0);
    EXPECT_NE(row.available(), !row.needs().empty()) << row.name();
    defaults += row.default_();
  }
  EXPECT_EQ(defaults, 8) << "one an operation";
  request.set_operation("dot");
  request.set_backend("cpu");
  response.Clear();
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::ListStrategies, request, &response).ok());
  EXPECT_GT(response.strategies_size(), 0);
  EXPECT_LT(response.strategies_size(), all);
  for (const v1::Strategy& row : response.strategies()) EXPECT_EQ(row.operation(), "dot");
  request.set_operation("sort");
  ExpectError(Call(&v1::ComputeService::Stub::ListStrategies, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_OPERATION",
              {{"field", "operation"}, {"value", "sort"}, {"valid", "*"}});
  request.set_operation("");
  request.set_backend("tpu");
  ExpectError(Call(&v1::ComputeService::Stub::ListStrategies, request, &response),
              StatusCode::INVALID_ARGUMENT, "BAD_OPERATION",
              {{"field", "backend"}, {"value", "tpu"}, {"valid", "cpu, cuda"}});
}

TEST_F(ComputeServiceTest, ServerInfo) {
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(
      Call(&v1::ComputeService::Stub::GetServerInfo, v1::GetServerInfoRequest(), &info).ok());
  ASSERT_EQ(info.devices_size(), 1);
  EXPECT_EQ(info.devices(0).name(), "cpu");
  EXPECT_EQ(info.devices(0).buffer_limit_bytes(), 256u << 20);
  EXPECT_EQ(info.devices(0).workers(), 2);
  EXPECT_EQ(info.devices(0).waiting(), 0u);
  EXPECT_EQ(info.limits().max_message_bytes(), 4259840u);
  EXPECT_EQ(info.limits().max_inline_result_bytes(), (4u << 20) - (64u << 10));
  EXPECT_EQ(info.limits().queue_length(), 1024u);
  EXPECT_FALSE(info.limits().has_max_ttl());
  EXPECT_FALSE(info.version().empty());
}

TEST_F(TwoDevicesTest, OperationsRunWhereTheirOperandsLive) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2}, {1, 2}).ok());
  ASSERT_TRUE(server_.Put<float>("y", v1::DTYPE_F32, {2}, {3, 4}, false, "fake:1").ok());
  v1::DotResponse response;
  ASSERT_TRUE(Dot(Named("x"), Named("x"), &response).ok());
  EXPECT_EQ(response.stats().device(), "fake:0");
  ASSERT_TRUE(Dot(Inline<float>(v1::DTYPE_F32, {2}, {1, 1}), Named("y"), &response).ok());
  EXPECT_EQ(response.stats().device(), "fake:1");
  EXPECT_EQ(response.value().real(), 7);
  // Of equal sizes, the first operand stays where it is.
  ASSERT_TRUE(Dot(Named("x"), Named("y"), &response).ok());
  EXPECT_EQ(response.stats().device(), "fake:0");
  EXPECT_EQ(response.value().real(), 11);
  EXPECT_EQ(server_.used_bytes(0), Charged(8));
  EXPECT_EQ(server_.used_bytes(1), Charged(8));
}

// Another caller takes the name of one array while both are computed.
TEST_F(TwoDevicesTest, BothArraysOfTopKGetTheirNamesOrNone) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {4}, {1, 4, 3, 2}).ok());
  ASSERT_TRUE(server_.Put<float>("values", v1::DTYPE_F32, {1}, {7}).ok());
  v1::TopKRequest request;
  *request.mutable_x() = Named("x");
  request.set_k(2);
  request.mutable_values()->mutable_buffer()->set_name("values");
  request.mutable_values()->mutable_buffer()->set_replace(true);
  request.mutable_indices()->mutable_buffer()->set_name("indices");
  first_.Close(FakeDevice::Step::kSynchronize);
  auto answer = std::async(std::launch::async, [&] {
    v1::TopKResponse response;
    return Call(&v1::ComputeService::Stub::TopK, request, &response);
  });
  first_.WaitForBlocked(1);
  ASSERT_TRUE(server_.Put<float>("indices", v1::DTYPE_F32, {1}, {8}, true, "fake:1").ok());
  first_.Open();
  ExpectError(answer.get(), StatusCode::ALREADY_EXISTS, "BUFFER_EXISTS", {{"name", "indices"}});
  std::string data;
  ASSERT_TRUE(server_.Fetch("values", &data).ok());
  EXPECT_EQ(Values<float>(data), std::vector<float>{7});
  ASSERT_TRUE(Delete("indices").ok());
  v1::TopKResponse response;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::TopK, request, &response).ok());
  ASSERT_TRUE(server_.Fetch("values", &data).ok());
  EXPECT_EQ(Values<float>(data), (std::vector<float>{4, 3}));
  ASSERT_TRUE(server_.Fetch("indices", &data).ok());
  EXPECT_EQ(Values<std::int64_t>(data), (std::vector<std::int64_t>{1, 2}));
}

// --- Host memory ---------------------------------------------------------------------------------

Options WithHostMemory(std::uint64_t bytes) {
  Options options = TestOptions();
  options.host_memory = bytes;
  return options;
}

v1::AddRequest AddInto(const std::string& name) {
  v1::AddRequest request;
  *request.mutable_a() = *request.mutable_b() = Inline<float>(v1::DTYPE_F32, {1}, {1});
  if (!name.empty()) request.mutable_result()->mutable_buffer()->set_name(name);
  return request;
}

// The host memory is too small for a response that describes a buffer.
class NoRoomForAnswers : public ServiceTest {
 protected:
  NoRoomForAnswers() : ServiceTest(WithHostMemory(300)) {}
};

TEST_F(NoRoomForAnswers, WhatIsRefusedHasNotBeenDone) {
  v1::AddResponse added;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Add, AddInto("x"), &added).ok());
  v1::CopyBufferRequest link;
  link.set_source("x");
  link.set_name("link");
  link.set_link(true);
  v1::CopyBufferResponse linked;
  for (int i = 0; i < 2; ++i) {
    ExpectError(Create("draft", {1}), StatusCode::RESOURCE_EXHAUSTED, "HOST_MEMORY_EXHAUSTED");
    ExpectError(Call(&v1::BufferService::Stub::CopyBuffer, link, &linked),
                StatusCode::RESOURCE_EXHAUSTED, "HOST_MEMORY_EXHAUSTED");
  }
  for (const char* name : {"draft", "link"})
    EXPECT_TRUE(Call(&v1::ComputeService::Stub::Add, AddInto(name), &added).ok()) << name;
  EXPECT_TRUE(Delete("x").ok()) << "what answers with nothing needs no room";
}

// The name, the shape and the shards have the largest sizes that are allowed.
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

class LittleRoomForAnswers : public ServiceTest {
 protected:
  LittleRoomForAnswers() : LittleRoomForAnswers(new FakeDevice) {}
  explicit LittleRoomForAnswers(FakeDevice* device)
      : ServiceTest(WithHostMemory(16 << 10), Only(device)), device_(*device) {}

  FakeDevice& device_;
};

TEST_F(LittleRoomForAnswers, AProgramWhoseAnswerHasNoRoomDoesNotBegin) {
  v1::ExecuteRequest request;
  v1::AddRequest& add = *request.add_steps()->mutable_add();
  add = AddInto("");
  *add.mutable_a() = InView(add.a(), 0, {4096}, {0});
  *add.mutable_b() = add.a();
  add.set_timing(true);  // so that the device sees it
  const int before = device_.Count(FakeDevice::Step::kLaunch);
  v1::ExecuteResponse response;
  ExpectError(Call(&v1::ComputeService::Stub::Execute, request, &response),
              StatusCode::RESOURCE_EXHAUSTED, "HOST_MEMORY_EXHAUSTED");
  EXPECT_EQ(device_.Count(FakeDevice::Step::kLaunch), before);
  add.mutable_result()->set_scratch(true);
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Execute, request, &response).ok());
  EXPECT_GT(device_.Count(FakeDevice::Step::kLaunch), before);
}

// --- Callers who leave ---------------------------------------------------------------------------

class OneWorker : public ServiceTest {
 protected:
  OneWorker() : OneWorker(new FakeDevice) {}
  explicit OneWorker(FakeDevice* device)
      : ServiceTest(
            [] {
              Options options = TestOptions();
              options.workers = 1;
              return options;
            }(),
            Only(device)),
        device_(*device) {}
  void TearDown() override {
    device_.Open();
    ServiceTest::TearDown();
  }

  FakeDevice& device_;
};

// The operands are deleted while the call runs, so that it frees their memory.
TEST_F(OneWorker, MemoryOfACancelledCallIsFreedByNoThreadThatTakesCalls) {
  std::atomic<int> freed{0}, by_queues{0};
  device_.OnFree([&] {
    const CallQueue::Leave leave;  // is granted only to a thread of a queue
    by_queues += leave.granted();
    ++freed;
  });
  v1::ReduceRequest reduce;
  reduce.set_op(v1::REDUCE_OP_SUM);
  *reduce.mutable_x() = Named("x");
  v1::CopyBufferRequest copy;
  copy.set_source("x");
  copy.set_name("copy");
  v1::ExecuteRequest execute;
  *execute.add_steps()->mutable_reduce() = reduce;
  grpc::CompletionQueue events;
  const auto cancel = [&](auto prepare, const auto& request, auto response) {
    ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {3}, {1, 2, 3}).ok());
    device_.Close(FakeDevice::Step::kBegin);
    auto held = std::async(std::launch::async, [&] {
      v1::DotResponse answer;
      const v1::Operand x = Inline<float>(v1::DTYPE_F32, {3}, {1, 2, 3});
      return Dot(x, x, &answer, "cpu_serial");
    });
    device_.WaitForBlocked(1);
    grpc::ClientContext context;
    grpc::Status status;
    auto call = prepare(&context, request, &events);
    call->StartCall();
    call->Finish(&response, &status, &status);
    ASSERT_TRUE(Eventually([&] { return server_.Info().waiting() == 1; }));
    ASSERT_TRUE(Delete("x").ok());
    const int before = freed;
    context.TryCancel();
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(events.Next(&tag, &ok));
    EXPECT_TRUE(Eventually([&] { return freed > before; }));
    device_.Open();
    EXPECT_TRUE(held.get().ok());
  };
  v1::ComputeService::Stub& compute = server_.compute();
  cancel([&](auto&&... all) { return compute.PrepareAsyncReduce(all...); }, reduce,
         v1::ReduceResponse());
  cancel([&](auto&&... all) { return compute.PrepareAsyncExecute(all...); }, execute,
         v1::ExecuteResponse());
  cancel([&](auto&&... all) { return server_.buffers().PrepareAsyncCopyBuffer(all...); }, copy,
         v1::CopyBufferResponse());
  EXPECT_EQ(by_queues, 0) << "of " << freed;
  events.Shutdown();
  device_.OnFree(nullptr);
}

TEST_F(TwoDevicesTest, AnOperandThatCannotBeFetchedFailsWhatNeedsIt) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2}, {1, 2}).ok());
  ASSERT_TRUE(server_.Put<float>("y", v1::DTYPE_F32, {2}, {3, 4}, false, "fake:1").ok());

  second_.Fail(FakeDevice::Step::kCopyToHost, DeviceError::Kind::kFailed);
  v1::DotResponse response;
  ExpectError(Dot(Named("x"), Named("y"), &response), StatusCode::INTERNAL, "CUDA_ERROR",
              {{"device", "fake:1"}, {"operand", "b"}});
  ASSERT_TRUE(Dot(Named("x"), Named("y"), &response).ok());

  // y by two steps, and twice by one; what follows from it; and what does not need it.
  v1::ExecuteRequest request;
  const auto add_dot = [&](const v1::Operand& a, const v1::Operand& b) {
    v1::DotRequest& dot = *request.add_steps()->mutable_dot();
    *dot.mutable_a() = a;
    *dot.mutable_b() = b;
  };
  add_dot(Named("x"), Named("y"));
  add_dot(Named("y"), Named("x"));
  v1::AddRequest& add = *request.add_steps()->mutable_add();
  *add.mutable_a() = *add.mutable_b() = Named("y");
  add.mutable_result()->set_scratch(true);
  v1::Operand sum;
  sum.set_step(2);
  add_dot(sum, Named("x"));
  add_dot(Named("x"), sum);
  add_dot(Named("x"), Named("x"));
  second_.Fail(FakeDevice::Step::kCopyToHost, DeviceError::Kind::kFailed);
  v1::ExecuteResponse results;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Execute, request, &results).ok());
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
  const std::vector<std::int64_t> shape{1 << 20};
  v1::ExecuteRequest request;
  v1::ReduceRequest& sum = *request.add_steps()->mutable_reduce();
  *sum.mutable_x() = Inline<double>(v1::DTYPE_F64, {2}, {7, 8});
  sum.set_op(v1::REDUCE_OP_SUM);
  v1::AddRequest& add = *request.add_steps()->mutable_add();
  *add.mutable_a() = InView(Inline<float>(v1::DTYPE_F32, {1}, {2}), 0, shape, {0});
  *add.mutable_b() = InView(Inline<float>(v1::DTYPE_F32, {1}, {3}), 0, shape, {0});
  add.mutable_result()->set_scratch(true);
  v1::DotRequest& dot = *request.add_steps()->mutable_dot();
  dot.mutable_a()->set_step(1);
  *dot.mutable_a() = InView(dot.a(), 0, {3});
  *dot.mutable_b() = Inline<float>(v1::DTYPE_F32, {3}, {1, 10, 100});
  const std::uint64_t before = first_.copied_to_device();
  v1::ExecuteResponse results;
  ASSERT_TRUE(Call(&v1::ComputeService::Stub::Execute, request, &results).ok());
  EXPECT_EQ(results.results(0).reduce().value().real(), 15);
  EXPECT_EQ(results.results(2).dot().value().real(), 555);
  EXPECT_LE(first_.copied_to_device() - before, 4096u)
      << "nothing of the 4 MiB of scratch memory between them";
}

TEST_F(TwoDevicesTest, StatisticsTellWhatMoved) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {6}, {1, 2, 3, 4, 5, 6}).ok());
  ASSERT_TRUE(
      server_.Put<float>("y", v1::DTYPE_F32, {6}, {1, 1, 1, 2, 2, 2}, false, "fake:1").ok());
  v1::DotResponse response;
  ASSERT_TRUE(Dot(Named("x"), Named("x"), &response).ok());
  EXPECT_EQ(response.stats().moved_bytes(), 0u);
  ASSERT_TRUE(Dot(Named("x"), Named("y"), &response).ok());
  EXPECT_EQ(response.stats().moved_bytes(), 24u);
  // From the third element to the fifth.
  ASSERT_TRUE(
      Dot(InView(Named("x"), 0, {2}, {5}), InView(Named("y"), 2, {2}, {2}), &response).ok());
  EXPECT_EQ(response.value().real(), 13);
  EXPECT_EQ(response.stats().moved_bytes(), 12u);

  v1::ExecuteRequest request;
  request.set_stats(true);
  for (int i = 0; i < 2; ++i) {
    v1::DotRequest& dot = *request.add_steps()->mutable_dot();
    dot.mutable_a()->set_buffer("x");
    dot.mutable_b()->set_buffer("y");
  }
  grpc::ClientContext context;
  v1::ExecuteResponse results;
  ASSERT_TRUE(server_.compute().Execute(&context, request, &results).ok());
  EXPECT_EQ(results.results(0).dot().stats().moved_bytes(), 24u);
  EXPECT_EQ(results.results(1).dot().stats().moved_bytes(), 0u) << "it moves once";
}

TEST_F(TwoDevicesTest, ALostDeviceTakesItsBuffersAlong) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2}, {1, 2}).ok());
  ASSERT_TRUE(server_.Put<float>("y", v1::DTYPE_F32, {2}, {3, 4}, false, "fake:1").ok());
  v1::CreateBufferRequest draft;
  draft.set_name("draft");
  draft.mutable_spec()->set_dtype(v1::DTYPE_F32);
  draft.mutable_spec()->add_shape(2);
  draft.mutable_spec()->set_device("fake:1");
  v1::CreateBufferResponse created;
  ASSERT_TRUE(Call(&v1::BufferService::Stub::CreateBuffer, draft, &created).ok());

  second_.Fail(FakeDevice::Step::kBegin, DeviceError::Kind::kLost);
  v1::DotResponse response;
  ExpectError(Dot(Named("y"), Named("y"), &response), StatusCode::UNAVAILABLE, "DEVICE_LOST",
              {{"device", "fake:1"}});
  v1::GetBufferResponse got;
  for (const char* name : {"y", "draft"}) {
    ASSERT_TRUE(Eventually([&] { return Get(name, &got).error_code() == StatusCode::NOT_FOUND; }))
        << name;
  }
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes(1) == 0; }));
  EXPECT_TRUE(server_.Info(1).lost());
  EXPECT_FALSE(server_.Info(0).lost());

  ASSERT_TRUE(Dot(Named("x"), Named("x"), &response).ok());
  EXPECT_EQ(response.value().real(), 5);
  ExpectError(Call(&v1::BufferService::Stub::CreateBuffer, draft, &created),
              StatusCode::UNAVAILABLE, "DEVICE_LOST", {{"device", "fake:1"}});
  EXPECT_TRUE(server_.Put<float>("y", v1::DTYPE_F32, {2}, {5, 6}).ok()) << "the name is free";
}

// x, and s: the same on both devices.
class ShardedTest : public TwoDevicesTest, public testing::WithParamInterface<FakeDevice::Step> {
 protected:
  // Rows of the fixed tree, in four chunks.
  static constexpr std::int64_t kUnits = 16, kFloats = kUnits * 4096 / 4;
  void SetUp() override {
    const std::vector<float> ones(kFloats, 1);
    ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {kFloats}, ones).ok());
    v1::CopyBufferRequest request;
    request.set_source("x");
    request.set_name("s");
    request.add_placement("all");
    v1::CopyBufferResponse copied;
    ASSERT_TRUE(Call(&v1::BufferService::Stub::CopyBuffer, request, &copied).ok());
    ASSERT_EQ(copied.buffer().shards_size(), 2);
    EXPECT_EQ(copied.buffer().shards(1).device(), "fake:1");
    EXPECT_EQ(server_.used_bytes(1), kUnits / 2 * 4096u);
  }
};

TEST_P(ShardedTest, ALostDeviceTakesTheBuffersAlongThatItHasAPartOf) {
  v1::DotResponse response;
  ASSERT_TRUE(Dot(Named("s"), Named("s"), &response).ok());
  EXPECT_EQ(response.value().real(), kFloats);
  EXPECT_EQ(response.stats().devices(), 2u);
  EXPECT_EQ(response.stats().device(), "fake:0");

  // The helper fails; the device on which the call runs does not.
  second_.Fail(GetParam(), DeviceError::Kind::kLost);
  ExpectError(Dot(Named("s"), Named("s"), &response), StatusCode::UNAVAILABLE, "DEVICE_LOST",
              {{"device", "fake:1"}});
  v1::GetBufferResponse got;
  EXPECT_TRUE(Eventually([&] { return Get("s", &got).error_code() == StatusCode::NOT_FOUND; }));
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes(0) == kUnits * 4096u; }));
  EXPECT_EQ(server_.used_bytes(1), 0u);
  EXPECT_TRUE(server_.Info(1).lost());
  EXPECT_FALSE(server_.Info(0).lost());
  ASSERT_TRUE(Dot(Named("x"), Named("x"), &response).ok());
  EXPECT_EQ(response.value().real(), kFloats);

  v1::CopyBufferRequest request;
  request.set_source("x");
  request.set_name("t");
  request.add_placement("fake:0");
  request.add_placement("fake:1");
  v1::CopyBufferResponse copied;
  ExpectError(Call(&v1::BufferService::Stub::CopyBuffer, request, &copied), StatusCode::UNAVAILABLE,
              "DEVICE_LOST", {{"device", "fake:1"}});
  request.clear_placement();
  request.add_placement("all");
  ASSERT_TRUE(Call(&v1::BufferService::Stub::CopyBuffer, request, &copied).ok());
  EXPECT_EQ(copied.buffer().device(), "fake:0") << "all that are left";
}

TEST_P(ShardedTest, AFailureOfTheHelperEndsTheCallAlone) {
  v1::DotResponse response;
  second_.Fail(GetParam(), DeviceError::Kind::kFailed);
  ExpectError(Dot(Named("s"), Named("s"), &response), StatusCode::INTERNAL, "CUDA_ERROR",
              {{"call", "fakeCall(x)"}});
  ASSERT_TRUE(Dot(Named("s"), Named("s"), &response).ok());
  EXPECT_EQ(response.value().real(), kFloats);
  EXPECT_EQ(response.stats().devices(), 2u);
}

INSTANTIATE_TEST_SUITE_P(Steps, ShardedTest,
                         testing::Values(FakeDevice::Step::kBegin, FakeDevice::Step::kSynchronize));

TEST_F(TwoDevicesTest, ShardsAreFreedExactly) {
  v1::CreateBufferRequest request;
  request.set_name("draft");
  request.mutable_spec()->set_dtype(v1::DTYPE_F32);
  request.mutable_spec()->add_shape(2048);
  request.mutable_spec()->add_placement("all");
  v1::CreateBufferResponse created;
  first_.Fail(FakeDevice::Step::kAllocate, DeviceError::Kind::kOutOfMemory);
  ExpectError(Call(&v1::BufferService::Stub::CreateBuffer, request, &created),
              StatusCode::RESOURCE_EXHAUSTED, "HOST_MEMORY_EXHAUSTED");
  EXPECT_EQ(server_.used_bytes(0), 0u);
  EXPECT_EQ(server_.used_bytes(1), 0u);
  ASSERT_TRUE(Call(&v1::BufferService::Stub::CreateBuffer, request, &created).ok());
  EXPECT_EQ(server_.used_bytes(0), 4096u);
  EXPECT_EQ(server_.used_bytes(1), 4096u);
  v1::DeleteBufferRequest gone;
  gone.set_name("draft");
  v1::DeleteBufferResponse deleted;
  ASSERT_TRUE(Call(&v1::BufferService::Stub::DeleteBuffer, gone, &deleted).ok());
  EXPECT_TRUE(Eventually([&] { return server_.used_bytes(0) + server_.used_bytes(1) == 0; }));
}

TEST_F(TwoDevicesTest, WithoutTheFirstDeviceTheSecondIsTheDefault) {
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2}, {1, 2}).ok());
  first_.Fail(FakeDevice::Step::kBegin, DeviceError::Kind::kLost);
  v1::DotResponse response;
  ExpectError(Dot(Named("x"), Named("x"), &response), StatusCode::UNAVAILABLE, "DEVICE_LOST");
  ASSERT_TRUE(server_.Put<float>("x", v1::DTYPE_F32, {2}, {3, 4}, true).ok());
  ASSERT_TRUE(Dot(Named("x"), Named("x"), &response).ok());
  EXPECT_EQ(response.stats().device(), "fake:1");
  const v1::Operand two = Inline<float>(v1::DTYPE_F32, {2}, {1, 1});
  ASSERT_TRUE(Dot(two, two, &response).ok());
  EXPECT_EQ(response.stats().device(), "fake:1");
}

}  // namespace
}  // namespace tessera
