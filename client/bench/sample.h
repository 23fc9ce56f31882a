// The result of one measurement, and statistics of several.
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

// One measurement of one target. The latencies are those of successful calls.
struct Sample {
  double per_second = 0;  // calls, or bytes of transfers
  double p50_us = 0, p90_us = 0, p99_us = 0, p999_us = 0, max_us = 0;
  double refused = 0;            // calls that the server answered with RESOURCE_EXHAUSTED
  double late_us = 0;            // open loops: the p99 delay of calls after their start times
  double beside_per_second = 0;  // the concurrent loops' calls, or bytes of transfers
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

// Returns the smallest value that is at least as large as a share q of all values; 0 without
// values. The values are in ascending order.
double Quantile(const std::vector<double>& sorted, double q);

// Returns the median, which is the mean of the middle two of an even number of values; 0 without
// values.
double Median(std::vector<double> values);

// Makes a sample of a measurement of this many seconds from the latencies of its calls, in
// microseconds. work: one call's, 1 or its bytes.
Sample Summarize(std::vector<double> latencies, double seconds, std::uint64_t work);

// Returns one metric of many samples.
std::vector<double> Column(const std::vector<Sample>& samples, double Sample::*value);

// Returns the median of every metric.
Sample Medians(const std::vector<Sample>& samples);

// Returns the median of every metric's ratio to that of the peer's sample of the same round; 0 if
// the peer has none.
Sample MedianRatios(const std::vector<Sample>& samples, const std::vector<Sample>& peers);

}  // namespace tessera::bench
