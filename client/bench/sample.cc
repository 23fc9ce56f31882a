#include "client/bench/sample.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace tessera::bench {

double Quantile(const std::vector<double>& sorted, double q) {
  if (sorted.empty()) return 0;
  const auto rank = static_cast<std::size_t>(std::ceil(q * static_cast<double>(sorted.size())));
  return sorted[std::max<std::size_t>(rank, 1) - 1];
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

Sample Summarize(std::vector<double> latencies, double seconds, std::uint64_t work) {
  std::sort(latencies.begin(), latencies.end());
  Sample sample;
  sample.per_second = static_cast<double>(latencies.size()) * static_cast<double>(work) / seconds;
  sample.p50_us = Quantile(latencies, 0.5);
  sample.p90_us = Quantile(latencies, 0.9);
  sample.p99_us = Quantile(latencies, 0.99);
  sample.p999_us = Quantile(latencies, 0.999);
  sample.max_us = Quantile(latencies, 1);
  return sample;
}

std::vector<double> Column(const std::vector<Sample>& samples, double Sample::*value) {
  std::vector<double> column;
  column.reserve(samples.size());
  for (const Sample& sample : samples) column.push_back(sample.*value);
  return column;
}

Sample Medians(const std::vector<Sample>& samples) {
  Sample medians;
  for (const Figure& figure : kFigures)
    medians.*figure.value = Median(Column(samples, figure.value));
  return medians;
}

Sample MedianRatios(const std::vector<Sample>& samples, const std::vector<Sample>& peers) {
  std::vector<Sample> ratios(samples.size());
  for (std::size_t round = 0; round < samples.size(); ++round) {
    for (const Figure& figure : kFigures) {
      const double peer = peers[round].*figure.value;
      if (peer > 0) ratios[round].*figure.value = samples[round].*figure.value / peer;
    }
  }
  return Medians(ratios);
}

}  // namespace tessera::bench
