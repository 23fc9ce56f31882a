#include "client/bench/report.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <thread>

namespace tessera::bench {
namespace {

using json = nlohmann::ordered_json;

std::string Text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

std::string Text(const Load& load) {
  switch (load.kind) {
    case Load::Kind::kClosed:
      return "closed";
    case Load::Kind::kRate:
      return Text(load.value) + "/s";
    case Load::Kind::kShare:
      return Text(100 * load.value) + " %";
    case Load::Kind::kRest:
      return "rest " + Text(load.value) + " s";
  }
  return "";
}

const char* Name(Load::Kind kind) {
  switch (kind) {
    case Load::Kind::kClosed:
      return "closed";
    case Load::Kind::kRate:
      return "rate";
    case Load::Kind::kShare:
      return "load";
    case Load::Kind::kRest:
      return "rest";
  }
  return "";
}

const char* Name(SizeUnit unit) {
  switch (unit) {
    case SizeUnit::kNone:
      return "";
    case SizeUnit::kElements:
      return "elements";
    case SizeUnit::kSide:
      return "side";
    case SizeUnit::kSteps:
      return "steps";
    case SizeUnit::kMib:
      return "MiB";
  }
  return "";
}

// Rounds to five digits. Repeated runs agree in fewer.
double Rounded(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.5g", value);
  return std::strtod(text, nullptr);
}

// Leaves out metrics that are 0.
json ToJson(const Sample& sample) {
  json object = json::object();
  for (const Figure& figure : kFigures)
    if (sample.*figure.value != 0) object[figure.name] = Rounded(sample.*figure.value);
  return object;
}

// Returns the text after the colon in the first line of a file that begins with `key`, or "" if
// there is none.
std::string Field(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with(key) && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "";
}

// Returns the version of NVIDIA's driver, such as "580.159.04", or "" if there is none.
std::string DriverVersion() {
  std::istringstream words(Field("/proc/driver/nvidia/version", "NVRM version"));
  for (std::string word; words >> word;) {
    if (word.find_first_not_of("0123456789.") == std::string::npos) return word;
  }
  return "";
}

json ToJson(const Row& row) {
  json object = {{"operation", row.operation->name},
                 {"size", row.size},
                 {"size_unit", Name(row.operation->size_unit)},
                 {"callers", row.callers},
                 {"load", {{"kind", Name(row.load.kind)}, {"value", row.load.value}}},
                 {"target", row.target},
                 {"median", ToJson(Medians(row.rounds))},
                 {"of_bare", ToJson(MedianRatios(row.rounds, row.bare))}};
  for (const Sample& sample : row.rounds) object["rounds"].push_back(ToJson(sample));
  return object;
}

json DescribeTarget(const Target& target) {
  json object = {{"name", target.name}, {"address", target.address}};
  if (target.kind == Target::Kind::kBare) return object;
  Channels channels(target, 1);
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  const grpc::Status status = channels.compute(0).GetServerInfo(&context, {}, &info);
  if (!status.ok()) Die("GetServerInfo of " + target.name, status);
  object["version"] = info.version();
  for (const v1::Device& device : info.devices())
    object["devices"].push_back({{"name", device.name()}, {"model", device.model()}});
  return object;
}

std::string Date() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d", &utc);
  return text;
}

}  // namespace

void PrintHead() {
  std::printf("%-9s %8s %7s %-10s %-16s %12s %6s %9s %6s %9s %9s %9s %9s\n", "operation", "size",
              "callers", "load", "target", "per second", "/bare", "p50 us", "/bare", "p90", "p99",
              "p99.9", "max");
}

void Print(const Row& row) {
  const Sample median = Medians(row.rounds), ratio = MedianRatios(row.rounds, row.bare);
  const bool transfer = row.operation->size_unit == SizeUnit::kMib;
  std::printf("%-9s %8lld %7d %-10s %-16s ", std::string(row.operation->name).c_str(),
              static_cast<long long>(row.size), row.callers, Text(row.load).c_str(),
              row.target.c_str());
  if (row.load.kind == Load::Kind::kRest) {
    // Each round has one call.
    const std::vector<double> calls = Column(row.rounds, &Sample::max_us);
    std::printf("%12s %6s %9.1f %6.2f %9s %9s %9s %9.1f", "-", "-", median.p50_us, ratio.p50_us,
                "-", "-", "-", *std::max_element(calls.begin(), calls.end()));
  } else {
    std::printf("%9.2f %s %6.3f %9.1f %6.2f %9.1f %9.1f %9.1f %9.1f",
                median.per_second / (transfer ? 1e9 : 1e3), transfer ? "GB" : " k",
                ratio.per_second, median.p50_us, ratio.p50_us, median.p90_us, median.p99_us,
                median.p999_us, median.max_us);
  }
  if (median.late_us > 0) std::printf("  %.0f us late", median.late_us);
  if (median.refused > 0) std::printf("  %.0f refused", median.refused);
  std::printf("\n");
  std::fflush(stdout);
}

json Describe(const Options& options, const std::vector<Target>& targets) {
  json document = {
      {"date", Date()},
      {"machine",
       {{"cpu", Field("/proc/cpuinfo", "model name")},
        {"cores", std::thread::hardware_concurrency()},
        {"driver", DriverVersion()}}},
      {"options",
       {{"operations", options.operations},
        {"callers", options.callers},
        {"elements", options.elements},
        {"side", options.side},
        {"steps", options.steps},
        {"transfer_mib", options.transfer_mib},
        {"rate", options.rate},
        {"load", options.load},
        {"rest", options.rest},
        {"beside", options.beside.has_value()
                       ? options.beside->operation + ":" + std::to_string(options.beside->callers)
                       : ""},
        {"naive", options.naive},
        {"seconds", options.seconds},
        {"rounds", options.rounds},
        {"seed", options.seed}}},
  };
  for (const Target& target : targets) document["targets"].push_back(DescribeTarget(target));
  return document;
}

void Write(std::ostream& file, const json& description, const std::vector<Row>& rows) {
  std::string head = description.dump(1);
  head.resize(head.size() - 2);  // removes the last newline and brace
  file << head << ",\n \"rows\": [";
  for (const Row& row : rows) file << (&row == rows.data() ? "\n  " : ",\n  ") << ToJson(row);
  file << "\n ]\n}\n";
}

}  // namespace tessera::bench
