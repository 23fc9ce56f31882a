// Runs rounds of measurements.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "client/bench/operations.h"
#include "client/bench/options.h"
#include "client/bench/plan.h"
#include "client/bench/sample.h"
#include "client/bench/servers.h"

namespace tessera::bench {

struct Row {
  const Operation* operation = nullptr;
  std::int64_t size = 0;
  int callers = 0;
  Load load;
  std::string target;
  std::vector<Sample> rounds;
  // The bare server's samples, from the same rounds and over the same transport.
  std::vector<Sample> bare;
};

// Measures all servers that have the operation, in several rounds with a random order of servers.
// Returns a row for each load and server. Leaves no buffers behind.
std::vector<Row> MeasureGroup(const Servers& servers, const Group& group, std::mt19937_64& random,
                              const Options& options);

}  // namespace tessera::bench
