// Tests how `tessera bench` compares strategies, with made-up responses and with a server.
#include "client/cli/comparison.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "client/cli/output.h"
#include "client/client.h"
#include "kernels/base/error.h"
#include "tests/client_fixture.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A strategy that the problems below simulate.
struct Actor {
  double us = 1;
  long double value = 0;
  double roundoff = 0;
  absl::Status refusal;
  int calls = 0;
};

BenchProblem Play(std::map<std::string, Actor>& actors, long double scale,
                  DType dtype = DType::kF64) {
  BenchProblem problem;
  problem.title = "dot of x and y";
  problem.operation = "dot";
  for (const auto& [name, actor] : actors) problem.strategies.push_back(name);
  problem.operand_bytes = 1000;
  problem.repeat = 5;
  problem.run = [&actors, dtype](const std::string& name, bool) -> absl::StatusOr<BenchAnswer> {
    Actor& actor = actors[name];
    if (!actor.refusal.ok()) return actor.refusal;
    ++actor.calls;
    BenchAnswer answer;
    answer.stats.set_device("cpu");
    answer.stats.set_kernel_us(actor.us * (actor.calls % 2 == 0 ? 1 : 3));
    answer.stats.set_roundoff(actor.roundoff);
    answer.values = {actor.value};
    answer.dtype = dtype;
    return answer;
  };
  problem.scale = [scale]() -> absl::StatusOr<BenchScale> {
    return [scale](std::size_t, long double) { return scale; };
  };
  return problem;
}

BenchReport Report(std::map<std::string, Actor>& actors, long double scale = 0,
                   DType dtype = DType::kF64) {
  auto report = RunBench(Play(actors, scale, dtype));
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *std::move(report) : BenchReport{};
}

bool Agree(long double a, long double b, double roundoff, long double scale,
           DType dtype = DType::kF64) {
  std::map<std::string, Actor> actors = {{"a", {.value = a, .roundoff = roundoff}},
                                         {"b", {.value = b, .roundoff = roundoff}}};
  const absl::Status status = CheckAgreement(Report(actors, scale, dtype));
  EXPECT_EQ(ErrorReason(status), status.ok() ? "" : "RESULTS_DISAGREE");
  return status.ok();
}

TEST(Bench, TimesInTurnAndTakesTheMedian) {
  std::map<std::string, Actor> actors = {{"a", {.us = 10}}, {"b", {.us = 1}}};
  const BenchReport report = Report(actors);
  ASSERT_EQ(report.rows.size(), 2u);
  // The first of six calls warms up. Of the others, every second call takes longer.
  EXPECT_THAT(report.rows[0].kernel_us, ElementsAre(10, 10, 10, 30, 30));
  EXPECT_EQ(report.rows[0].median_us, 10);
  EXPECT_DOUBLE_EQ(report.rows[0].rate, 1000 / 10e-6);
  EXPECT_EQ(report.unit, "B/s");
  EXPECT_EQ(report.device, "cpu");
}

TEST(Bench, DoesNotWaitForSlowStrategiesForEver) {
  std::map<std::string, Actor> actors = {{"quick", {.us = 1}}, {"slow", {.us = 1.7e6}}};
  const BenchReport report = Report(actors);
  EXPECT_EQ(report.rows[0].kernel_us.size(), 5u);
  EXPECT_EQ(report.rows[1].kernel_us.size(), 3u);
}

TEST(Bench, NamesWhatDoesNotApply) {
  std::map<std::string, Actor> actors = {
      {"a",
       {.refusal = MakeError(absl::StatusCode::kFailedPrecondition, "STRATEGY_UNSUPPORTED", "no",
                             {{"needs", "a CUDA device"}})}},
      {"b",
       {.refusal =
            MakeError(absl::StatusCode::kInvalidArgument, "BAD_LAUNCH", "no",
                      {{"field", "launch.grid_size"}, {"value", "7"}, {"range", "1 to 5"}})}},
      {"c", {.refusal = absl::DeadlineExceededError("late")}}};
  EXPECT_EQ(ErrorReason(RunBench(Play(actors, 0)).status()), "STRATEGY_UNSUPPORTED")
      << "nothing is left to time";
  actors["d"] = {};
  const BenchReport report = Report(actors);
  ASSERT_EQ(report.skipped.size(), 3u);
  EXPECT_EQ(report.skipped[0].reason, "needs a CUDA device");
  EXPECT_EQ(report.skipped[1].reason, "launch.grid_size is 7, but must be 1 to 5");
  EXPECT_EQ(report.skipped[2].reason, "takes longer than --timeout");
  actors["e"].refusal = absl::NotFoundError("no such buffer");
  EXPECT_TRUE(absl::IsNotFound(RunBench(Play(actors, 0)).status()));
}

TEST(Bench, AnswersDifferByNoMoreThanBothBounds) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  EXPECT_TRUE(Agree(100, 100.19L, 1e-3, 100));
  EXPECT_FALSE(Agree(100, 100.21L, 1e-3, 100));
  EXPECT_TRUE(Agree(5, 5, 0, 0));
  EXPECT_FALSE(Agree(5, 6, 1, 0)) << "a scale of 0 says that answers are exact";
  EXPECT_TRUE(Agree(kNan, kNan, 0, 0));
  EXPECT_FALSE(Agree(kNan, 1, 1e-3, 1));
  EXPECT_FALSE(Agree(1, kInf, 1e-3, 1));
  EXPECT_TRUE(Agree(3e38L, kInf, 1e-3, 1e39L)) << "one order may overflow";
  // Both results may be rounded to their type, in either direction.
  EXPECT_TRUE(Agree(1, 1 + 0x1p-10L, 0, 1, DType::kF16));
  EXPECT_FALSE(Agree(1, 1 + 0x1p-10L, 0, 1, DType::kF32));
}

TEST(Bench, ComparesWithTheTightestBound) {
  std::map<std::string, Actor> actors = {
      {"loose", {.value = 1.05L, .roundoff = 0.1}},
      {"tight", {.value = 1, .roundoff = 1e-9}},
      {"wrong", {.value = 2, .roundoff = 1e-6}},
  };
  const BenchReport report = Report(actors, 1);
  EXPECT_EQ(report.reference, "tight");
  EXPECT_TRUE(report.rows[0].agrees);
  EXPECT_FALSE(report.rows[2].agrees);
  const absl::Status status = CheckAgreement(report);
  EXPECT_EQ(ErrorReason(status), "RESULTS_DISAGREE");
  EXPECT_THAT(std::string(status.message()), HasSubstr("'wrong' differs from 'tight' by 1"));
  EXPECT_EQ(ExitCode(status), 1);
  EXPECT_EQ(ToJson(report)["agree"], false);
  EXPECT_THAT(ChartText(report, 80, false), Not(HasSubstr("All results agree")));
}

TEST(Bench, BarsFitTheTerminal) {
  std::map<std::string, Actor> actors = {{"half", {.us = 2}}, {"whole", {.us = 1}}};
  BenchReport report = Report(actors);
  report.ceiling = {2e9, "made up"};
  const std::string chart = ChartText(report, 60, false);
  EXPECT_THAT(chart, HasSubstr("ceiling: 2.0 GB/s, made up\n"));
  EXPECT_THAT(chart, HasSubstr("STRATEGY  TIME us  GB/s  CEILING\n"
                               "half          2.0  0.50     25 %  #############\n"
                               "whole         1.0  1.00     50 %  ##########################\n"));
  EXPECT_THAT(ChartText(report, 60, true), HasSubstr("█████████████\n"));
  EXPECT_THAT(ChartText(report, 20, false), Not(HasSubstr("#"))) << "no room";
}

TEST(Bench, SamplesEndWithTheLastElement) {
  for (std::uint64_t n : {std::uint64_t{0}, std::uint64_t{1}, kBenchSample, kBenchSample + 1,
                          3 * kBenchSample, std::uint64_t{1} << 33, (std::uint64_t{1} << 40) - 1}) {
    const BenchSample sample = SampleOf(n);
    EXPECT_LE(sample.count, kBenchSample);
    EXPECT_EQ(sample.step % 2, 1u);
    if (n <= kBenchSample) {
      EXPECT_EQ(sample.count, n);
      EXPECT_EQ(sample.step, 1u);
    } else {
      EXPECT_GE(sample.count, kBenchSample / 3);
      EXPECT_EQ(sample.offset + (sample.count - 1) * sample.step, n - 1);
    }
  }
}

TEST(Bench, ScratchIsReadInASampleAndDeleted) {
  TestServer server(TcpOptions());
  Client client({.server = server.address()});
  {
    v1::Limits limits;
    limits.mutable_max_ttl()->set_seconds(60);
    BenchScratch scratch(client, limits);
    std::vector<std::int32_t> x(3 * kBenchSample + 5);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::int32_t>(i);
    const ResultBuffer target = scratch.Target("x");
    const std::string_view bytes(reinterpret_cast<const char*>(x.data()), x.size() * 4);
    const auto buffer =
        client.Upload(target.name, DType::kI32, {static_cast<std::int64_t>(x.size())},
                      FromMemory(bytes), {.ttl = target.ttl, .replace = target.replace});
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_TRUE(buffer->has_expire_time());
    const auto values = scratch.Fetch(*buffer);
    ASSERT_TRUE(values.ok()) << values.status();
    const BenchSample sample = SampleOf(x.size());
    ASSERT_EQ(values->size(), sample.count);
    for (std::size_t i = 0; i < values->size(); ++i) {
      ASSERT_EQ((*values)[i], static_cast<long double>(sample.offset + i * sample.step));
    }
    EXPECT_EQ(client.ListBuffers()->size(), 2u);
  }
  EXPECT_EQ(client.ListBuffers()->size(), 0u);
}

TEST(Text, DurationsHaveTwoUnitsAtMost) {
  EXPECT_EQ(HumanDuration(absl::Nanoseconds(1500)), "1.5 us");
  EXPECT_EQ(HumanDuration(absl::Microseconds(999'500)), "999.5 ms");
  EXPECT_EQ(HumanDuration(absl::Seconds(59)), "59.0 s");
  EXPECT_EQ(HumanDuration(absl::Seconds(60)), "1 m 0 s");
  EXPECT_EQ(HumanDuration(absl::Hours(23) + absl::Minutes(59)), "23 h 59 m");
  EXPECT_EQ(HumanDuration(absl::Hours(3 * 24 + 5) + absl::Minutes(59)), "3 d 5 h");
}

TEST(Text, BytesInTheUnitThatSuits) {
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1024), "1 KiB");
  EXPECT_EQ(HumanBytes(1536), "1.5 KiB");
  EXPECT_EQ(HumanBytes((1 << 20) - 1), "1 MiB");
  EXPECT_EQ(HumanBytes(std::uint64_t{5} << 30), "5 GiB");
  EXPECT_EQ(HumanBytes(UINT64_MAX), "16 EiB");
}

}  // namespace
}  // namespace tessera
