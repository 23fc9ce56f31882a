// Products that select in programs: which steps become one, as their statistics say, and that answers are
// those of the steps.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/kernel_fixture.h"
#include "tests/service_fixture.h"

namespace tessera {
namespace {

constexpr std::int64_t kQueries = 2800, kVectors = 24'600, kDimensions = 64;
constexpr char kSelects[] = "tensor_bf16_top_k";

// Queries and vectors, |x|^2 - 2 q.x of which all programs find the smallest.
class SelectionServiceTest : public ServiceTest {
 protected:
  SelectionServiceTest() : ServiceTest(WithRoom(), Devices()) {}

  void SetUp() override {
    TESSERA_NEED_DEVICE(Backend::kCuda);
    if (test::TestDevice(Backend::kCuda)->info().compute_capability != 90)
      GTEST_SKIP() << "compute capability 9.0 alone";
    test::Random random(1);
    std::vector<BFloat16> queries(kQueries * kDimensions), vectors(kVectors * kDimensions);
    std::vector<float> norms(kVectors);
    for (auto* all : {&queries, &vectors})
      for (BFloat16& x : *all) x = BFloat16(static_cast<float>(random.Bits() % 7) - 3);
    for (std::size_t i = 0; i < vectors.size(); ++i)
      norms[i / kDimensions] += static_cast<float>(vectors[i]) * static_cast<float>(vectors[i]);
    ASSERT_TRUE(server_.Put("queries", v1::DTYPE_BF16, {kQueries, kDimensions}, queries).ok());
    ASSERT_TRUE(server_.Put("vectors", v1::DTYPE_BF16, {kVectors, kDimensions}, vectors).ok());
    ASSERT_TRUE(server_.Put("norms", v1::DTYPE_F32, {kVectors}, norms).ok());
  }

  static v1::Operand OfStep(std::uint32_t step) {
    v1::Operand operand;
    operand.set_step(step);
    return operand;
  }
  // norms - 2 * product, of these operands.
  static void SetScores(v1::Expression& expression, std::uint32_t norms, std::uint32_t product) {
    expression.add_nodes()->set_operand(norms);
    expression.add_nodes()->set_real(2);
    expression.add_nodes()->set_operand(product);
    v1::Expression::Node* times = expression.add_nodes();
    times->set_op(v1::MAP_OP_MULTIPLY);
    times->add_args(1);
    times->add_args(2);
    v1::Expression::Node* minus = expression.add_nodes();
    minus->set_op(v1::MAP_OP_SUBTRACT);
    minus->add_args(0);
    minus->add_args(3);
  }

  // Matmul, Map and TopK.
  static v1::ExecuteRequest ThreeSteps() {
    v1::ExecuteRequest program;
    program.set_stats(true);
    v1::MatmulRequest& matmul = *program.add_steps()->mutable_matmul();
    *matmul.mutable_a() = Named("queries");
    *matmul.mutable_b() = Named("vectors");
    matmul.set_transpose_b(true);
    matmul.set_out_dtype(v1::DTYPE_F32);
    matmul.mutable_result()->set_scratch(true);
    v1::MapRequest& map = *program.add_steps()->mutable_map();
    *map.add_operands() = Named("norms");
    *map.add_operands() = OfStep(0);
    SetScores(*map.mutable_expression(), 0, 1);
    map.mutable_result()->set_scratch(true);
    AddTopK(program, 1);
    return program;
  }
  // The expression within Matmul.
  static v1::ExecuteRequest TwoSteps() {
    v1::ExecuteRequest program = ThreeSteps();
    program.mutable_steps()->DeleteSubrange(1, 2);
    v1::MatmulRequest& matmul = *program.mutable_steps(0)->mutable_matmul();
    *matmul.add_with() = Named("norms");
    SetScores(*matmul.mutable_expression(), 1, 0);
    AddTopK(program, 0);
    return program;
  }
  static void AddTopK(v1::ExecuteRequest& program, std::uint32_t step) {
    v1::TopKRequest& top_k = *program.add_steps()->mutable_top_k();
    *top_k.mutable_x() = OfStep(step);
    top_k.set_k(20);
    top_k.set_smallest(true);
  }
  static v1::TopKRequest& TopKOf(v1::ExecuteRequest& program) {
    return *program.mutable_steps(program.steps_size() - 1)->mutable_top_k();
  }

  v1::ExecuteResponse Run(const v1::ExecuteRequest& program) {
    v1::ExecuteResponse response;
    const grpc::Status status = Call(&v1::ComputeService::Stub::Execute, program, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  static const v1::TopKResponse& Last(const v1::ExecuteResponse& response) {
    return response.results(response.results_size() - 1).top_k();
  }

  // Whether the TopK stands for the steps before it.
  bool Selects(const v1::ExecuteRequest& program) {
    const v1::ExecuteResponse response = Run(program);
    return Last(response).stats().strategy() == kSelects;
  }

  // That it does, and that the answer is that of the steps one after the other.
  void ExpectSelects(v1::ExecuteRequest program) {
    const v1::ExecuteResponse found = Run(program);
    EXPECT_EQ(Last(found).stats().strategy(), kSelects);
    EXPECT_GT(Last(found).stats().bytes(), 0);
    TopKOf(program).set_strategy("threshold");
    const v1::ExecuteResponse expected = Run(program);
    EXPECT_EQ(Last(expected).stats().strategy(), "threshold");
    EXPECT_EQ(Last(found).values().data(), Last(expected).values().data());
    EXPECT_EQ(Last(found).indices().data(), Last(expected).indices().data());
    EXPECT_FALSE(Last(found).values().data().empty());
  }

 private:
  static Options WithRoom() {
    Options options = TestOptions();
    options.memory_limit = {.bytes = std::uint64_t{8} << 30};
    options.scratch_limit = std::uint64_t{3} << 30;
    return options;
  }
  static std::vector<std::unique_ptr<Device>> Devices() {
    std::vector<std::unique_ptr<Device>> devices;
    auto device = OpenDevice("cuda:0");
    if (device.ok()) devices.push_back(*std::move(device));
    return devices;
  }
};

TEST_F(SelectionServiceTest, ThreeStepsBecomeOne) {
  const v1::ExecuteResponse response = Run(ThreeSteps());
  ASSERT_EQ(response.results_size(), 3);
  EXPECT_EQ(response.results(0).matmul().stats().strategy(), kSelects);
  EXPECT_EQ(response.results(0).matmul().stats().flops(), 2u * kQueries * kVectors * kDimensions);
  EXPECT_EQ(response.results(0).matmul().stats().bytes(), 0);
  EXPECT_EQ(response.results(1).map().stats().strategy(), kSelects);
  ExpectSelects(ThreeSteps());
}

TEST_F(SelectionServiceTest, SoDoOtherSteps) {
  ExpectSelects(TwoSteps());
  const v1::ExecuteRequest three = ThreeSteps(), two = TwoSteps();
  v1::ExecuteRequest program = three;
  program.mutable_steps()->DeleteSubrange(1, 2);  // the largest of the product itself
  AddTopK(program, 0);
  TopKOf(program).set_smallest(false);
  TopKOf(program).set_k(5);
  TopKOf(program).set_axis(1);
  ExpectSelects(program);
  // Norms that the program computes, and time of the whole.
  program.clear_steps();
  v1::ReduceRequest& norms = *program.add_steps()->mutable_reduce();
  *norms.mutable_x() = Named("vectors");
  norms.set_op(v1::REDUCE_OP_SUM_SQUARES);
  norms.add_axes(1);
  v1::Expression& cast = *norms.mutable_expression();
  cast.add_nodes()->set_operand(0);
  v1::Expression::Node* node = cast.add_nodes();
  node->set_op(v1::MAP_OP_CAST);
  node->add_args(0);
  node->set_dtype(v1::DTYPE_F32);
  norms.mutable_result()->set_scratch(true);
  for (const v1::Step& step : three.steps()) *program.add_steps() = step;
  *program.mutable_steps(2)->mutable_map()->mutable_operands(0) = OfStep(0);
  *program.mutable_steps(2)->mutable_map()->mutable_operands(1) = OfStep(1);
  *TopKOf(program).mutable_x() = OfStep(2);
  TopKOf(program).set_timing(true);
  ExpectSelects(program);
  EXPECT_GT(Last(Run(program)).stats().kernel_us(), 0);
  // Into buffers, twice in one program.
  program = ThreeSteps();
  TopKOf(program).mutable_values()->mutable_buffer()->set_name("values");
  for (const v1::Step& step : two.steps()) *program.add_steps() = step;
  *TopKOf(program).mutable_x() = OfStep(3);
  ExpectSelects(program);
}

TEST_F(SelectionServiceTest, WhatTheCallerAsksForStays) {
  const auto expect_not = [&](v1::ExecuteRequest program,
                              const std::function<void(v1::ExecuteRequest&)>& change) {
    change(program);
    EXPECT_FALSE(Selects(program)) << program.ShortDebugString();
  };
  using Program = v1::ExecuteRequest;
  const auto matmul = [](Program& p) -> v1::MatmulRequest& {
    return *p.mutable_steps(0)->mutable_matmul();
  };
  const auto map = [](Program& p) -> v1::MapRequest& { return *p.mutable_steps(1)->mutable_map(); };
  expect_not(ThreeSteps(), [&](Program& p) { matmul(p).set_strategy("tensor_bf16"); });
  expect_not(ThreeSteps(), [&](Program& p) { map(p).set_strategy("vectorized"); });
  expect_not(ThreeSteps(), [&](Program& p) { TopKOf(p).set_strategy("threshold"); });
  expect_not(ThreeSteps(), [&](Program& p) { matmul(p).set_timing(true); });
  expect_not(ThreeSteps(), [&](Program& p) { map(p).set_timing(true); });
  expect_not(ThreeSteps(), [&](Program& p) { matmul(p).mutable_result()->mutable_buffer(); });
  expect_not(ThreeSteps(), [&](Program& p) { map(p).mutable_result()->mutable_buffer(); });
  expect_not(ThreeSteps(), [&](Program& p) { TopKOf(p).set_k(129); });
  expect_not(ThreeSteps(), [&](Program& p) { TopKOf(p).set_axis(0); });
  expect_not(ThreeSteps(), [&](Program& p) {
    *TopKOf(p).mutable_x() = InView(OfStep(1), 0, {kQueries, kVectors});
  });
  expect_not(ThreeSteps(), [&](Program& p) {
    *map(p).mutable_operands(1) = InView(OfStep(0), 0, {kQueries, kVectors});
  });
  expect_not(TwoSteps(), [&](Program& p) { matmul(p).set_timing(true); });
  // Others see the product, or the scores.
  for (const std::uint32_t step : {0, 1}) {
    v1::ExecuteRequest program = ThreeSteps();
    v1::ReduceRequest& reduce = *program.add_steps()->mutable_reduce();
    *reduce.mutable_x() = OfStep(step);
    reduce.set_op(v1::REDUCE_OP_MAX);
    const v1::ExecuteResponse response = Run(program);
    EXPECT_EQ(response.results(2).top_k().stats().strategy(), "threshold");
    EXPECT_TRUE(response.results(3).has_reduce());
  }
}

TEST_F(SelectionServiceTest, ErrorsAreThoseOfTheSteps) {
  v1::ExecuteRequest program = ThreeSteps();
  program.mutable_steps(1)->mutable_map()->mutable_operands(0)->set_buffer("nowhere");
  const v1::ExecuteResponse response = Run(program);
  EXPECT_TRUE(response.results(0).has_matmul());
  EXPECT_EQ(response.results(1).error().reason(), "BUFFER_NOT_FOUND");
  EXPECT_EQ(response.results(2).error().reason(), "STEP_FAILED");
  program = ThreeSteps();
  TopKOf(program).set_k(0);
  EXPECT_EQ(Run(program).results(2).error().reason(), "BAD_K");
}

}  // namespace
}  // namespace tessera
