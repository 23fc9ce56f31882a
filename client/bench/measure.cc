#include "client/bench/measure.h"

#include <algorithm>
#include <cstddef>
#include <thread>

#include "client/bench/channels.h"
#include "client/bench/loops.h"

namespace tessera::bench {
namespace {

constexpr double kWarmUpSeconds = 0.1;
// The number of the first caller of the concurrent loops. It is above the numbers of the measured
// callers, so that the names of results differ.
constexpr int kFirstBeside = 1 << 20;

// Measures one round of one target. Returns a sample for each load in the group.
std::vector<Sample> Measure(const Target& target, const Group& group, std::uint64_t seed,
                            const Options& options) {
  const Operation& operation = *group.operation;
  Channels channels(target, group.callers);
  const auto closed = [&](double seconds) {
    ClosedLoop loop(channels, operation, group.size, {.count = group.callers});
    std::this_thread::sleep_for(Ticks(seconds));
    return loop.Stop();
  };
  closed(kWarmUpSeconds);
  std::vector<Sample> samples;
  for (const Load& load : group.loads) {
    switch (load.kind) {
      case Load::Kind::kClosed:
        samples.push_back(closed(options.seconds));
        break;
      case Load::Kind::kRate:
        samples.push_back(
            OpenLoop(channels, operation, group.size).Run(load.value, options.seconds, seed));
        break;
      case Load::Kind::kShare: {
        const double calls_per_second =
            samples[0].per_second / static_cast<double>(WorkOf(operation, group.size));
        samples.push_back(OpenLoop(channels, operation, group.size)
                              .Run(load.value * calls_per_second, options.seconds, seed));
        break;
      }
      case Load::Kind::kRest:
        samples.push_back(CallAfterRest(channels, operation, group.size, load.value));
        break;
    }
  }
  return samples;
}

// Does the same as Measure while the loops of --beside run.
std::vector<Sample> MeasureBeside(const Target& target, const Group& group, std::uint64_t seed,
                                  const Options& options) {
  if (!options.beside.has_value()) return Measure(target, group, seed, options);
  const Operation& operation = FindOperation(options.beside->operation);
  Channels channels(target, options.beside->callers);
  ClosedLoop loop(channels, operation, SizesOf(operation, options)[0],
                  {.count = options.beside->callers, .first = kFirstBeside});
  std::vector<Sample> samples = Measure(target, group, seed, options);
  const double per_second = loop.Stop().per_second;
  for (Sample& sample : samples) sample.beside_per_second = per_second;
  return samples;
}

void Prepare(const Target& target, const Operation& operation, std::int64_t size) {
  if (target.kind == Target::Kind::kBare || operation.prepare == nullptr) return;
  Channels channels(target, 1);
  operation.prepare(channels, size);
}

bool Has(const Target& target, const Operation& operation) {
  return target.kind != Target::Kind::kNaive || operation.naive;
}

}  // namespace

std::vector<Row> MeasureGroup(const Servers& servers, const Group& group, std::mt19937_64& random,
                              const Options& options) {
  const Operation* beside =
      options.beside.has_value() ? &FindOperation(options.beside->operation) : nullptr;
  const std::vector<Target>& targets = servers.targets();
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (!Has(targets[i], *group.operation)) continue;
    if (beside != nullptr && !Has(targets[i], *beside)) continue;
    order.push_back(i);
    Prepare(targets[i], *group.operation, group.size);
    if (beside != nullptr) Prepare(targets[i], *beside, SizesOf(*beside, options)[0]);
  }
  const std::vector<std::size_t> shown = order;

  // samples[target][load][round]
  std::vector<std::vector<std::vector<Sample>>> samples(
      targets.size(), std::vector<std::vector<Sample>>(group.loads.size()));
  for (int round = 0; round < options.rounds; ++round) {
    const std::uint64_t seed = random();  // gives every target the same start times
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      const std::vector<Sample> measured = MeasureBeside(targets[i], group, seed, options);
      for (std::size_t load = 0; load < measured.size(); ++load)
        samples[i][load].push_back(measured[load]);
    }
  }
  for (const std::size_t i : shown)
    if (targets[i].kind == Target::Kind::kTessera) DeleteBuffers(targets[i]);

  std::vector<Row> rows;
  for (std::size_t load = 0; load < group.loads.size(); ++load)
    for (const std::size_t i : shown)
      rows.push_back({group.operation, group.size, group.callers, group.loads[load],
                      targets[i].name, samples[i][load],
                      samples[servers.PeerOf(targets[i])][load]});
  return rows;
}

}  // namespace tessera::bench
