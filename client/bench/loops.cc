#include "client/bench/loops.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <thread>
#include <utility>

namespace tessera::bench {
namespace {

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

// Returns the sample for a measurement that took this many seconds. `latencies` has the latencies
// of its calls, in microseconds. `work` is the work of one call, from WorkOf.
Sample Summarize(std::vector<double> latencies, double seconds, std::uint64_t work,
                 const Verdicts& verdicts) {
  std::sort(latencies.begin(), latencies.end());
  const auto count = static_cast<double>(latencies.size());
  Sample sample = {{"per_second", count * static_cast<double>(work) / seconds},
                   {"refused", verdicts.refused()}};
  for (const auto& [name, q] : {std::pair{"p50_us", 0.5},
                                {"p90_us", 0.9},
                                {"p99_us", 0.99},
                                {"p999_us", 0.999},
                                {"max_us", 1.0}}) {
    // The smallest latency that is at least as large as a fraction q of all latencies.
    const auto rank = static_cast<std::size_t>(std::max(std::ceil(q * count), 1.0));
    if (!latencies.empty()) sample[name] = latencies[rank - 1];
  }
  std::erase_if(sample, [](const auto& figure) { return figure.second == 0; });
  return sample;
}

}  // namespace

Sample Medians(const std::vector<Sample>& samples) {
  std::map<std::string, std::vector<double>> columns;
  for (const Sample& sample : samples)
    for (const auto& [name, value] : sample) columns[name].push_back(value);
  Sample medians;
  for (auto& [name, column] : columns) {
    column.resize(samples.size());  // samples without the figure get a 0
    if (const double median = Median(column); median != 0) medians[name] = median;
  }
  return medians;
}

Sample MedianRatios(const std::vector<Sample>& samples, const std::vector<Sample>& peers) {
  std::vector<Sample> ratios(samples.size());
  for (std::size_t round = 0; round < samples.size(); ++round) {
    for (const auto& [name, value] : samples[round]) {
      const auto peer = peers[round].find(name);
      if (peer != peers[round].end()) ratios[round][name] = value / peer->second;
    }
  }
  return Medians(ratios);
}

bool Verdicts::Judge(const grpc::Status& status) {
  if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) {
    ++refused_;
  } else if (!status.ok()) {
    Die(std::string(operation_.name), status);
  }
  return status.ok();
}

// --- Closed loops ---

ClosedLoop::ClosedLoop(Channels& channels, const Operation& operation, std::int64_t size,
                       Callers callers)
    : work_(WorkOf(operation, size)), verdicts_(operation), running_(callers.count) {
  for (int i = 0; i < callers.count; ++i) {
    Caller& caller = callers_.emplace_back();
    caller.call = operation.make(channels, callers.first + i, size);
    caller.call->done = [this, &caller](const grpc::Status& status) { End(caller, status); };
  }
  begin_ = Clock::now();
  for (Caller& caller : callers_) Begin(caller);
}

void ClosedLoop::Begin(Caller& caller) {
  caller.begin = Clock::now();
  caller.call->Start();
}

void ClosedLoop::End(Caller& caller, const grpc::Status& status) {
  if (verdicts_.Judge(status))
    caller.microseconds.push_back(Microseconds(Clock::now() - caller.begin));
  if (!stopping_) return Begin(caller);
  const std::lock_guard lock(mutex_);
  if (--running_ == 0) done_.notify_one();
}

Sample ClosedLoop::Stop() {
  stopping_ = true;
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
  const double seconds = Seconds(Clock::now() - begin_);
  std::vector<double> all;
  for (const Caller& caller : callers_)
    all.insert(all.end(), caller.microseconds.begin(), caller.microseconds.end());
  return Summarize(std::move(all), seconds, work_, verdicts_);
}

// --- Open loops ---

Sample OpenLoop::Run(double calls_per_second, double seconds, std::uint64_t seed) {
  prctl(PR_SET_TIMERSLACK, 1UL);  // nanoseconds; the default of 50 us would count as latency
  std::mt19937_64 random(seed);
  std::exponential_distribution<double> gap(calls_per_second);
  std::vector<double> late;
  const Clock::time_point begin = Clock::now();
  for (double at = gap(random); at < seconds; at += gap(random)) {
    const Clock::time_point intended = begin + Ticks(at);
    std::this_thread::sleep_until(intended);
    Slot& slot = Take();
    slot.intended = intended;
    late.push_back(Microseconds(Clock::now() - intended));
    slot.call->Start();
  }
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return free_.size() == slots_.size(); });
  const double lasted = std::max(seconds, Seconds(Clock::now() - begin));
  Sample sample = Summarize(std::move(microseconds_), lasted, WorkOf(operation_, size_), verdicts_);
  if (!late.empty()) sample["late_us"] = Summarize(late, lasted, 1, verdicts_)["p99_us"];
  return sample;
}

OpenLoop::Slot& OpenLoop::Take() {
  std::unique_lock lock(mutex_);
  if (free_.empty() && slots_.size() < kMostUnderWay) {
    const int caller = static_cast<int>(slots_.size());
    Slot& slot = slots_.emplace_back();
    slot.call = operation_.make(channels_, caller, size_);
    slot.call->done = [this, &slot](const grpc::Status& status) { End(slot, status); };
    return slot;
  }
  ended_.wait(lock, [this] { return !free_.empty(); });
  Slot& slot = *free_.back();
  free_.pop_back();
  return slot;
}

void OpenLoop::End(Slot& slot, const grpc::Status& status) {
  const double latency = Microseconds(Clock::now() - slot.intended);
  const bool ok = verdicts_.Judge(status);
  const std::lock_guard lock(mutex_);
  if (ok) microseconds_.push_back(latency);
  free_.push_back(&slot);
  ended_.notify_one();
}

// --- Rest ---

Sample CallAfterRest(Channels& channels, const Operation& operation, std::int64_t size,
                     double seconds) {
  const std::unique_ptr<Call> call = operation.make(channels, 0, size);
  Verdicts verdicts(operation);
  std::this_thread::sleep_for(Ticks(seconds));
  const Clock::time_point begin = Clock::now();
  const bool ok = verdicts.Judge(call->Run());
  std::vector<double> latencies;
  if (ok) latencies.push_back(Microseconds(Clock::now() - begin));
  return Summarize(std::move(latencies), 1, 0, verdicts);
}

}  // namespace tessera::bench
