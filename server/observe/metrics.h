// The server's counters, which server/status/metrics_text.h exports.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/compute.h"
#include "server/access/methods.h"

namespace tessera {

// A counter that only grows. Its memory order is relaxed, so a reader may see two counters as of
// slightly different times.
class Counter {
 public:
  void Add(std::uint64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  std::uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

// Durations in buckets. Thread safe, without locks.
class Histogram {
 public:
  // The inclusive upper bounds of the buckets in nanoseconds, from 1 us to 10 s. One more bucket
  // counts longer durations.
  static constexpr std::array<std::int64_t, 22> kBounds = {
      1'000,         2'500,         5'000,         10'000,        25'000,      50'000,
      100'000,       250'000,       500'000,       1'000'000,     2'500'000,   5'000'000,
      10'000'000,    25'000'000,    50'000'000,    100'000'000,   250'000'000, 500'000'000,
      1'000'000'000, 2'500'000'000, 5'000'000'000, 10'000'000'000};

  void Add(absl::Duration duration);
  // The number of durations in bucket i. There are kBounds.size() + 1 buckets.
  std::uint64_t bucket(std::size_t i) const { return buckets_[i].value(); }
  // The sum of all durations.
  std::uint64_t nanoseconds() const { return nanoseconds_.value(); }

 private:
  std::array<Counter, kBounds.size() + 1> buckets_;
  Counter nanoseconds_;
};

// Thread safe. For calls that succeed, nothing here waits for a lock or reads a clock.
class Metrics {
 public:
  static constexpr std::size_t kCodes = 17;  // gRPC's status codes
  // The methods, and "other" for those that the server does not have.
  static constexpr auto kRpcs = [] {
    std::array<std::string_view, std::size(kMethods) + 1> rpcs;
    rpcs.fill("other");
    for (std::size_t i = 0; i < std::size(kMethods); ++i) rpcs[i] = kMethods[i].name;
    return rpcs;
  }();

  // `strategies` are the only strategies that get their own series.
  explicit Metrics(const std::vector<StrategyInfo>& strategies);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  struct Call {
    std::string_view rpc;
    std::string_view strategy;  // the one that ran or was requested; may be empty
    absl::Duration total;       // from acceptance to the response
    // Only for a call that has begun on a worker.
    bool begun = false;
    absl::Duration queue;  // from acceptance to the beginning
    absl::Duration run;    // from the beginning to the response
  };
  // Called once for each call, before its response is sent.
  void Count(const Call& call, const absl::Status& status);
  // Counts a time measured by the device's clock, for a request with timing.
  void CountKernel(std::string_view rpc, std::string_view strategy, double microseconds);
  void CountSteps(std::uint64_t ok, std::uint64_t failed);
  void CountSlow(std::string_view rpc);
  void CountSpans(std::uint64_t written, std::uint64_t dropped);

  enum class Direction { kUpload, kDownload };
  enum class Way { kStream, kShared };
  // Counts bytes that have arrived, and the duration of their copy between host and device.
  void CountTransfer(Direction direction, Way way, std::uint64_t bytes, absl::Duration copy);

  // --- For the export ---------------------------------------------------------------------------

  // Calls of one method with one strategy.
  struct Series {
    std::string_view rpc;
    std::string strategy;  // "none" if there was none
    std::array<Counter, kCodes> calls;
    Histogram kernel;
  };
  struct Phases {
    Histogram total;
    Histogram queue;
    Histogram run;
  };
  // Failed calls with one code and one reason.
  struct Failure {
    absl::StatusCode code;
    std::string reason;
    Counter count;
    std::atomic<std::int64_t> last_ms{0};  // since 1970; 0 means never
  };
  struct Transfer {
    Counter bytes;
    Histogram copy;
  };

  const std::vector<std::unique_ptr<Series>>& series() const { return series_; }
  const Phases& phases(std::size_t rpc) const { return phases_[rpc]; }
  std::vector<const Failure*> Failures() const;
  const Transfer& transfer(Direction direction, Way way) const {
    return transfers_[static_cast<int>(direction)][static_cast<int>(way)];
  }
  const Counter& slow_calls(std::size_t rpc) const { return slow_calls_[rpc]; }
  const Counter& steps_ok() const { return steps_ok_; }
  const Counter& steps_failed() const { return steps_failed_; }
  const Counter& spans_written() const { return spans_written_; }
  const Counter& spans_dropped() const { return spans_dropped_; }

 private:
  // Reasons are constants in the program, and there are fewer than this.
  static constexpr std::size_t kMostFailures = 256;

  static std::size_t IndexOf(std::string_view rpc);
  Series& Find(std::size_t rpc, std::string_view strategy);
  Failure& FindFailure(absl::StatusCode code, std::string_view reason);

  std::vector<std::unique_ptr<Series>> series_;
  // The series of each method: first the series without a strategy, then those with a strategy.
  std::array<std::vector<Series*>, kRpcs.size()> of_rpc_;
  std::array<Phases, kRpcs.size()> phases_;
  std::array<Counter, kRpcs.size()> slow_calls_;
  Transfer transfers_[2][2];
  Counter steps_ok_;
  Counter steps_failed_;
  Counter spans_written_;
  Counter spans_dropped_;
  // Filled from the front; an entry never changes once it is set.
  std::array<std::atomic<Failure*>, kMostFailures> failures_{};
  Failure other_failure_{absl::StatusCode::kUnknown, "OTHER", {}, {}};
};

}  // namespace tessera
