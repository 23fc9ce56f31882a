// The time that calls are expected to take: limits, estimates for any problem, and learned rates.
#include "kernels/choose/pace.h"

#include <cstdint>
#include <initializer_list>

#include "kernels/expression/map_cost.h"
#include "kernels/problem/matmul.h"
#include "kernels/run/execute.h"
#include "kernels/run/operation.h"
#include "tests/described_device.h"
#include "tests/expressions.h"
#include "tests/fake_device.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 60;

DeviceInfo Info(Backend backend) { return Described(backend).info(); }

View Broadcast(const void* element, DType dtype, std::initializer_list<std::int64_t> dims) {
  return StridedView(element, dtype, dims, {});
}

MatmulProblem Product(std::int64_t m, std::int64_t n, std::int64_t k, bool transposed = false) {
  return {.m = m,
          .n = n,
          .k = k,
          .lda = transposed ? m : k,
          .transpose_a = transposed,
          .ldb = transposed ? k : n,
          .transpose_b = transposed};
}

template <class Problem>
const Strategy<Problem>& StrategyNamed(std::string_view name) {
  return StrategyOf<Problem>({name, Backend::kCpu, DType::kF32});
}

// A stream on a device that counts its work, and a Pace of that device.
struct Paced {
  FakeDevice device;
  std::unique_ptr<Stream> stream = *MakeStream(device);
  Pace pace{device.info()};
  RunOptions options{.pace = &pace, .max_seconds = 30, .max_slow_seconds = 5};
  float one = 1;

  void ExpectRefused(const absl::Status& status, double limit, const std::string& strategy) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(ErrorReason(status), "OPERATION_TOO_LONG");
    const auto metadata = ErrorMetadata(status);
    EXPECT_EQ(metadata.at("strategy"), strategy);
    EXPECT_EQ(metadata.at("limit_seconds"), absl::StrCat(limit));
    EXPECT_GT(std::stod(metadata.at("estimate_seconds")), limit);
    EXPECT_EQ(device.Count(FakeDevice::Step::kScratch), 0);
    EXPECT_EQ(device.Count(FakeDevice::Step::kAllocate), 0);
    EXPECT_EQ(device.Count(FakeDevice::Step::kSynchronize), 0);
  }
};

TEST(PaceTest, RefusesBeforeMemoryIsTouched) {
  Paced l;
  const View x = Broadcast(&l.one, DType::kF32, {kHuge});
  const View mask = Broadcast(&l.one, DType::kBool, {kHuge});
  const View cube = Broadcast(&l.one, DType::kF32, {1 << 20, 1 << 20, 1 << 20});
  // An array of i64 with more elements would exceed the address space.
  const View half = Broadcast(&l.one, DType::kF32, {kHuge / 2}),
             places = Broadcast(&l.one, DType::kI64, {kHuge / 2}),
             labels = Broadcast(&l.one, DType::kI64, {1 << 20});
  const View square = Broadcast(&l.one, DType::kI32, {1 << 30, 1 << 30});
  const auto refused = [&](const OperationSpec& spec, const std::vector<View>& operands,
                           const std::string& strategy) {
    SCOPED_TRACE(strategy);
    const std::vector<Output> outputs(kMostResults, nullptr);
    l.ExpectRefused(tessera::Run(spec, *l.stream, operands, outputs, l.options).status(), 30,
                    strategy);
  };
  refused(DotSpec(), {x, x}, "fixed_tree");
  refused(ReduceSpec(), {x}, "fixed_tree");
  refused(ReduceSpec{.axes = {1}}, {cube}, "cpu_axis");
  refused(AddSpec(), {x, x}, "cpu");
  refused(WindowSumSpec{kHuge}, {x}, "cpu");
  refused(TopKSpec{.k = 10}, {x}, "cpu_select");
  refused(ScanSpec(), {x}, "fixed_order");
  refused(SortSpec(), {half}, "cpu_radix");
  refused(TakeSpec(), {x, places}, "cpu_parallel");
  refused(SelectSpec{.count = kHuge}, {x, mask}, "cpu_parallel");
  refused(HistogramSpec{.bins = 5}, {x}, "cpu_parallel");
  refused(SearchSortedSpec(), {x, half}, "cpu_parallel");
  refused(SumByLabelSpec{.length = 9}, {cube, labels}, "cpu_parallel");
  refused(LinalgSpec{LinalgFunction::kSvd},
          {Broadcast(&l.one, DType::kF64, {1 << 20, 10'000, 10'000})}, "cpu_library");
  refused(MatmulSpec(), {square, square}, "cpu_cache_tiled");
  // The product of matrices without columns is zero, but the expression's result is unknown.
  const View tall = Broadcast(&l.one, DType::kF32, {1 << 30, 0}),
             flat = Broadcast(&l.one, DType::kF32, {0, 1 << 30});
  MatmulSpec exp;
  exp.expression = Nodes{In(0), Op(MapOp::kExp, {0})};
  refused(std::move(exp), {tall, flat}, "cpu_library");
  OperationSpec uncounted = SelectSpec{};
  l.ExpectRefused(CountResults(uncounted, *l.stream, {x, mask}, l.options), 30, "");
  l.ExpectRefused(RunCopy(*l.stream, x, DType::kF32, nullptr, l.options), 30, "");
  l.ExpectRefused(RunCopy(*l.stream, x, DType::kF64, nullptr, l.options), 30, "");
}

TEST(PaceTest, ResultsWithoutElementsTakeNoTimeAndNoMemory) {
  Paced l;
  l.options.check_only = true;
  const auto of = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
    return Broadcast(&l.one, dtype, shape);
  };
  const View many = of(DType::kF32, {kHuge}), none = of(DType::kF32, {0});
  const auto check = [&](const OperationSpec& spec, const std::vector<View>& operands) {
    const std::vector<Output> outputs(kMostResults, nullptr);
    const ScalarResult found = Get(tessera::Run(spec, *l.stream, operands, outputs, l.options));
    EXPECT_EQ(found.stats.scratch_bytes, 0u) << found.stats.strategy;
    EXPECT_EQ(found.stats.estimate_seconds, 0) << found.stats.strategy;
  };
  check(TakeSpec{.axis = 0}, {of(DType::kF32, {4, 0}), of(DType::kI64, {kHuge})});
  check(TakeSpec(), {many, of(DType::kI64, {0})});
  check(SearchSortedSpec(), {many, none});
  check(MatmulSpec(), {of(DType::kF32, {0, kHuge}), of(DType::kF32, {kHuge, 4})});
}

TEST(PaceTest, SlowStrategiesHaveASeparateLimit) {
  Paced l;
  const View a = Broadcast(&l.one, DType::kF32, {12000, 12000});
  l.options.strategy = "cpu_naive";
  l.options.max_seconds = 1e9;
  const absl::Status status =
      RunMatmul(*l.stream, a, a, false, false, DType::kF32, nullptr, l.options).status();
  l.ExpectRefused(status, 5, "cpu_naive");
  EXPECT_NE(status.message().find("no strategy"), std::string::npos) << status;

  // Naming the strategy that Choose picks does not make it a slow strategy.
  float out = 0;
  const View x = Broadcast(&l.one, DType::kF32, {1});
  l.options.max_slow_seconds = 0;
  l.options.strategy = "cpu";
  EXPECT_TRUE(RunAdd(*l.stream, x, x, &out, l.options).ok());
  l.options.strategy = "cpu_serial";
  EXPECT_EQ(ErrorReason(RunDot(*l.stream, x, x, l.options).status()), "OPERATION_TOO_LONG");
  l.options.strategy = "fixed_tree";
  EXPECT_TRUE(RunDot(*l.stream, x, x, l.options).ok());
}

TEST(PaceTest, GathersCount) {
  Paced l;
  const std::int64_t n = 1 << 20;
  const std::vector<float> values(static_cast<std::size_t>(n), 1.0f);
  View gathered = VectorView(values.data(), n);
  gathered.strides[0] = 0;
  // The strategy alone takes less than the limit, but the strategy and the gather of its operand
  // take more.
  const DotProblem p = {.n = n};
  l.options.max_seconds = 1.01 * l.pace.Estimate(*Choose(p, l.device), p);
  const View whole = VectorView(values.data(), n);
  EXPECT_EQ(ErrorReason(RunDot(*l.stream, gathered, whole, l.options).status()),
            "OPERATION_TOO_LONG");
  EXPECT_TRUE(RunDot(*l.stream, whole, whole, l.options).ok());
}

TEST(PaceTest, WithoutAPaceThereAreNoLimits) {
  Paced l;
  const View x = Broadcast(&l.one, DType::kF32, {1});
  l.options = {.max_seconds = 0, .max_slow_seconds = 0};
  EXPECT_TRUE(RunDot(*l.stream, x, x, l.options).ok());
  EXPECT_TRUE(RunCopy(*l.stream, x, DType::kF32, &l.one, l.options).ok());
}

template <class Problem>
std::vector<Launch> ExtremeLaunches(const Strategy<Problem>& strategy) {
  std::vector<Launch> launches = {{}};
  for (const bool most : {false, true}) {
    const auto pick = [&](LaunchLimits::Range r) { return most ? r.max : r.min; };
    launches.push_back({pick(strategy.limits.block_size), pick(strategy.limits.grid_size),
                        pick(strategy.limits.items_per_thread)});
  }
  return launches;
}

// Estimates are finite, bounds are not negative, and no model divides by an extent of 0.
template <class Problem>
void ExpectFigures(std::initializer_list<Problem> problems) {
  for (const Strategy<Problem>* strategy : Strategies<Problem>()) {
    const Pace pace(Info(strategy->backend));
    for (Problem p : problems) {
      for (DType dtype : kAllDTypes) {
        p.dtype = dtype;
        if constexpr (requires { p.out_dtype; }) p.out_dtype = dtype;
        if (!strategy->dtypes.Contains(dtype) || !Refusal(*strategy, p).empty()) continue;
        EXPECT_GE(strategy->roundoff(p), 0) << strategy->name;
        for (const Launch& launch : ExtremeLaunches(*strategy)) {
          p.launch = launch;
          const double seconds = pace.Estimate(*strategy, p);
          EXPECT_TRUE(std::isfinite(seconds) && seconds >= 0) << strategy->name << " " << seconds;
        }
      }
    }
  }
}

TEST(PaceTest, EachProductOfAStackTakesTime) {
  MatmulProblem tiny = Product(1, 1, 1);
  tiny.stack = 1 << 22;
  for (const Strategy<MatmulProblem>* strategy : Strategies<MatmulProblem>())
    if (strategy->backend == Backend::kCpu)
      EXPECT_GT(Pace(Info(Backend::kCpu)).Estimate(*strategy, tiny), 0.1) << strategy->name;
}

TEST(PaceTest, FiguresStayFigures) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 8;
  ExpectFigures<DotProblem>({{.n = 0}, {.n = 1}, {.n = kMost}});
  ExpectFigures<ReduceProblem>({{.n = 0}, {.n = 1}, {.n = kMost}});
  ExpectFigures<AddProblem>({{.n = 0}, {.n = 1}, {.n = kMost}});
  ExpectFigures<WindowSumProblem>(
      {{.n = 0}, {.n = 1}, {.n = kMost}, {.n = kMost, .radius = kMost}});
  ExpectFigures<MapProblem>({ReferenceMap(0), ReferenceMap(1), ReferenceMap(1000003)});
  ExpectFigures<TopKProblem>({{},
                              {.rows = 1, .n = kMost, .k = kMostTopK},
                              {.rows = kMost, .n = 1, .k = 1},
                              {.rows = 1000, .n = 0},
                              {.rows = 1000003, .n = 7, .k = 5}});
  ExpectFigures<ScanProblem>({{},
                              {.outer = kMost, .length = 1},
                              {.outer = 1, .length = kMost},
                              {.outer = 1, .length = 1, .inner = kMost},
                              {.outer = kMost, .length = 0},
                              {.op = ReduceOp::kProduct, .outer = 3, .length = 5000, .inner = 7}});
  ExpectFigures<SortProblem>({{},
                              {.rows = 1, .n = kMost},
                              {.rows = kMost, .n = 1},
                              {.rows = 1000003, .n = 0},
                              {.wants_indices = false, .rows = 1000003, .n = 7}});
  ExpectFigures<TakeProblem>({{},
                              {.outer = kMost, .length = 1, .count = 1},
                              {.length = kMost, .count = 1},
                              {.length = 1, .inner = kMost, .count = 1, .strides = {0, 0, 1}},
                              {.along = true, .length = 1, .count = kMost},
                              {.outer = kMost, .length = 0, .inner = 0},
                              {.outer = 3, .length = 5, .inner = 7, .count = 100}});
  ExpectFigures<SelectProblem>({{},
                                {.n = kMost, .count = kMost},
                                {.wants_values = false, .n = kMost, .count = 1},
                                {.wants_indices = false, .n = 1000003, .count = 7}});
  ExpectFigures<HistogramProblem>({{},
                                   {.n = kMost, .bins = kMostBins},
                                   {.kind = BinKind::kEdges, .n = 1000003, .bins = 7},
                                   {.kind = BinKind::kIntegers, .n = 0, .bins = kMostBins}});
  ExpectFigures<SearchSortedProblem>(
      {{}, {.length = kMost, .n = kMost}, {.length = kMost, .n = 1}, {.length = 0, .n = 1000003}});
  ExpectFigures<SumByLabelProblem>(
      {{},
       {.n = kMost, .length = 1},
       {.n = 1, .inner = kMost, .length = 1},
       {.dtype = DType::kI32, .label_dtype = DType::kI32, .n = 1000003, .inner = 7, .length = 5}});
  for (LinalgFunction function : kAllLinalgFunctions)
    ExpectFigures<LinalgProblem>({{.function = function},
                                  {.function = function, .stack = 0, .m = 5, .n = 5},
                                  {.function = function, .stack = kMost / 64, .m = 1, .n = 1},
                                  {.function = function, .m = 20'000, .n = 20'000}});
  ExpectFigures<ReduceAxesProblem>({{},
                                    {.outer = kMost, .length = 1, .inner = 1},
                                    {.outer = 1, .length = kMost, .inner = 1},
                                    {.outer = 1, .length = 1, .inner = kMost},
                                    {.outer = kMost, .length = 0, .inner = 1},
                                    {.outer = 3, .length = 5, .inner = 7}});
  constexpr std::int64_t kSide = std::int64_t{1} << 29;
  ExpectFigures<MatmulProblem>({Product(1, kMost, 1)});
  for (std::int64_t k : {std::int64_t{0}, std::int64_t{1}, kSide})
    ExpectFigures<MatmulProblem>({Product(kSide, kSide, k), Product(0, kMost, k)});
  for (std::int64_t m : {0, 1, 33, 4099})
    for (std::int64_t n : {0, 1, 33, 4099})
      for (std::int64_t k : {0, 1, 33, 4099})
        ExpectFigures<MatmulProblem>({Product(m, n, k), Product(m, n, k, /*transposed=*/true)});
  const Pace pace(Info(Backend::kCpu));
  const float one = 1;
  for (DType to : kArrayDTypes) {
    for (const View& view :
         {Broadcast(&one, DType::kF32, {}), Broadcast(&one, DType::kF32, {0, 5}),
          Broadcast(&one, DType::kF32, {kMost}), Broadcast(&one, DType::kF32, {kMost, 1})}) {
      const double seconds = pace.EstimateCopy(view, to);
      EXPECT_TRUE(std::isfinite(seconds) && seconds >= 0) << seconds;
    }
  }
}

template <class Problem>
void ExpectGrowth(Problem small, Problem large) {
  for (const Strategy<Problem>* strategy : Strategies<Problem>()) {
    const Pace pace(Info(strategy->backend));
    for (DType dtype : kAllDTypes) {
      if (!strategy->dtypes.Contains(dtype)) continue;
      small.dtype = large.dtype = dtype;
      if constexpr (requires { small.out_dtype; }) small.out_dtype = large.out_dtype = dtype;
      if (!Refusal(*strategy, small).empty() || !Refusal(*strategy, large).empty()) continue;
      const double less = pace.Estimate(*strategy, small), more = pace.Estimate(*strategy, large);
      EXPECT_GT(less, 0) << strategy->name;
      // With strategies that end in sequential steps, the small problem takes longer than its size
      // suggests.
      EXPECT_GT(more, 20 * less) << strategy->name << " " << Name(dtype);
    }
  }
}

TEST(PaceTest, EstimatesGrowWithTheProblem) {
  ForEachOperation([]<class Problem>() {
    ExpectGrowth(ReferenceProblem<Problem>(1 << 26),
                 ReferenceProblem<Problem>(std::int64_t{1} << 36));
  });
  ExpectGrowth<TopKProblem>({.rows = 16, .n = 1 << 20, .k = 100},
                            {.rows = 16, .n = 1 << 30, .k = 100});
  ExpectGrowth<SortProblem>({.rows = 16, .n = 1 << 20}, {.rows = 16, .n = 1 << 30});
  ExpectGrowth<DotProblem>({.n = std::int64_t{1} << 46}, {.n = std::int64_t{1} << 56});
  ExpectGrowth<ScanProblem>({.outer = 1, .length = 1 << 14, .inner = 4096},
                            {.outer = 1, .length = 1 << 24, .inner = 4096});
  constexpr std::int64_t kSide = std::int64_t{1} << 30;  // 2^91 operations.
  ExpectGrowth<MatmulProblem>(Product(1 << 24, 1 << 24, 1 << 24), Product(kSide, kSide, kSide));
  ExpectGrowth<MatmulProblem>(Product(16, 4096, 4096), Product(16, 65536, 262144));
}

// Four cores share a row of this length, and no core sorts another row at the same time.
TEST(PaceTest, CoresThatSortNothingDoNotHelp) {
  DeviceInfo info = Info(Backend::kCpu);
  info.multiprocessors = 64;
  const Pace pace(info);
  const auto estimate = [&](std::int64_t rows, std::int64_t n) {
    return pace.Estimate(StrategyNamed<SortProblem>("cpu_radix"), {.rows = rows, .n = n});
  };
  EXPECT_GT(estimate(4, 1 << 18), 3.9 * estimate(1, 1 << 18));
  // With more rows, each core sorts whole rows.
  EXPECT_LT(estimate(64, 1 << 17), 2.1 * estimate(1, 1 << 17));
  EXPECT_GT(estimate(65, 1 << 17), 1.9 * estimate(64, 1 << 17));
}

TEST(PaceTest, EstimatesOfASelectGrowWithTheCount) {
  constexpr std::uint64_t kLength = 1 << 26;
  for (const Strategy<SelectProblem>* strategy : Strategies<SelectProblem>()) {
    const Pace pace(Info(strategy->backend));
    const SelectProblem none = {.n = kLength, .count = 0}, all = {.n = kLength, .count = kLength};
    EXPECT_EQ(strategy->cost(none).flops, kLength) << strategy->name;
    EXPECT_EQ(strategy->cost(all).flops, 5 * kLength) << strategy->name;
    EXPECT_GT(pace.Estimate(*strategy, all), 3 * pace.Estimate(*strategy, none)) << strategy->name;
  }
}

// Blocks that wait for others to end do not make anything faster.
TEST(PaceTest, AGpuHoldsSoManyBlocksAtOnce) {
  static constexpr Strategy<DotProblem> kStrategy = {
      .name = "made_up", .backend = Backend::kCuda, .cost = [](const DotProblem& p) {
        return Cost{
            .bytes = 8 * static_cast<std::uint64_t>(p.n), .flops = 0, .atomics = 0, .depth = 1};
      }};
  const Pace pace(Info(Backend::kCuda));
  DotProblem p = {.n = std::int64_t{1} << 32};
  const double usual = pace.Estimate(kStrategy, p);
  p.launch.block_size = 32;
  const double narrow = pace.Estimate(kStrategy, p);
  EXPECT_GT(narrow, 1.5 * usual);
  p.launch.grid_size = 1 << 20;
  EXPECT_EQ(pace.Estimate(kStrategy, p), narrow);
  p.launch.grid_size = 1;
  EXPECT_GT(pace.Estimate(kStrategy, p), 100 * narrow);
}

class LearningTest : public testing::Test {
 protected:
  double Estimate(const DotProblem& p) const { return pace_.Estimate(strategy_, p); }

  const Strategy<DotProblem>& strategy_ = StrategyNamed<DotProblem>("cpu_serial");
  Pace pace_{Info(Backend::kCpu)};
};

TEST_F(LearningTest, LearnsTheTimeOfAStrategy) {
  const DotProblem p = {.n = 1 << 24};
  const double cold = Estimate(p);
  // The time of a first call is accepted, because there is no other information.
  pace_.Learn(strategy_, p, 2 * cold);
  EXPECT_NEAR(Estimate(p), 2 * cold, 0.02 * cold);
  // A single call that takes three times as long does not change the rate, but many such calls do.
  pace_.Learn(strategy_, p, 6 * cold);
  EXPECT_LT(Estimate(p), 3 * cold);
  for (int i = 0; i < 50; ++i) pace_.Learn(strategy_, p, 6 * cold);
  EXPECT_NEAR(Estimate(p), 6 * cold, 0.1 * cold);
  // Twice the problem takes twice the time, and elements of other types are not faster.
  const DotProblem twice = {.n = 1 << 25};
  EXPECT_NEAR(Estimate(twice), 12 * cold, 0.2 * cold);
  const DotProblem f64 = {.dtype = DType::kF64, .n = 1 << 24};
  EXPECT_GT(Estimate(f64), 5.5 * cold);
  EXPECT_LT(pace_.Estimate(StrategyNamed<DotProblem>("cpu_parallel"), p), 2 * cold);
}

TEST_F(LearningTest, ShortCallsTeachNothing) {
  const DotProblem p = {.n = 100};
  const double cold = Estimate(p);
  pace_.Learn(strategy_, p, 0.9 * Pace::kMatters);
  pace_.Learn(strategy_, p, 0);
  pace_.Learn(strategy_, p, std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(Estimate(p), cold);
}

// The thread may have been descheduled for a while, or the host may have had to find memory first.
TEST(PaceTest, ADisturbedCallOfLittleWorkTeachesNothing) {
  const Strategy<AddProblem>& strategy = StrategyNamed<AddProblem>("cpu");
  const AddProblem small = {.n = 1000}, large = {.n = 1 << 22};
  Pace pace(Info(Backend::kCpu));
  const double cold = pace.Estimate(strategy, large);
  pace.Learn(strategy, small, 0.5);
  EXPECT_EQ(pace.Estimate(strategy, large), cold);
  pace.Learn(strategy, large, 1e6 * cold);
  EXPECT_LT(pace.Estimate(strategy, large), 1.01 * Pace::kMostApart * cold);
}

// Refused strategies are not measured, so rates that were learned under load must decay.
TEST_F(LearningTest, RefusalsTakeBackWhatLoadHasTaught) {
  const DotProblem small = {.n = 1 << 16}, large = {.n = 1 << 24};
  pace_.Calibrate(strategy_, small, 1e-3, large, 0.5);
  const double calm = Estimate(large);
  EXPECT_NEAR(calm, 0.5, 0.05);
  for (int i = 0; i < 100; ++i) pace_.Learn(strategy_, large, 1000 * calm);
  EXPECT_NEAR(Estimate(large), Pace::kMostApart * calm, 0.1 * calm);
  for (int i = 0; i < 100; ++i) pace_.Forget(strategy_, large);
  EXPECT_NEAR(Estimate(large), calm, 0.1 * calm);
}

// If a copy is refused, it cannot show that it would be fast again.
TEST(PaceTest, RefusedCopiesTakeBackWhatLoadHasTaught) {
  Paced l;
  const View x = Broadcast(&l.one, DType::kF32, {1 << 24});
  for (DType to : {DType::kF32, DType::kF64}) {
    const double calm = l.pace.EstimateCopy(x, to);
    // Even the first copy may run under load.
    l.pace.LearnCopy(x, to, 1000 * calm);
    const double loaded = l.pace.EstimateCopy(x, to);
    EXPECT_GT(loaded, 2 * calm);
    EXPECT_LT(loaded, 1.01 * Pace::kMostApart * calm);
    l.options.max_seconds = loaded / 2;
    EXPECT_EQ(ErrorReason(RunCopy(*l.stream, x, to, nullptr, l.options)), "OPERATION_TOO_LONG");
    EXPECT_LT(l.pace.EstimateCopy(x, to), loaded);
    for (int i = 0; i < 100; ++i) l.pace.ForgetCopy(x, to);
    EXPECT_NEAR(l.pace.EstimateCopy(x, to), calm, 0.1 * calm);
  }
}

TEST_F(LearningTest, WhatWasNotMeasuredIsAsSlowAsTheSlowestThatWas) {
  const DotProblem f32 = {.n = 1 << 24}, f64 = {.dtype = DType::kF64, .n = 1 << 24},
                   bf16 = {.dtype = DType::kBF16, .n = 1 << 24};
  const double slow = 4 * Estimate(f32), fast = 2 * Estimate(f64);
  pace_.Learn(strategy_, f32, slow);
  pace_.Learn(strategy_, f64, fast);
  EXPECT_NEAR(Estimate(bf16), slow, 0.01 * slow);
}

TEST_F(LearningTest, CalibratesOnTheDifference) {
  const DotProblem small = {.n = 1 << 20}, large = {.n = 1 << 22}, most = {.n = 1 << 30};
  // There is an overhead of 10 ms, and 2^20 elements take 1 ms.
  pace_.Calibrate(strategy_, small, 0.011, large, 0.014);
  EXPECT_NEAR(Estimate(most), 1.024, 0.01);
  // Times that consist only of overhead say nothing about the rate.
  pace_.Calibrate(strategy_, small, 0.0100, large, 0.0101);
  EXPECT_NEAR(Estimate(most), 1.024, 0.01);
}

// The time of a call that had to copy its operand says little about the strategy.
TEST(PaceTest, CallsTeachUnlessTheyCopy) {
  for (const bool copies : {false, true}) {
    Paced l;
    const std::int64_t n = 1 << 22;
    const std::vector<float> values(static_cast<std::size_t>(n), 1.0f);
    const View x = copies ? Broadcast(&l.one, DType::kF32, {n}) : VectorView(values.data(), n);
    l.options.strategy = "cpu_serial";
    l.options.max_seconds = l.options.max_slow_seconds = 1e9;
    const Strategy<ReduceProblem>& strategy = StrategyNamed<ReduceProblem>("cpu_serial");
    const double cold = l.pace.Estimate(strategy, {.n = n});
    ASSERT_TRUE(RunReduce(*l.stream, x, ReduceOp::kSum, l.options).ok());
    EXPECT_EQ(l.pace.Estimate(strategy, {.n = n}) == cold, copies);
  }
}

// The time of one strategy, for elements of any type, teaches nothing about other strategies.
TEST(PaceTest, RatesStandApart) {
  int moved = 0;
  for (const Strategy<MapProblem>* taught : Strategies<MapProblem>()) {
    Pace pace(Info(taught->backend));
    const MapProblem p = ReferenceMap(std::int64_t{1} << 32);
    std::vector<double> before;
    for (const Strategy<MapProblem>* other : Strategies<MapProblem>())
      before.push_back(pace.Estimate(*other, p));
    for (DType dtype : kArrayDTypes) {
      MapProblem of = p;
      of.dtype = dtype;
      pace.Learn(*taught, of, 100);
    }
    for (std::size_t i = 0; i < before.size(); ++i) {
      const Strategy<MapProblem>* other = Strategies<MapProblem>()[i];
      if (other == taught) {
        moved += pace.Estimate(*other, p) > 2 * before[i] ? 1 : 0;
      } else {
        EXPECT_EQ(pace.Estimate(*other, p), before[i]) << other->name;
      }
    }
  }
  EXPECT_GT(moved, 0);
}

// A call whose operand was prepared by an earlier call teaches nothing either.
TEST(PaceTest, CallsThatFindWhatTheyNeedTeachNothing) {
  struct Kept final : Keeper {
    PreparedMemory Keep(const Preparation&, std::size_t) override { return memory; }
    PreparedMemory memory;
  };
  // Acts like a strategy that prepares its operands itself.
  struct Preparing final : Work<ReduceProblem> {
    explicit Preparing(const View& operand) : x(operand) {}
    void Launch(Stream& stream, ReduceProblem& p, const Chosen& strategy) const override {
      stream.Prepare({"parts", x}, 256);
      strategy.launch(p, stream);
    }
    const View& x;
  };
  const std::int64_t n = 1 << 22;
  const std::vector<float> values(static_cast<std::size_t>(n), 1.0f);
  const View x = VectorView(values.data(), n);
  for (const bool ready : {true, false}) {
    Paced l;
    l.options.strategy = "cpu_serial";
    l.options.max_seconds = l.options.max_slow_seconds = 1e9;
    ReduceProblem p{.n = n, .x = values.data()};
    const Strategy<ReduceProblem>& strategy = StrategyNamed<ReduceProblem>("cpu_serial");
    const double cold = l.pace.Estimate(strategy, p);
    char parts[256];
    Kept kept;
    kept.memory = {parts, ready};
    l.stream->KeepWith(&kept);
    ASSERT_TRUE(ExecuteScalar(*l.stream, p, false, l.options, Preparing(x)).ok());
    EXPECT_EQ(l.pace.Estimate(strategy, p) == cold, ready);
  }
}

// Otherwise the same call would be accepted and stopped again and again.
TEST(PaceTest, TheTimeOfACallThatIsStoppedIsALowerBound) {
  struct Stopped final : Work<ReduceProblem> {
    void Launch(Stream&, ReduceProblem&, const Chosen&) const override {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
      *stop = true;
    }
    double seconds = 0;
    std::atomic<bool>* stop = nullptr;
  };
  for (const bool late : {false, true}) {
    Paced l;
    std::atomic<bool> stop = false;
    l.stream->WatchStop(&stop);
    l.options.strategy = "cpu_serial";
    l.options.max_seconds = l.options.max_slow_seconds = 1e9;
    // Unless it is late, the call is stopped long before its estimate, however busy the machine is.
    ReduceProblem p{.n = std::int64_t{1} << (late ? 22 : 36)};
    const Strategy<ReduceProblem>& strategy = StrategyNamed<ReduceProblem>("cpu_serial");
    const double cold = l.pace.Estimate(strategy, p);
    Stopped work;
    work.seconds = late ? 2 * cold : 0;
    work.stop = &stop;
    EXPECT_EQ(ErrorReason(ExecuteScalar(*l.stream, p, false, l.options, work).status()),
              "CANCELLED");
    if (late) {
      EXPECT_GE(l.pace.Estimate(strategy, p), 1.9 * cold);
    } else {
      EXPECT_EQ(l.pace.Estimate(strategy, p), cold);
    }
  }
}

TEST_F(LearningTest, ManyThreadsLearnAndAsk) {
  const DotProblem p = {.n = 1 << 24};
  pace_.Learn(strategy_, p, 0.05);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        pace_.Learn(strategy_, p, 0.1);
        EXPECT_GT(Estimate(p), 0.045);
        EXPECT_LT(Estimate(p), 0.105);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_NEAR(Estimate(p), 0.1, 0.005);
}

// Five calls measure each strategy, type, reduction operation and kind of product or axes.
TEST(WarmUpTest, MeasuresEveryRowTypeAndOperation) {
  FakeDevice device;
  const std::unique_ptr<Stream> stream = *MakeStream(device);
  Pace pace(device.info());
  const Pace cold(device.info());
  int rates = 0;
  ForEachOperation([&]<class Problem>() {
    constexpr bool kProduct = std::is_same_v<Problem, MatmulProblem>;
    int ops = 1;
    if constexpr (requires(Problem p) { p.op; }) ops = static_cast<int>(std::size(kAllReduceOps));
    const int kinds = kProduct || std::is_same_v<Problem, ReduceAxesProblem> ? 2 : 1;
    for (const Strategy<Problem>* strategy : Strategies<Problem>())
      for (DType dtype : kArrayDTypes)
        if (strategy->backend == Backend::kCpu && strategy->dtypes.Contains(dtype) &&
            (kProduct || IsComputed(dtype)))
          rates += ops * kinds;
  });
  // A measured rate never exactly equals the assumed one. Products of this size are compute-bound.
  const MatmulProblem product = Product(2000, 2000, 2000);
  const auto unmeasured = [&] {
    std::string names;
    for (const Strategy<MatmulProblem>* matmul : Strategies<MatmulProblem>()) {
      if (matmul->backend == Backend::kCpu &&
          pace.Estimate(*matmul, product) == cold.Estimate(*matmul, product))
        absl::StrAppend(&names, Absl(matmul->name), " ");
    }
    return names;
  };
  // A measurement that other processes disturb is not used as a rate.
  for (int attempt = 1; attempt <= 10 && !unmeasured().empty(); ++attempt) {
    ASSERT_TRUE(WarmUp(*stream, pace, /*every_row=*/true).ok());
    EXPECT_EQ(device.Count(FakeDevice::Step::kSynchronize), 5 * rates * attempt);
  }
  EXPECT_EQ(unmeasured(), "");
  const DotProblem dot = {.n = 1 << 24};
  const Strategy<DotProblem>& serial = StrategyNamed<DotProblem>("cpu_serial");
  EXPECT_NE(pace.Estimate(serial, dot), cold.Estimate(serial, dot));
  EXPECT_EQ(device.allocations(), 0u);
  EXPECT_TRUE(WarmUp(*stream, pace, /*every_strategy=*/false).ok());
}

TEST(WarmUpTest, FailsOnlyWithTheDevice) {
  FakeDevice device;
  const std::unique_ptr<Stream> stream = *MakeStream(device);
  Pace pace(device.info());
  // A strategy that cannot get its scratch memory is skipped.
  device.Fail(FakeDevice::Step::kScratch, DeviceError::Kind::kOutOfMemory, 1000000);
  EXPECT_TRUE(WarmUp(*stream, pace, true).ok());
  device.Fail(FakeDevice::Step::kSynchronize, DeviceError::Kind::kLost, 1000000);
  EXPECT_EQ(ErrorReason(WarmUp(*stream, pace, true)), "DEVICE_LOST");
}

}  // namespace
}  // namespace tessera::test
