#include "kernels/bench/regret.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/bench/problems.h"

namespace tessera::bench {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// A strategy whose first time is more than kHopeless times the best one is not timed again. Its
// first time then counts for both of its times.
constexpr double kHopeless = 2;
constexpr int kRounds = 7;
constexpr int kLongRounds = 3;  // for problems that take longer than kLongUs
constexpr double kLongUs = 5e3;
// The time of shorter problems is mostly launch time; the time of longer problems is mostly work.
constexpr double kShortUs = 30;

// Medians in microseconds, on an idle device (lone) and after a kernel that holds the device
// (held).
struct Timing {
  double lone = kNever, held = kNever;
};

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Returns the times of all candidates, measured in interleaved rounds; kNever for a candidate that
// fails.
std::vector<Timing> TimeAll(Rig& rig, const std::vector<Candidate>& candidates) {
  const std::size_t count = candidates.size();
  std::vector<double> enqueueing(count), first(count, kNever);
  for (std::size_t i = 0; i < count; ++i) {
    try {
      enqueueing[i] = rig.WarmUp(candidates[i].launch);
      first[i] = rig.Time(candidates[i].launch, Rig::kIdle);
    } catch (const DeviceError& error) {
      if (error.kind() == DeviceError::Kind::kLost) throw;
    }
  }
  const double best = *std::min_element(first.begin(), first.end());
  const int rounds = best > kLongUs ? kLongRounds : kRounds;
  std::vector<std::vector<double>> lone(count), held(count);
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < count; ++i) {
      const Candidate& candidate = candidates[i];
      if (first[i] == kNever || (first[i] > kHopeless * best && !candidate.chosen)) continue;
      lone[i].push_back(rig.Time(candidate.launch, Rig::kIdle));
      held[i].push_back(rig.Time(candidate.launch, enqueueing[i]));
    }
  }
  std::vector<Timing> timings(count);
  for (std::size_t i = 0; i < count; ++i) {
    timings[i] =
        lone[i].empty() ? Timing{first[i], first[i]} : Timing{Median(lone[i]), Median(held[i])};
  }
  return timings;
}

// The result of a problem. A null candidate means that there is no such candidate, or that none
// solved the problem.
struct Outcome {
  RandomProblem problem;
  std::vector<Timing> timings;
  const Candidate* chosen = nullptr;
  const Candidate* vendor = nullptr;  // the vendor's best
  const Candidate* best = nullptr;    // the best strategy

  const Timing& Of(const Candidate* candidate) const {
    return timings[static_cast<std::size_t>(candidate - problem.candidates.data())];
  }
  // The ratios of our time to the vendor's time and to the best strategy's time.
  double Ratio() const { return Of(chosen).lone / Of(vendor).lone; }
  double Regret() const { return Of(chosen).lone / Of(best).lone; }
};

Outcome Try(Rig& rig, RandomProblem problem) {
  Outcome outcome;
  outcome.problem = std::move(problem);
  outcome.timings = TimeAll(rig, outcome.problem.candidates);
  const auto better = [&](const Candidate& candidate, const Candidate*& best) {
    if (outcome.Of(&candidate).lone == kNever) return;
    if (best == nullptr || outcome.Of(&candidate).lone < outcome.Of(best).lone) best = &candidate;
  };
  for (const Candidate& candidate : outcome.problem.candidates) {
    if (candidate.chosen && outcome.Of(&candidate).lone != kNever) outcome.chosen = &candidate;
    if (candidate.vendor) better(candidate, outcome.vendor);
    if (candidate.strategy) better(candidate, outcome.best);
  }
  return outcome;
}

std::string Named(const Outcome& outcome, const Candidate* candidate) {
  if (candidate == nullptr) return "-";
  return absl::StrFormat("%s %.1f us", candidate->name, outcome.Of(candidate).lone);
}

// Prints the geometric mean and the worst of the ratios to the vendor's time, for the problems for
// which the vendor needs from `from` to `to` microseconds.
void PrintBand(const std::vector<const Outcome*>& outcomes, double from, double to) {
  double logs = 0, worst = 0;
  int count = 0, behind = 0;
  for (const Outcome* outcome : outcomes) {
    const double vendor = outcome->Of(outcome->vendor).lone;
    if (vendor < from || vendor >= to) continue;
    const double ratio = outcome->Ratio();
    logs += std::log(ratio);
    worst = std::max(worst, ratio);
    behind += ratio > 1.05 ? 1 : 0;
    ++count;
  }
  if (count == 0) return;
  std::printf(
      "  vendor %5.0f us to %5.0f us: %4d problems, geometric mean %.3f, behind by more than "
      "5 %%: %d, worst %.2f\n",
      from, to, count, std::exp(logs / count), behind, worst);
}

void Print(const std::vector<Outcome>& outcomes) {
  std::vector<const Outcome*> compared;
  double regrets = 0;
  int solved = 0;
  for (const Outcome& outcome : outcomes) {
    if (outcome.chosen == nullptr) {
      std::printf("NOT SOLVED by its default: %s %s %s\n", outcome.problem.operation.c_str(),
                  outcome.problem.dtype.c_str(), outcome.problem.shape.c_str());
      continue;
    }
    regrets += outcome.Regret() - 1;
    ++solved;
    if (outcome.vendor != nullptr) compared.push_back(&outcome);
  }
  std::printf("our default's time over the vendor's best, on an idle device:\n");
  for (const auto& [from, to] :
       {std::pair{0.0, 12.0}, {12.0, kShortUs}, {0.0, kShortUs}, {kShortUs, 1e9}, {0.0, 1e9}})
    PrintBand(compared, from, to);
  if (solved > 0)
    std::printf("regret against the best strategy: %.2f %% on average\n", 100 * regrets / solved);

  const auto print_worst = [](std::vector<const Outcome*> list, double (*badness)(const Outcome&)) {
    std::sort(list.begin(), list.end(),
              [badness](const Outcome* a, const Outcome* b) { return badness(*a) > badness(*b); });
    for (std::size_t i = 0; i < std::min<std::size_t>(20, list.size()); ++i) {
      const Outcome& o = *list[i];
      std::printf("  %.2f %s %s %s: %s; vendor %s; best %s\n", badness(o),
                  o.problem.operation.c_str(), o.problem.dtype.c_str(), o.problem.shape.c_str(),
                  Named(o, o.chosen).c_str(), Named(o, o.vendor).c_str(), Named(o, o.best).c_str());
    }
  };
  std::printf("worst compared with the vendor:\n");
  print_worst(compared, [](const Outcome& o) { return o.Ratio(); });
  std::vector<const Outcome*> all;
  for (const Outcome& outcome : outcomes)
    if (outcome.chosen != nullptr) all.push_back(&outcome);
  std::printf("most regretted:\n");
  print_worst(all, [](const Outcome& o) { return o.Regret(); });
}

// Writes every candidate's times, so that other choices can be evaluated from the file.
void Write(const std::vector<Outcome>& outcomes, Rig& rig, const RegretOptions& options) {
  std::ofstream out(options.json);
  out << absl::StrFormat(R"({"device": "%s", "model": "%s", "date": "%s", "seed": %d, "rows": [)",
                         rig.device().info().name, rig.device().info().model,
                         absl::FormatTime("%Y-%m-%d", absl::Now(), absl::UTCTimeZone()),
                         options.seed);
  const char* separator = "\n";
  for (const Outcome& o : outcomes) {
    out << separator
        << absl::StrFormat(
               R"(  {"operation": "%s", "dtype": "%s", "shape": "%s", "features": [%s], )"
               R"("times": [)",
               o.problem.operation, o.problem.dtype, o.problem.shape,
               absl::StrJoin(o.problem.features, ", "));
    const char* comma = "";
    for (const Candidate& candidate : o.problem.candidates) {
      const Timing& timing = o.Of(&candidate);
      if (timing.lone == kNever) continue;
      out << comma
          << absl::StrFormat(R"({"name": "%s", "us": %.2f, "held_us": %.2f)", candidate.name,
                             timing.lone, timing.held)
          << (candidate.chosen ? R"(, "chosen": true)" : "")
          << (candidate.vendor ? R"(, "vendor": true)" : "")
          << (candidate.strategy ? "}" : R"(, "call": true})");
      comma = ", ";
    }
    out << "]}";
    separator = ",\n";
  }
  out << "\n]}\n";
}

}  // namespace

int RunRegret(Rig& rig, const RegretOptions& options) {
  Problems problems(rig, options.seed);
  std::vector<Outcome> outcomes(static_cast<std::size_t>(options.problems));
  try {
    for (Outcome& outcome : outcomes) outcome = Try(rig, problems.Next(options.operation));
  } catch (const DeviceError& error) {
    std::fprintf(stderr, "strategy_bench: %s\n", error.what());
    return 1;
  }
  Print(outcomes);
  if (!options.json.empty()) Write(outcomes, rig, options);
  return 0;
}

}  // namespace tessera::bench
