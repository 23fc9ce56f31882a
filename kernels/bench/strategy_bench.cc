// Times every strategy, the vendor's calls and the ceilings, with the events of one device. If
// --regret is given, it times random problems instead, with the strategies that requests get by
// default, the vendor's calls and the other strategies. `strategy_bench --help` lists the flags.
//
// Times are device times, from the first to the last step of one operation. In the fixed list, the
// host enqueues all steps before the first one begins, except for operations named lone_...; random
// problems are timed as lone requests on an idle device. Operands hold normally distributed random
// values and rotate through memory of more than three times the largest L2 cache, so every pass
// reads from memory. The candidates of a problem are timed in interleaved rounds.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/bench/problems.h"
#include "kernels/bench/rig.h"

namespace tessera::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string device = "auto", filter, operation, json;
  int max_exponent = 0, rounds = 7, regret = 0;
  std::uint64_t seed = 1;
};

constexpr double kNever = std::numeric_limits<double>::infinity();
// In a round, a candidate is called until it has used kRoundUs, but at most kRoundCalls times.
constexpr double kRoundUs = 1e3;
constexpr int kRoundCalls = 20;
// A candidate that has used kPatienceUs is not timed again after kLeastRounds.
constexpr double kPatienceUs = 1e5;
constexpr int kLeastRounds = 3;
// A candidate for a random problem whose first time is more than kHopeless times the best one is
// not timed again.
constexpr double kHopeless = 2;

// Returns each candidate's mean times in the rounds, in microseconds and in ascending order, or no
// times for a candidate that fails. Throws DeviceError if the device is lost.
std::vector<std::vector<double>> Times(Rig& rig, const Case& problem, const Options& options) {
  const std::vector<Candidate>& candidates = problem.candidates;
  std::vector<double> enqueueing(candidates.size(), Rig::kIdle), first(candidates.size(), kNever);
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    try {
      const double us = rig.WarmUp(candidates[i].launch);
      if (!problem.lone) enqueueing[i] = us;
      first[i] = rig.Time(candidates[i].launch, enqueueing[i]);
    } catch (const DeviceError& error) {
      if (error.kind() == DeviceError::Kind::kLost) throw;
      std::fprintf(stderr, "strategy_bench: %s: %s\n", candidates[i].name.c_str(), error.what());
    }
  }
  const double best = *std::min_element(first.begin(), first.end());
  std::vector<std::vector<double>> times(candidates.size());
  std::vector<double> used(candidates.size());
  for (int round = 0; round < options.rounds; ++round) {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (first[i] == kNever || (round >= kLeastRounds && used[i] > kPatienceUs)) continue;
      if (options.regret > 0 && first[i] > kHopeless * best && !candidates[i].chosen) {
        times[i] = {first[i]};
        continue;
      }
      double us = 0;
      int calls = 0;
      while (calls == 0 || (us < kRoundUs && calls < kRoundCalls)) {
        us += rig.Time(candidates[i].launch, enqueueing[i]);
        ++calls;
      }
      times[i].push_back(us / calls);
      used[i] += us;
    }
  }
  for (std::vector<double>& each : times) std::sort(each.begin(), each.end());
  return times;
}

double Rounded(double value) { return std::stod(absl::StrFormat("%.5g", value)); }

// Returns a row for one candidate of the fixed list.
Json FixedRow(Rig& rig, const Case& problem, const Candidate& candidate,
              const std::vector<double>& times) {
  const double us = times[times.size() / 2];
  Json row = {{"operation", !candidate.peer ? problem.operation
                            : problem.lone  ? "lone_peer"
                                            : "peer"},
              {"strategy", candidate.name},
              {"dtype", problem.dtype},
              {"size", problem.size},
              {"us", Rounded(us)},
              {"us_min", Rounded(times.front())},
              {"us_max", Rounded(times.back())},
              {"runs", times.size()}};
  if (problem.bytes > 0) row["gb_per_s"] = Rounded(problem.bytes / us / 1e3);
  if (problem.flops > 0) row["gflop_per_s"] = Rounded(problem.flops / us / 1e3);
  if (candidate.chosen) row["chosen"] = true;
  if (problem.error != nullptr) {
    rig.Time(candidate.launch, Rig::kIdle);
    row["error"] = Rounded(problem.error());
  }
  return row;
}

// Returns the row of a random problem, with all candidates, so that other choices can be evaluated
// from the file.
Json RandomRow(const Case& problem, const std::vector<std::vector<double>>& times) {
  Json row = {{"operation", problem.operation},
              {"dtype", problem.dtype},
              {"shape", problem.size},
              {"features", problem.features},
              {"times", Json::array()}};
  for (std::size_t i = 0; i < times.size(); ++i) {
    if (times[i].empty()) continue;
    const Candidate& candidate = problem.candidates[i];
    Json& entry = row["times"].emplace_back();
    entry = {{"name", candidate.name}, {"us", Rounded(times[i][times[i].size() / 2])}};
    if (candidate.chosen) entry["chosen"] = true;
    if (candidate.vendor) entry["vendor"] = true;
    if (!Problems::MayBeDefault(candidate)) entry["call"] = true;
  }
  return row;
}

// Returns the name of a problem and a candidate, in which --filter searches.
std::string NameOf(const Case& problem, const Candidate& candidate) {
  return absl::StrCat(problem.operation, "/", candidate.name, "/", problem.dtype, "/",
                      problem.size);
}

// Times a problem, prints a line for each candidate, and appends the results.
void Measure(Rig& rig, const Case& problem, const Options& options, std::vector<Json>& rows) {
  const std::vector<std::vector<double>> times = Times(rig, problem, options);
  for (std::size_t i = 0; i < times.size(); ++i) {
    if (times[i].empty()) continue;
    const Candidate& candidate = problem.candidates[i];
    const double us = times[i][times[i].size() / 2];
    const std::string line = absl::StrFormat(
        "%-60s %12.1f us %9.1f GB/s %9.1f GFLOP/s%s", NameOf(problem, candidate), us,
        problem.bytes / us / 1e3, problem.flops / us / 1e3, candidate.chosen ? "  chosen" : "");
    std::puts(line.c_str());
    if (options.regret == 0) rows.push_back(FixedRow(rig, problem, candidate, times[i]));
  }
  std::fflush(stdout);
  if (options.regret > 0) rows.push_back(RandomRow(problem, times));
}

void Write(Rig& rig, const Options& options, const std::vector<Json>& rows) {
  Json head = {{"device", rig.device().info().name},
               {"model", rig.device().info().model},
               {"date", absl::FormatTime("%Y-%m-%d", absl::Now(), absl::UTCTimeZone())}};
  if (options.regret > 0) {
    head["seed"] = options.seed;
    head["rounds"] = options.rounds;
  }
  std::string text = head.dump();
  text.pop_back();
  text += ", \"rows\": [";
  const char* separator = "\n  ";
  for (const Json& row : rows) {
    absl::StrAppend(&text, separator, row.dump());
    separator = ",\n  ";
  }
  std::ofstream file(options.json);
  file << text << "\n]}\n";
  if (!file.flush()) Die(absl::UnavailableError("cannot write " + options.json));
}

void Run(const Options& options) {
  Rig rig(options.device);
  Problems problems(rig);
  std::vector<Json> rows;
  if (options.regret > 0) {
    problems.Seed(options.seed);
    for (int i = 0; i < options.regret; ++i)
      Measure(rig, problems.Random(options.operation), options, rows);
  } else {
    const int most = options.max_exponent > 0 ? options.max_exponent : rig.gpu() ? 30 : 24;
    const std::regex filter(options.filter);
    for (Case& problem : problems.All(most)) {
      std::erase_if(problem.candidates, [&](const Candidate& candidate) {
        return !std::regex_search(NameOf(problem, candidate), filter);
      });
      if (!problem.candidates.empty()) Measure(rig, problem, options, rows);
    }
  }
  if (!options.json.empty()) Write(rig, options, rows);
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  tessera::bench::Options options;
  CLI::App app("Times the strategies of one device, the vendor's calls and the ceilings");
  app.add_option("--device", options.device, "auto, cuda:0, cpu, ...");
  app.add_option("--filter", options.filter,
                 "a regular expression for operation/strategy/dtype/size");
  app.add_option("--max-exponent", options.max_exponent, "vectors have at most 2^N elements");
  app.add_option("--rounds", options.rounds, "number of rounds, whose median is reported")
      ->check(CLI::Range(1, 1000));
  app.add_option("--regret", options.regret, "times this many random problems instead");
  app.add_option("--seed", options.seed, "seed of the random problems");
  app.add_option("--operation", options.operation, "the operation of all random problems")
      ->check(CLI::IsMember({"matmul", "dot", "reduce", "reduce_axes", "batch"}));
  app.add_option("--json", options.json, "the file for the measurements");
  CLI11_PARSE(app, argc, argv);
  try {
    tessera::bench::Run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "strategy_bench: %s\n", error.what());
    return 1;
  }
}
