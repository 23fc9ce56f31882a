#include "client/cli/gpu_figures.h"

#include <cmath>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace tessera {

void WriteGpus(const MetricsSample& sample, std::ostream& out) {
  if (sample.gpus.empty()) return;
  out << '\n';
  Table table({"GPU", ">BUSY", ">USED BY ALL", ">TEMPERATURE", ">POWER", ">LIMIT", ">SM CLOCK",
               ">ECC ERRORS", "SLOWED BY"});
  for (const auto& entry : sample.gpus) {
    const MetricsSample::Gpu& gpu = entry.second;
    // Returns the metric with its unit, or "-" if the driver does not report it.
    const auto figure = [&](const char* name, const auto& text) -> std::string {
      const auto found = gpu.figures.find(name);
      return found == gpu.figures.end() || !std::isfinite(found->second) ? "-"
                                                                         : text(found->second);
    };
    const auto in = [](const char* unit, double of = 1, int digits = 0) {
      return [=](double value) { return absl::StrFormat("%.*f%s", digits, value / of, unit); };
    };
    table.Add({entry.first, figure("busy_ratio", in("%", 0.01)),
               figure("memory_used_bytes",
                      [](double bytes) {
                        return bytes < 0 || bytes >= 0x1p63
                                   ? std::string("-")
                                   : HumanBytes(static_cast<std::uint64_t>(bytes));
                      }),
               figure("temperature_celsius", in(" C")), figure("power_watts", in(" W")),
               figure("power_limit_watts", in(" W")), figure("sm_clock_hertz", in(" GHz", 1e9, 2)),
               figure("memory_errors_total", in("")),
               gpu.slowdowns.empty() ? "-" : absl::StrJoin(gpu.slowdowns, ", ")});
  }
  table.Print(out);
}

Json GpusJson(const MetricsSample& sample) {
  Json json = Json::array();
  for (const auto& [device, gpu] : sample.gpus) {
    Json& one = json.emplace_back(Json{{"device", device}});
    for (const auto& [name, value] : gpu.figures) one[name] = NumberJson(value);
    one["slowed_by"] = gpu.slowdowns;
  }
  return json;
}

}  // namespace tessera
