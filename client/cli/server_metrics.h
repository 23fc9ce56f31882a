// What `tessera top` reads from a server's page of metrics (docs/metrics.md).
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tessera {

// Where metrics are: "http://HOST:PORT/PATH".
struct MetricsAddress {
  std::string host;  // without the brackets of an IPv6 address
  std::string port;
  std::string path;
};

// Of "http://HOST:PORT", with or without a path, which is /metrics otherwise; also of "HOST:PORT".
// INVALID_ARGUMENT / BAD_OPTION: it is something else.
absl::StatusOr<MetricsAddress> ParseMetricsAddress(std::string_view url);

// The content of the page, by HTTP/1.1. UNAVAILABLE / NO_METRICS: nobody answers within limit, or
// not with a page of at most 64 MiB.
absl::StatusOr<std::string> FetchMetrics(const MetricsAddress& address, absl::Duration limit);

// The counters of a moment, of which `top` shows the differences.
struct MetricsSample {
  struct Calls {
    double all = 0;
    double failed = 0;
    std::map<double, double> until;  // calls that took no longer, by seconds
  };
  struct Gpu {
    std::map<std::string, double>
        figures;  // by the metric's name behind "tessera_gpu_"; of kinds, sums
    std::vector<std::string> slowdowns;  // why clocks are lowered
  };
  std::chrono::steady_clock::time_point time;
  double start_time = 0;                                           // of the process
  std::map<std::string, Calls> calls;                              // by method
  std::map<std::pair<std::string, std::string>, double> refusals;  // by code and reason
  std::map<std::string, Gpu> gpus;                                 // by device
};

// Lines that are no samples of metrics in Prometheus's text format are passed over.
MetricsSample ParseMetrics(std::string_view text);

struct MetricsRates {
  struct Calls {
    std::string method;
    double per_second = 0;
    double failed_per_second = 0;
    // Quantiles of the time, as far as the buckets tell; not a number without calls, infinite
    // beyond the last bucket.
    double p50_seconds = 0;
    double p99_seconds = 0;
  };
  struct Refusals {
    std::string code;
    std::string reason;
    double per_second = 0;
    double total = 0;
  };
  std::vector<Calls> calls;        // the most frequent first
  std::vector<Refusals> refusals;  // likewise
};

// Between two samples; of a server that was started between them, since its start.
MetricsRates RatesBetween(const MetricsSample& before, const MetricsSample& after);

}  // namespace tessera
