// The metrics that `tessera top` reads from a server's metrics page (docs/metrics.md).
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"

namespace tessera {

// The address of a metrics page: "http://HOST:PORT/PATH".
struct MetricsAddress {
  std::string host;  // without the brackets of an IPv6 address
  std::string port;
  std::string path;
};

// Parses "http://HOST:PORT" with or without a path, which is /metrics by default, or "HOST:PORT".
// Throws BAD_OPTION for anything else.
MetricsAddress ParseMetricsAddress(std::string_view url);

// Fetches the page over HTTP/1.1. Throws UNAVAILABLE / NO_METRICS unless a page of at most 64 MiB
// arrives within the limit.
std::string FetchMetrics(const MetricsAddress& address, absl::Duration limit);

// The counters at one point in time. `top` shows their differences.
struct MetricsSample {
  struct Calls {
    double all = 0;
    double failed = 0;
    std::map<double, double> until;  // seconds -> number of calls that took at most that long
  };
  struct Gpu {
    // Values by metric, without "tessera_gpu_". A device's samples of one metric are added up.
    std::map<std::string, double> figures;
    std::vector<std::string> slowdowns;  // the reasons for lower clocks
  };
  std::chrono::steady_clock::time_point time;
  double start_time = 0;               // when the process started, in seconds since 1970
  std::map<std::string, Calls> calls;  // by method
  std::map<std::pair<std::string, std::string>, double> refusals;  // by code and reason
  std::map<std::string, Gpu> gpus;                                 // by device
};

// Parses Prometheus's text format. Lines that are not samples are ignored.
MetricsSample ParseMetrics(std::string_view text);

struct MetricsRates {
  struct Calls {
    std::string method;
    double per_second = 0;
    double failed_per_second = 0;
    // Quantiles of the calls' times, as precise as the buckets allow. They are NaN if there were no
    // calls, and infinite beyond the last bucket.
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
  std::vector<Refusals> refusals;  // the most frequent first
};

// Returns the rates between two samples. If the server restarted in between, only the calls since
// its start count.
MetricsRates RatesBetween(const MetricsSample& before, const MetricsSample& after);

}  // namespace tessera
