// Programs whose Matmul, Map and TopK become one step: which steps do, according to their
// statistics, and whether the results equal those of the separate steps.

#include "tests/kernel_fixture.h"
#include "tests/service_fixture.h"

namespace tessera {
namespace {

constexpr std::int64_t kQueries = 2800, kVectors = 24'600, kDimensions = 64;
constexpr char kSelects[] = "tensor_bf16_top_k";

// Queries and vectors. All programs find the smallest |x|^2 - 2 q.x.
class SelectionServiceTest : public ServiceTest {
 protected:
  SelectionServiceTest() : ServiceTest(WithRoom(), Devices()) {}

  void SetUp() override {
    TESSERA_NEED_DEVICE(Backend::kCuda);
    if (test::TestDevice(Backend::kCuda)->info().compute_capability != 90)
      GTEST_SKIP() << "only compute capability 9.0";
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
  // Returns norms - 2 * product, for these operands.
  static std::string Scores(int norms, int product) {
    return absl::StrCat("expression { nodes { operand: ", norms, " } nodes { real: 2 } ",
                        "nodes { operand: ", product,
                        " } nodes { op: MAP_OP_MULTIPLY args: [1, 2] }",
                        "nodes { op: MAP_OP_SUBTRACT args: [0, 3] } }");
  }
  // A program of Matmul, Map and TopK.
  static v1::ExecuteRequest ThreeSteps() {
    auto program = Of<v1::ExecuteRequest>(
        R"(stats: true
           steps { matmul { a { buffer: 'queries' } b { buffer: 'vectors' } transpose_b: true
                            out_dtype: DTYPE_F32 result { scratch: true } } }
           steps { map { operands { buffer: 'norms' } operands { step: 0 }
                         result { scratch: true } )" +
        Scores(0, 1) + "} }");
    AddTopK(program, 1);
    return program;
  }
  // A program whose Matmul has the expression as its epilogue.
  static v1::ExecuteRequest TwoSteps() {
    v1::ExecuteRequest program = ThreeSteps();
    program.mutable_steps()->DeleteSubrange(1, 2);
    program.mutable_steps(0)->mutable_matmul()->MergeFrom(
        Of<v1::MatmulRequest>("with { buffer: 'norms' } " + Scores(1, 0)));
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
    return Good<v1::ExecuteResponse>(program);
  }
  static const v1::TopKResponse& Last(const v1::ExecuteResponse& response) {
    return response.results(response.results_size() - 1).top_k();
  }

  // Whether the TopK replaces the previous steps.
  bool Selects(const v1::ExecuteRequest& program) {
    const v1::ExecuteResponse response = Run(program);
    return Last(response).stats().strategy() == kSelects;
  }

  // Checks that the TopK replaces the previous steps, and that the result equals that of the
  // separate steps.
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
    return With([](Options& options) {
      options.memory_limit = {.bytes = std::uint64_t{8} << 30};
      options.scratch_limit = std::uint64_t{3} << 30;
    });
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
  program.mutable_steps()->DeleteSubrange(1, 2);  // The largest elements of the product itself.
  AddTopK(program, 0);
  TopKOf(program).set_smallest(false);
  TopKOf(program).set_k(5);
  TopKOf(program).set_axis(1);
  ExpectSelects(program);
  // The program also computes the norms, and all steps are timed.
  program.clear_steps();
  *program.add_steps() = Of<v1::Step>(R"(
      reduce { x { buffer: 'vectors' } op: REDUCE_OP_SUM_SQUARES axes: 1 result { scratch: true }
               expression { nodes { operand: 0 }
                            nodes { op: MAP_OP_CAST args: 0 dtype: DTYPE_F32 } } })");
  for (const v1::Step& step : three.steps()) *program.add_steps() = step;
  *program.mutable_steps(2)->mutable_map()->mutable_operands(0) = OfStep(0);
  *program.mutable_steps(2)->mutable_map()->mutable_operands(1) = OfStep(1);
  *TopKOf(program).mutable_x() = OfStep(2);
  TopKOf(program).set_timing(true);
  ExpectSelects(program);
  EXPECT_GT(Last(Run(program)).stats().kernel_us(), 0);
  // Results go into buffers, twice in one program.
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
  expect_not(ThreeSteps(), [&](Program& p) { map(p).set_strategy("fused"); });
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
  // Other steps also read the product or the scores.
  for (const std::uint32_t step : {0, 1}) {
    v1::ExecuteRequest program = ThreeSteps();
    *program.add_steps() =
        Of<v1::Step>(absl::StrCat("reduce { x { step: ", step, " } op: REDUCE_OP_MAX }"));
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
