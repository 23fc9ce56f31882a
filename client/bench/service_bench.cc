// Measures the performance of a server as its callers see it: calls per second, latencies and
// transfer rates. Measurements are interleaved with those of a bare gRPC server that does nothing.
//
//   service_bench --target 127.0.0.1:50051 [--target NAME=unix:/path ...] [--callers 1,4,16,64]
//                 [--operations ping,dot,reduce,matmul,upload,download] [--json FILE] ...
//
// By default, callers are closed loops, each of which makes its next call when the last response
// arrives. If --rate or --load is given, they are open loops, whose calls start at random times
// whether or not earlier calls have ended. --rest measures the first call after a rest. --beside
// OPERATION:CALLERS runs closed loops of another operation during each measurement. Every round
// times every target once, in random order. The table contains medians over the rounds. In each
// round, a target's figures are also divided by those of the bare server, and the table contains
// the medians of these ratios. A target with a Unix address is compared with the bare server over a
// Unix socket. Without --target, only the bare server is timed.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/bench/bare_server.h"
#include "client/bench/channels.h"
#include "client/bench/loops.h"
#include "client/bench/operations.h"

namespace tessera::bench {
namespace {

using Json = nlohmann::ordered_json;

// --- The command line ---

struct Options {
  std::vector<Target> targets;
  std::vector<std::string> operations = {"dot"};
  std::vector<int> callers = {1, 4, 16, 64};
  // The sizes for each unit of Operation::size_unit.
  std::map<std::string_view, std::vector<std::int64_t>> sizes = {
      {"", {0}}, {"elements", {4096}}, {"side", {128}}, {"steps", {1000}}, {"MiB", {64}}};
  std::vector<double> rate;  // calls per second
  std::vector<double> load;  // fractions of the closed loops' rate
  std::vector<double> rest;  // seconds
  // Closed loops of one operation that run during the measurements; null if there are none.
  const Operation* beside = nullptr;
  int beside_callers = 0;
  double seconds = 1;
  int rounds = 5;
  std::uint64_t seed = 1;
  std::string json;
};

// Parses NAME=ADDRESS, or only an address, which is then also the name.
void AddTarget(std::vector<Target>& targets, const std::string& text) {
  const std::size_t equals = text.find('=');
  const Target target = equals == std::string::npos
                            ? Target{text, text}
                            : Target{text.substr(0, equals), text.substr(equals + 1)};
  if (target.name.empty() || target.address.empty())
    throw CLI::ValidationError("--target", "\"" + text + "\" is not NAME=ADDRESS");
  for (const Target& other : targets)
    if (other.name == target.name)
      throw CLI::ValidationError("--target", "two targets are named \"" + target.name + "\"");
  if (target.name.starts_with("bare gRPC"))
    throw CLI::ValidationError("--target", "the name \"" + target.name + "\" is taken");
  targets.push_back(target);
}

// Parses OPERATION:CALLERS.
void SetBeside(Options& options, const std::string& text) {
  const std::size_t colon = text.find(':');
  options.beside = FindOperation(text.substr(0, colon));
  if (options.beside == nullptr)
    throw CLI::ValidationError("--beside", "\"" + text + "\" names no operation");
  if (colon == std::string::npos ||
      !CLI::detail::lexical_cast(text.substr(colon + 1), options.beside_callers) ||
      options.beside_callers < 1 || options.beside_callers > 4096)
    throw CLI::ValidationError("--beside",
                               "\"" + text + "\" needs 1 to 4096 callers, for example upload:16");
}

// Adds the flags. The parser rejects invalid values.
void AddOptions(CLI::App& app, Options& options) {
  const auto add_list = [&](const char* flag, auto& values, const char* help, auto least,
                            auto most) {
    app.add_option(flag, values, help)->delimiter(',')->check(CLI::Range(least, most));
  };
  app.add_option_function<std::vector<std::string>>(
      "--target",
      [&](const std::vector<std::string>& texts) {
        for (const std::string& text : texts) AddTarget(options.targets, text);
      },
      "ADDRESS or NAME=ADDRESS, where ADDRESS is host:port or unix:/path; repeatable");
  std::vector<std::string> names;
  for (const Operation& operation : Operations()) names.emplace_back(operation.name);
  app.add_option("--operations", options.operations, "the operations")
      ->delimiter(',')
      ->check(CLI::IsMember(names));
  add_list("--callers", options.callers, "concurrent calls", 1, 4096);
  add_list("--elements", options.sizes["elements"], "f32 elements in each vector", 1, 1 << 30);
  add_list("--side", options.sizes["side"], "rows and columns of the f32 matrices in a product", 1,
           1 << 15);
  add_list("--steps", options.sizes["steps"], "steps in a program of Dots", 1, 4096);
  add_list("--transfer-mib", options.sizes["MiB"], "MiB in one upload or download", 1, 1 << 16);
  add_list("--rate", options.rate, "open loop: this many calls per second", 0.1, 1e7);
  add_list("--load", options.load,
           "open loop: this fraction of the rate of closed loops, which are measured as well", 0.01,
           10.0);
  add_list("--rest", options.rest, "time the first call after this many seconds without calls", 0.0,
           3600.0);
  app.add_option_function<std::string>(
      "--beside", [&](const std::string& text) { SetBeside(options, text); },
      "OPERATION:CALLERS that run during the measurements, such as upload:16");
  app.add_option("--seconds", options.seconds, "duration of a measurement")
      ->check(CLI::Range(0.01, 600.0));
  app.add_option("--rounds", options.rounds, "measurements of each target, interleaved")
      ->check(CLI::Range(1, 1000));
  app.add_option("--seed", options.seed, "seed for the order of targets and for open loops")
      ->check(CLI::Range(std::numeric_limits<std::int64_t>::max()));
  app.add_option("--json", options.json,
                 "file for the results, written again after each kind of measurement");
}

// --- Measurements ---

// Determines when calls are made.
struct Load {
  // closed: each caller makes its next call when the last response arrives. rate: this many calls
  // per second. load: this fraction of the closed loops' rate. rest: one call after this many
  // seconds without calls.
  std::string_view kind = "closed";
  double value = 0;
};

// Measurements that share their connections in every round.
struct Group {
  const Operation* operation = nullptr;
  std::int64_t size = 0;
  int callers = 1;
  std::vector<Load> loads;  // closed loops come before fractions of their rate
};

std::vector<Group> GroupsOf(const Options& options) {
  std::vector<Load> loads, rests;
  if (!options.load.empty() || (options.rate.empty() && options.rest.empty())) loads.push_back({});
  for (const double rate : options.rate) loads.push_back({"rate", rate});
  for (const double share : options.load) loads.push_back({"load", share});
  for (const double seconds : options.rest) rests.push_back({"rest", seconds});
  std::vector<Group> groups;
  for (const std::string& name : options.operations) {
    const Operation* const operation = FindOperation(name);
    for (const std::int64_t size : options.sizes.at(operation->size_unit)) {
      if (!loads.empty())
        for (const int callers : options.callers)
          groups.push_back({operation, size, callers, loads});
      if (!rests.empty()) groups.push_back({operation, size, 1, rests});
    }
  }
  return groups;
}

// Measures one round of one target. Returns a sample for each load in the group.
std::vector<Sample> MeasureLoads(const Target& target, const Group& group, std::uint64_t seed,
                                 const Options& options) {
  const Operation& operation = *group.operation;
  Channels channels(target, group.callers);
  const auto closed = [&](double seconds) {
    ClosedLoop loop(channels, operation, group.size, {.count = group.callers});
    std::this_thread::sleep_for(Ticks(seconds));
    return loop.Stop();
  };
  const auto open = [&](double rate) {
    return OpenLoop(channels, operation, group.size).Run(rate, options.seconds, seed);
  };
  closed(0.1);  // a warm-up
  std::vector<Sample> samples;
  for (const Load& load : group.loads) {
    if (load.kind == "closed") {
      samples.push_back(closed(options.seconds));
    } else if (load.kind == "rate") {
      samples.push_back(open(load.value));
    } else if (load.kind == "load") {
      const double work = static_cast<double>(WorkOf(operation, group.size));
      samples.push_back(open(load.value * samples[0]["per_second"] / work));
    } else {
      samples.push_back(CallAfterRest(channels, operation, group.size, load.value));
    }
  }
  return samples;
}

// Calls MeasureLoads while the loops of --beside run.
std::vector<Sample> MeasureTarget(const Target& target, const Group& group, std::uint64_t seed,
                                  const Options& options) {
  if (options.beside == nullptr) return MeasureLoads(target, group, seed, options);
  // Larger than the numbers of the measured callers, so that the names of results differ.
  constexpr int kFirstBeside = 1 << 20;
  Channels channels(target, options.beside_callers);
  ClosedLoop loop(channels, *options.beside, options.sizes.at(options.beside->size_unit)[0],
                  {.count = options.beside_callers, .first = kFirstBeside});
  std::vector<Sample> samples = MeasureLoads(target, group, seed, options);
  const double per_second = loop.Stop()["per_second"];
  for (Sample& sample : samples) sample["beside_per_second"] = per_second;
  return samples;
}

void Prepare(const Target& target, const Operation* operation, std::int64_t size) {
  if (target.bare || operation->prepare == nullptr) return;
  Channels channels(target, 1);
  operation->prepare(channels, size);
}

// Rounds to five significant digits. Repeated runs agree in fewer digits.
Json ToJson(const Sample& sample) {
  Json object = Json::object();
  for (const auto& [name, value] : sample) {
    char text[32];
    std::snprintf(text, sizeof text, "%.5g", value);
    object[name] = std::strtod(text, nullptr);
  }
  return object;
}

// Measures all targets in several rounds with a random order of targets. Returns a row for each
// load and target. Leaves no buffers behind.
std::vector<Json> MeasureGroup(const std::vector<Target>& targets, const Group& group,
                               std::mt19937_64& random, const Options& options) {
  std::vector<std::size_t> order;
  for (const Target& target : targets) {
    order.push_back(order.size());
    Prepare(target, group.operation, group.size);
    if (options.beside != nullptr)
      Prepare(target, options.beside, options.sizes.at(options.beside->size_unit)[0]);
  }
  // samples[target][load][round]
  std::vector<std::vector<std::vector<Sample>>> samples(
      targets.size(), std::vector<std::vector<Sample>>(group.loads.size()));
  for (int round = 0; round < options.rounds; ++round) {
    const std::uint64_t seed = random();  // gives every target the same start times
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      const std::vector<Sample> measured = MeasureTarget(targets[i], group, seed, options);
      for (std::size_t load = 0; load < measured.size(); ++load)
        samples[i][load].push_back(measured[load]);
    }
  }
  std::vector<Json> rows;
  for (std::size_t load = 0; load < group.loads.size(); ++load) {
    for (std::size_t i = 0; i < targets.size(); ++i) {
      // The bare server with the same transport.
      const auto peer = std::find_if(targets.begin(), targets.end(), [&](const Target& t) {
        return t.bare && IsUnix(t.address) == IsUnix(targets[i].address);
      });
      const std::vector<Sample>& rounds = samples[i][load];
      const std::vector<Sample>& bare =
          samples[static_cast<std::size_t>(peer - targets.begin())][load];
      Json& row = rows.emplace_back(
          Json{{"operation", group.operation->name},
               {"size", group.size},
               {"size_unit", group.operation->size_unit},
               {"callers", group.callers},
               {"load", {{"kind", group.loads[load].kind}, {"value", group.loads[load].value}}},
               {"target", targets[i].name},
               {"median", ToJson(Medians(rounds))},
               {"of_bare", ToJson(MedianRatios(rounds, bare))}});
      for (const Sample& sample : rounds) row["rounds"].push_back(ToJson(sample));
    }
  }
  for (const Target& target : targets)
    if (!target.bare) DeleteBuffers(target);
  return rows;
}

// --- Output ---

void PrintHead() {
  std::printf("%-15s %8s %7s %-12s %-16s %14s %6s %9s %6s %9s %9s %9s %9s\n", "operation", "size",
              "callers", "load", "target", "per second", "/bare", "p50 us", "/bare", "p90", "p99",
              "p99.9", "max");
}

void Print(const Json& row) {
  const Json &median = row["median"], &ratio = row["of_bare"];
  const bool transfer = row["size_unit"] == "MiB";
  std::ostringstream load;
  load << row["load"]["kind"].get<std::string>() << " " << row["load"]["value"].get<double>();
  std::printf("%-15s %8lld %7d %-12s %-16s %11.2f %s %6.3f %9.1f %6.2f %9.1f %9.1f %9.1f %9.1f",
              row["operation"].get<std::string>().c_str(), row["size"].get<long long>(),
              row["callers"].get<int>(), load.str().c_str(),
              row["target"].get<std::string>().c_str(),
              median.value("per_second", 0.0) / (transfer ? 1e9 : 1e3), transfer ? "GB" : " k",
              ratio.value("per_second", 0.0), median.value("p50_us", 0.0),
              ratio.value("p50_us", 0.0), median.value("p90_us", 0.0), median.value("p99_us", 0.0),
              median.value("p999_us", 0.0), median.value("max_us", 0.0));
  for (const char* name : {"late_us", "refused"})
    if (median.contains(name)) std::printf("  %s %.0f", name, median[name].get<double>());
  std::printf("\n");
  std::fflush(stdout);
}

// Returns the text after ": " in the file's first line that begins with `key` and contains ": ", or
// "" if there is no such line.
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

Json DescribeTarget(const Target& target) {
  Json object = {{"name", target.name}, {"address", target.address}};
  if (target.bare) return object;
  Channels channels(target, 1);
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  const grpc::Status status = channels.compute(0).GetServerInfo(&context, {}, &info);
  if (!status.ok()) Die("cannot get the devices of " + target.name, status);
  object["version"] = info.version();
  for (const v1::Device& device : info.devices())
    object["devices"].push_back({{"name", device.name()}, {"model", device.model()}});
  return object;
}

// Returns the parts of a document other than its rows. Asks every server except the bare ones about
// its devices.
Json Describe(const Options& options, const std::vector<Target>& targets) {
  const std::time_t now = std::time(nullptr);
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  Json document = {
      {"date", date},
      {"machine",
       {{"cpu", Field("/proc/cpuinfo", "model name")},
        {"cores", std::thread::hardware_concurrency()},
        {"driver", DriverVersion()}}},
      {"options",
       {{"operations", options.operations},
        {"callers", options.callers},
        {"sizes", options.sizes},
        {"rate", options.rate},
        {"load", options.load},
        {"rest", options.rest},
        {"beside", options.beside == nullptr ? ""
                                             : std::string(options.beside->name) + ":" +
                                                   std::to_string(options.beside_callers)},
        {"seconds", options.seconds},
        {"rounds", options.rounds},
        {"seed", options.seed}}},
  };
  for (const Target& target : targets) document["targets"].push_back(DescribeTarget(target));
  return document;
}

// Writes one document, with one row per line.
void Write(const std::string& path, const Json& description, const std::vector<Json>& rows) {
  std::ofstream file(path);
  std::string head = description.dump(1);
  head.resize(head.size() - 2);  // removes the last newline and brace
  file << head << ",\n \"rows\": [";
  for (const Json& row : rows) file << (&row == rows.data() ? "\n  " : ",\n  ") << row;
  file << "\n ]\n}\n";
  if (!file.flush()) Die("cannot write " + path);
}

void Run(const Options& options) {
  // This is checked first, so that no time is spent on measurements that cannot be written.
  if (!options.json.empty() && !std::ofstream(options.json)) Die("cannot write " + options.json);
  const auto is_unix = [](const Target& target) { return IsUnix(target.address); };
  std::vector<std::string> addresses;
  if (options.targets.empty() ||
      !std::all_of(options.targets.begin(), options.targets.end(), is_unix))
    addresses.emplace_back("127.0.0.1:0");
  if (std::any_of(options.targets.begin(), options.targets.end(), is_unix))
    addresses.push_back("unix-abstract:service_bench." + std::to_string(getpid()));
  const BareServer bare(addresses);  // must start before this process uses gRPC
  std::vector<Target> targets;
  for (const std::string& address : bare.addresses())
    targets.push_back({IsUnix(address) ? "bare gRPC unix" : "bare gRPC", address, /*bare=*/true});
  targets.insert(targets.end(), options.targets.begin(), options.targets.end());

  const Json description = Describe(options, targets);
  std::mt19937_64 random(options.seed);
  std::vector<Json> rows;
  PrintHead();
  for (const Group& group : GroupsOf(options)) {
    for (Json& row : MeasureGroup(targets, group, random, options)) {
      Print(row);
      rows.push_back(std::move(row));
    }
    // The file is written after every group, so that a run that is interrupted keeps its
    // measurements.
    if (!options.json.empty()) Write(options.json, description, rows);
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  CLI::App app(
      "Measures the performance of a server for its callers, compared with a bare gRPC server");
  tessera::bench::Options options;
  tessera::bench::AddOptions(app, options);
  CLI11_PARSE(app, argc, argv);
  tessera::bench::Run(options);
}
