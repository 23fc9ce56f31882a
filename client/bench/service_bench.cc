// Measures the performance of a server as its callers see it: calls per second, latencies and
// transfer rates. Measurements are interleaved with those of a bare gRPC server that does nothing.
//
//   service_bench --target 127.0.0.1:50051 [--target NAME=unix:/path ...] [--callers 1,4,16,64]
//                 [--operations ping,dot,reduce,matmul,upload,download] [--json FILE] ...
//   service_bench serve ADDRESS...         only the bare server
//   service_bench serve-naive ADDRESS...   only the naive server
//
// By default, callers are closed loops, each of which makes its next call when the last response
// arrives. With --rate or --load, they are open loops, whose calls start at random times whether or
// not earlier calls have ended. --rest measures the first call after a rest. Every round times
// every target once, in random order. The table has medians over the rounds, including medians of
// the ratios to the bare server in the same round. A target with a Unix address is compared with
// the bare server over a Unix socket. Without --target, only the bare server is timed. With --bare
// ADDRESS, the bare server is one that runs elsewhere, and none is started.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/bench/channels.h"
#include "client/bench/measure.h"
#include "client/bench/options.h"
#include "client/bench/plan.h"
#include "client/bench/report.h"
#include "client/bench/servers.h"

namespace tessera::bench {
namespace {

int Run(const Options& options) {
  // This is checked first, so that no time is spent on measurements that cannot be written.
  if (!options.json.empty() && !std::ofstream(options.json)) Die("cannot write " + options.json);
  const Servers servers(options);  // must start before this process uses gRPC
  const nlohmann::ordered_json description = Describe(options, servers.targets());
  std::mt19937_64 random(options.seed);
  std::vector<Row> rows;
  PrintHead();
  for (const Group& group : GroupsOf(options)) {
    for (Row& row : MeasureGroup(servers, group, random, options)) {
      Print(row);
      rows.push_back(std::move(row));
    }
    // The file is written after every group, so that a run that is interrupted keeps its
    // measurements.
    if (options.json.empty()) continue;
    std::ofstream file(options.json);
    Write(file, description, rows);
    if (!file.flush()) Die("cannot write " + options.json);
  }
  return 0;
}

int ServeForEver(const std::vector<std::string>& listening) {
  for (const std::string& address : listening) std::printf("%s\n", address.c_str());
  std::fflush(stdout);
  for (;;) pause();
}

}  // namespace
}  // namespace tessera::bench

namespace bench = tessera::bench;

int main(int argc, char** argv) {
  CLI::App app(
      "Measures the performance of a server for its callers, compared with a bare gRPC server");
  bench::Options options;
  bench::AddOptions(app, options);
  std::vector<std::string> addresses;
  const auto add_server = [&](const char* name, const char* help) {
    CLI::App* command = app.add_subcommand(name, help);
    command->add_option("address", addresses, "host:port or unix:/path")->required();
    return command;
  };
  const CLI::App* serve = add_server("serve", "run only the bare server");
  const CLI::App* naive = add_server("serve-naive", "run only the naive server");
  CLI11_PARSE(app, argc, argv);
  if (serve->parsed()) return bench::ServeForEver(bench::KeepBare(addresses));
  if (naive->parsed()) return bench::ServeForEver(bench::KeepNaive(addresses));
  return bench::Run(options);
}
