#include "client/bench/loops.h"

#include <sys/prctl.h>

#include <cmath>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <utility>

namespace tessera::bench {

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
  Sample sample = Summarize(std::move(all), seconds, work_);
  sample.refused = verdicts_.refused();
  return sample;
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
  Sample sample = Summarize(std::move(microseconds_), lasted, WorkOf(operation_, size_));
  sample.refused = verdicts_.refused();
  sample.late_us = Summarize(std::move(late), lasted, 1).p99_us;
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
  Sample sample = Summarize(std::move(latencies), 1, 0);
  sample.refused = verdicts.refused();
  return sample;
}

}  // namespace tessera::bench
