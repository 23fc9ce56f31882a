// The passes over a program, one by one, on a CPU device.
#include "kernels/program/program.h"

#include <numeric>
#include <utility>
#include <vector>

#include "kernels/choose/pace.h"
#include "tests/expressions.h"

namespace tessera::test {
namespace {

using Kind = PlannedOperand::Kind;

class ProgramTest : public testing::Test {
 protected:
  ProgramTest() : device_(*OpenDevice("cpu")), stream_(*MakeStream(*device_)) {
    std::iota(values_.begin(), values_.end(), 1.0f);
    EXPECT_TRUE(BeginRequest(*stream_).ok());
  }

  // An array of the first n values.
  PlannedOperand Array(std::int64_t n, Kind kind = Kind::kResident) const {
    return {
        .kind = kind, .name = "x", .type = {DType::kF32, MakeShape({n})}, .array = values_.data()};
  }
  static PlannedOperand ResultOf(std::uint32_t step, std::uint32_t output = 0) {
    return {.name = "x", .step = step, .output = output};
  }
  PlannedStep& Append(OperationSpec spec, std::vector<PlannedOperand> operands,
                      std::vector<Destination> destinations = {}) {
    PlannedStep step{.spec = std::move(spec)};
    step.operands.assign(operands.begin(), operands.end());
    step.destinations.assign(destinations.begin(), destinations.end());
    program_.steps.push_back(std::move(step));
    return program_.steps.back();
  }
  PlannedStep& Sum(PlannedOperand x) { return Append(ReduceSpec(), {std::move(x)}); }
  PlannedStep& Add(PlannedOperand a, PlannedOperand b, Destination to = Destination::kScratch) {
    return Append(AddSpec(), {std::move(a), std::move(b)}, {to});
  }
  std::string Reason(std::size_t step) { return ErrorReason(program_.steps[step].status); }
  // Runs all passes. Returns the steps that were run one by one.
  std::vector<std::size_t> RunAll() {
    FindTypes(program_);
    EXPECT_TRUE(CheckSteps(program_, *stream_, kInfinity).ok());
    layout_ = LayOut(program_);
    program_.block = static_cast<char*>(Get(Scratch(*stream_, layout_.end)));
    PlaceResults(program_);
    std::vector<std::size_t> ran;
    const auto run = [&](const PlannedStep& step) {
      ran.push_back(static_cast<std::size_t>(&step - program_.steps.data()));
      return RunStep(program_, step, *stream_, step.options);
    };
    EXPECT_TRUE(RunSteps(program_, *stream_, run).ok());
    EXPECT_TRUE(Synchronize(*stream_).ok());
    return ran;
  }
  double Value(std::size_t step) { return program_.steps[step].outcome.value.real; }

  std::vector<float> values_ = std::vector<float>(1 << 18);
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  ProgramPlan program_;
  BlockLayout layout_;
};

TEST_F(ProgramTest, ErrorsStayWithTheirStepAndItsReaders) {
  Add(Array(3), Array(4));  // the shapes differ
  Sum(ResultOf(0));         // reads it
  Add(Array(3), Array(3));
  Sum(ResultOf(2, 1));  // Add has one array
  PlannedOperand window = ResultOf(2);
  const std::int64_t shape[] = {2}, strides[] = {1};
  window.window = Window{2, shape, strides};  // ends beyond the array
  Sum(window);
  window.window->offset = 1;
  Sum(window);
  RunAll();
  EXPECT_EQ(Reason(0), "BAD_SHAPE");
  EXPECT_EQ(Reason(1), "STEP_FAILED");
  EXPECT_EQ(ErrorMetadata(program_.steps[1].status)["failed_step"], "0");
  EXPECT_EQ(Reason(3), "BAD_OPERAND");
  EXPECT_EQ(ErrorMetadata(program_.steps[3].status)["operand"], "x");
  EXPECT_EQ(Reason(4), "BAD_VIEW");
  EXPECT_EQ(Value(5), 4 + 6);
  EXPECT_EQ(program_.steps[2].readers, 4u - 1u);
}

TEST_F(ProgramTest, StepsOfTheSameKindShareABatch) {
  Sum(Array(10));
  Sum(Array(20));
  Append(DotSpec(), {Array(2), Array(2)});
  Append(ReduceSpec{.op = ReduceOp::kMax}, {Array(10)});
  Sum(ResultOf(3));  // a number as an array
  Sum(Array(30));
  Sum(ResultOf(5));  // reads a step that would be in its batch
  Sum(Array(40)).options.strategy = "cpu_parallel";
  Sum(Array(static_cast<std::int64_t>(values_.size())));  // too long for a batch
  EXPECT_EQ(RunAll(), (std::vector<std::size_t>{2, 3, 6, 7, 8}));
  const double want[] = {55, 210, 5, 10, 10, 465, 465, 820, 0x1p17 * (0x1p18 + 1)};
  for (std::size_t i = 0; i < std::size(want); ++i) EXPECT_EQ(Value(i), want[i]) << i;
}

TEST_F(ProgramTest, EverythingHasItsPlace) {
  Add(Array(100), Array(100, Kind::kInline), Destination::kResponse);
  Add(Array(3), Array(4), Destination::kResponse);  // fails, and takes no place
  Add(Array(200, Kind::kElsewhere), Array(200));
  Add(Array(200), Array(200, Kind::kElsewhere), Destination::kBuffer);
  Sum(Array(100));  // nothing reads it
  Sum(Array(100));
  Append(ReduceSpec(), {ResultOf(5)});
  Add(Array(1), Array(1, Kind::kInline), Destination::kResponse);
  FindTypes(program_);
  const BlockLayout layout = LayOut(program_);
  const auto& steps = program_.steps;
  EXPECT_EQ(steps[0].offsets[0], 0u);
  EXPECT_EQ(steps[7].offsets[0], 512u);
  EXPECT_EQ(layout.response_end, 768u);
  EXPECT_EQ(layout.response_arrays, 2);
  EXPECT_EQ(steps[2].offsets[0], 768u);
  EXPECT_EQ(steps[5].offsets[0], 768u + 1024u);
  const std::uint64_t copy = steps[2].operands[0].offset;
  EXPECT_EQ(copy, 768u + 1024u + 512u);
  EXPECT_EQ(steps[3].operands[1].offset, copy) << "one copy of one array";
  EXPECT_EQ(layout.inline_begin, copy + 1024);
  EXPECT_EQ(steps[0].operands[1].offset, layout.inline_begin);
  EXPECT_EQ(steps[7].operands[1].offset, layout.inline_begin + 512);
  EXPECT_EQ(layout.end, layout.inline_begin + 512 + 256);
}

TEST_F(ProgramTest, AnArrayTakesThePlaceOfThoseThatAreNotReadAgain) {
  Add(Array(300), Array(300));   // 0: 1280 bytes
  Add(ResultOf(0), Array(300));  // 1
  Add(ResultOf(1), Array(300));  // 2: takes the place of 0
  Add(Array(10), Array(10));     // 3: takes the place of 1, which 2 has read
  Add(ResultOf(3), Array(10));   // 4
  Sum(ResultOf(2));              // 5
  Add(Array(300), Array(300));   // 6: takes the places of 2 and 3
  Add(ResultOf(6), Array(300));  // 7: the gap between 6 and 4 is too small
  Sum(ResultOf(4));              // 8
  Sum(ResultOf(7));              // 9
  RunAll();
  std::vector<std::uint64_t> offsets;
  for (const std::uint32_t i : {0, 1, 2, 3, 4, 6, 7})
    offsets.push_back(program_.steps[i].offsets[0]);
  EXPECT_EQ(offsets, (std::vector<std::uint64_t>{0, 1280, 0, 1280, 1536, 0, 1792}));
  EXPECT_EQ(layout_.end, 1792u + 1280u);
  const double sum = 300 * 301 / 2;
  EXPECT_EQ(Value(5), 4 * sum);
  EXPECT_EQ(Value(8), 3 * 55);
  EXPECT_EQ(Value(9), 3 * sum);
}

TEST_F(ProgramTest, WhatAFusedStepReadsStaysUntilItRuns) {
  Add(Array(10), Array(10));
  Add(ResultOf(0), Array(10));
  Add(Array(10), Array(10));
  Add(ResultOf(1), Array(10), Destination::kBuffer);
  FindTypes(program_);
  const ProductTopKStrategy strategy{};
  program_.steps[1].folded = true;
  program_.steps[3].selection = &strategy;
  program_.steps[3].product = program_.steps[3].scores = 1;
  LayOut(program_);
  EXPECT_EQ(program_.steps[2].offsets[0], program_.steps[0].offsets[0] + kBlockAlignment);
}

TEST_F(ProgramTest, SizesDoNotOverflow) {
  for (int i = 0; i < 5; ++i) {
    Add(Array(0), Array(0)).operands[0].type.shape = MakeShape({std::int64_t{1} << 60});
    program_.steps.back().operands[1].type.shape = MakeShape({std::int64_t{1} << 60});
  }
  for (std::uint32_t i = 0; i < 5; ++i) Sum(ResultOf(i));
  FindTypes(program_);
  EXPECT_TRUE(program_.steps[4].status.ok());
  EXPECT_EQ(LayOut(program_).end, std::uint64_t{1} << 62);
}

TEST_F(ProgramTest, ScratchMemoryIsThatOfTheStepThatTakesMost) {
  const auto matrix = [&](std::int64_t n) {
    PlannedOperand x = Array(0);
    x.type.shape = MakeShape({n, 256});
    return x;
  };
  for (const std::int64_t n : {100, 300, 200})
    Append(TopKSpec{.k = 2, .axis = 0}, {matrix(n)},
           {Destination::kScratch, Destination::kScratch});
  FindTypes(program_);
  EXPECT_TRUE(CheckSteps(program_, *stream_, kInfinity).ok());
  const std::uint64_t most = MostScratch(program_, 0, *stream_);
  const std::uint64_t bytes = program_.steps[1].outcome.stats.scratch_bytes;
  EXPECT_GE(bytes, 300u * 256 * 4) << "columns are gathered";
  EXPECT_GE(most, bytes);
  EXPECT_LE(most, bytes + (1 << 13));
}

TEST_F(ProgramTest, AProgramThatTakesTooLongIsRefused) {
  Sum(Array(10)).options.strategy = "cpu_parallel";
  FindTypes(program_);
  EXPECT_TRUE(CheckSteps(program_, *stream_, 0).ok()) << "without a pace nothing is estimated";
  EXPECT_EQ(ErrorReason(CheckSteps(program_, *stream_, -1)), "OPERATION_TOO_LONG");
}

TEST_F(ProgramTest, ARunningProgramIsExpectedToTakeTheTimeOfAllSteps) {
  Pace pace(device_->info());
  for (int i = 0; i < 3; ++i) {
    PlannedStep& step = Sum(Array(10));
    step.options.strategy = "cpu_parallel";
    step.options.pace = &pace;
  }
  FindTypes(program_);
  EXPECT_TRUE(CheckSteps(program_, *stream_, kInfinity).ok());
  double total = 0;
  for (const PlannedStep& step : program_.steps) total += step.outcome.stats.estimate_seconds;
  EXPECT_GT(total, 0);
  EXPECT_EQ(stream_->expected_seconds(), total);
  for (const PlannedStep& step : program_.steps)
    EXPECT_TRUE(RunStep(program_, step, *stream_, step.options).ok());
  EXPECT_EQ(stream_->expected_seconds(), total);
}

}  // namespace
}  // namespace tessera::test
