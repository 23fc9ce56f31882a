// Closed loops of calls, open loops, and single calls after a rest.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client/bench/channels.h"
#include "client/bench/operations.h"

namespace tessera::bench {

using Clock = std::chrono::steady_clock;

inline double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }
inline double Microseconds(Clock::duration d) { return 1e6 * Seconds(d); }
inline Clock::duration Ticks(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// One measurement of one target, as {name in JSON: figure}. Figures that are 0 are left out.
//   per_second         calls, or bytes for transfers
//   p50_us, p90_us, p99_us, p999_us, max_us    latencies of successful calls
//   refused            calls that the server answered with RESOURCE_EXHAUSTED
//   late_us            in open loops, the p99 delay between the time a call is due and its start
//   beside_per_second  per_second of the concurrent loops
using Sample = std::map<std::string, double>;

// Returns the median of every figure.
Sample Medians(const std::vector<Sample>& samples);

// Divides every figure by the peer's figure in the same round. Returns the medians of the ratios.
Sample MedianRatios(const std::vector<Sample>& samples, const std::vector<Sample>& peers);

// Counts calls that the server refused with RESOURCE_EXHAUSTED, and ends the process for any other
// failure. Thread safe.
class Verdicts {
 public:
  explicit Verdicts(const Operation& operation) : operation_(operation) {}
  // Whether the call succeeded.
  bool Judge(const grpc::Status& status);
  double refused() const { return static_cast<double>(refused_.load()); }

 private:
  const Operation& operation_;
  std::atomic<std::int64_t> refused_{0};
};

struct Callers {
  int count = 1;
  int first = 0;  // the number of the first caller
};

// Callers that each make their next call when the last response arrives, from the constructor until
// Stop. The channels must outlive the loop.
class ClosedLoop {
 public:
  ClosedLoop(Channels& channels, const Operation& operation, std::int64_t size, Callers callers);

  // Waits for the calls under way, and returns the sample for all calls. Must be called once,
  // before destruction.
  Sample Stop();

 private:
  struct Caller {
    std::unique_ptr<Call> call;
    Clock::time_point begin;
    std::vector<double> microseconds;
  };
  void Begin(Caller& caller);
  void End(Caller& caller, const grpc::Status& status);

  const std::uint64_t work_;
  Verdicts verdicts_;
  Clock::time_point begin_;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable done_;
  int running_;  // guarded by mutex_
  std::deque<Caller> callers_;
};

// Calls that start at the times of a Poisson process with a given rate, whether or not earlier
// calls have ended. A latency counts from the time at which the call was due. At most kMostUnderWay
// calls are under way at the same time. A further call waits until one ends, and its latency
// includes the wait.
class OpenLoop {
 public:
  static constexpr std::size_t kMostUnderWay = 4096;

  OpenLoop(Channels& channels, const Operation& operation, std::int64_t size)
      : channels_(channels), operation_(operation), size_(size), verdicts_(operation) {}

  // Makes the calls and waits for the last response. Must be called once. The seed determines all
  // start times.
  Sample Run(double calls_per_second, double seconds, std::uint64_t seed);

 private:
  struct Slot {
    std::unique_ptr<Call> call;
    Clock::time_point intended;
  };
  Slot& Take();
  void End(Slot& slot, const grpc::Status& status);

  Channels& channels_;
  const Operation& operation_;
  const std::int64_t size_;
  Verdicts verdicts_;
  std::deque<Slot> slots_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<Slot*> free_;           // guarded by mutex_
  std::vector<double> microseconds_;  // guarded by mutex_
};

// Returns the latency of one call of caller 0 after this many seconds without calls.
Sample CallAfterRest(Channels& channels, const Operation& operation, std::int64_t size,
                     double seconds);

}  // namespace tessera::bench
