// Groups the measurements of a run. Each measurement is a row of the table.
#pragma once

#include <cstdint>
#include <vector>

#include "client/bench/operations.h"
#include "client/bench/options.h"

namespace tessera::bench {

// Determines when calls are made.
struct Load {
  enum class Kind {
    kClosed,  // each caller makes its next call when the last response arrives
    kRate,    // this many calls per second
    kShare,   // this fraction of the closed loops' rate
    kRest,    // one call after this many seconds without calls
  };
  Kind kind = Kind::kClosed;
  double value = 0;
};

// Measurements that share their connections in every round.
struct Group {
  const Operation* operation = nullptr;
  std::int64_t size = 0;
  int callers = 1;
  std::vector<Load> loads;  // closed loops come before fractions of their rate
};

// Returns the sizes that the options specify for an operation; at least one.
const std::vector<std::int64_t>& SizesOf(const Operation& operation, const Options& options);

std::vector<Group> GroupsOf(const Options& options);

}  // namespace tessera::bench
