// The result of one measurement, and statistics over several.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

namespace tessera::bench {

using Clock = std::chrono::steady_clock;

inline double Seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }
inline double Microseconds(Clock::duration d) { return 1e6 * Seconds(d); }
inline Clock::duration Ticks(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// One measurement of one target. Only successful calls count for latencies.
struct Sample {
  double per_second = 0;  // calls, or bytes for transfers
  double p50_us = 0, p90_us = 0, p99_us = 0, p999_us = 0, max_us = 0;
  double refused = 0;            // calls that the server answered with RESOURCE_EXHAUSTED
  double late_us = 0;            // in open loops, the p99 delay until a call that is due starts
  double beside_per_second = 0;  // per_second of the concurrent loops
};

// The names of a sample's metrics in JSON.
struct Figure {
  const char* name;
  double Sample::*value;
};
inline constexpr std::array kFigures = {
    Figure{"per_second", &Sample::per_second},
    Figure{"p50_us", &Sample::p50_us},
    Figure{"p90_us", &Sample::p90_us},
    Figure{"p99_us", &Sample::p99_us},
    Figure{"p999_us", &Sample::p999_us},
    Figure{"max_us", &Sample::max_us},
    Figure{"refused", &Sample::refused},
    Figure{"late_us", &Sample::late_us},
    Figure{"beside_per_second", &Sample::beside_per_second},
};

// Returns the smallest value that is at least as large as a fraction q of all values, or 0 if there
// are none. The values must be in ascending order.
double Quantile(const std::vector<double>& sorted, double q);

// Returns the median, or 0 if there are no values. With an even number of values, the median is the
// mean of the middle two.
double Median(std::vector<double> values);

// Returns the sample for a measurement that took this many seconds. latencies: the latencies of its
// calls, in microseconds. work: the work of one call, from WorkOf.
Sample Summarize(std::vector<double> latencies, double seconds, std::uint64_t work);

// Returns one metric of many samples.
std::vector<double> Column(const std::vector<Sample>& samples, double Sample::*value);

// Returns the median of every metric.
Sample Medians(const std::vector<Sample>& samples);

// Divides every metric by the same metric of the peer in the same round, and returns the medians of
// these ratios. A ratio is 0 if the peer's metric is 0.
Sample MedianRatios(const std::vector<Sample>& samples, const std::vector<Sample>& peers);

}  // namespace tessera::bench
