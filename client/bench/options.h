// The command line of service_bench.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/bench/channels.h"

namespace tessera::bench {

// Closed loops of one operation that run during the measurements.
struct Beside {
  std::string operation;
  int callers = 0;
};

struct Options {
  std::vector<Target> targets;
  std::vector<std::string> bare;
  bool naive = false;
  std::vector<std::string> operations = {"dot"};
  std::vector<int> callers = {1, 4, 16, 64};
  std::vector<std::int64_t> elements = {4096};
  std::vector<std::int64_t> side = {128};
  std::vector<std::int64_t> steps = {1000};
  std::vector<std::int64_t> transfer_mib = {64};
  std::vector<double> rate;  // calls per second
  std::vector<double> load;  // fractions of the closed loops' rate
  std::vector<double> rest;  // seconds
  std::optional<Beside> beside;
  double seconds = 1;
  int rounds = 5;
  std::uint64_t seed = 1;
  std::string json;
};

// Adds the flags for measurements. The parser rejects invalid values.
void AddOptions(CLI::App& app, Options& options);

}  // namespace tessera::bench
