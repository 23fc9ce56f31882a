// Callers: those that wait for their answers, those that do not, and one that has rested.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "client/bench/channels.h"
#include "client/bench/operations.h"
#include "client/bench/sample.h"

namespace tessera::bench {

// Counts calls that the server refused for want of room; ends the process for any other failure.
// Thread safe.
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
  int first = 0;  // the number of the first one
};

// Callers that each make their next call when they have their answer, from the constructor until
// Stop. The channels must outlive it.
class ClosedLoop {
 public:
  ClosedLoop(Channels& channels, const Operation& operation, std::int64_t size, Callers callers);

  // Waits for the calls under way and gives all of them. To be called once, before destruction.
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

// Calls that start by a Poisson process of so many a second, whether or not earlier ones have
// ended; a latency counts from the time at which the call was to start. More than kMostUnderWay
// calls at once are not made: further ones wait for one to end, and their latency counts the wait.
class OpenLoop {
 public:
  static constexpr std::size_t kMostUnderWay = 4096;

  OpenLoop(Channels& channels, const Operation& operation, std::int64_t size)
      : channels_(channels), operation_(operation), size_(size), verdicts_(operation) {}

  // To be called once. The seed decides about all starts. Waits for the last answer.
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

// The latency of one call of caller 0 after so many seconds without any.
Sample CallAfterRest(Channels& channels, const Operation& operation, std::int64_t size,
                     double seconds);

}  // namespace tessera::bench
