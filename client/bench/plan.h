// The measurements of a run: the table's rows, in groups.
#pragma once

#include <cstdint>
#include <vector>

#include "client/bench/operations.h"
#include "client/bench/options.h"

namespace tessera::bench {

// When calls are made.
struct Load {
  enum class Kind {
    kClosed,  // each caller makes its next call when the last response arrives
    kRate,    // this many calls per second
    kShare,   // this share of the closed loops' rate
    kRest,    // one call after this many seconds without calls
  };
  Kind kind = Kind::kClosed;
  double value = 0;
};

// Measurements that share a connection in every round.
struct Group {
  const Operation* operation = nullptr;
  std::int64_t size = 0;
  int callers = 1;
  std::vector<Load> loads;  // shares of the closed loops' rate come after the closed loops
};

// Returns the sizes that the options give for an operation, at least one.
const std::vector<std::int64_t>& SizesOf(const Operation& operation, const Options& options);

std::vector<Group> GroupsOf(const Options& options);

}  // namespace tessera::bench
