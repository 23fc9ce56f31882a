// What is measured: the table's rows, in groups.
#pragma once

#include <cstdint>
#include <vector>

#include "client/bench/operations.h"
#include "client/bench/options.h"

namespace tessera::bench {

// How calls come.
struct Load {
  enum class Kind {
    kClosed,  // each caller makes its next call when it has its answer
    kRate,    // so many calls a second
    kShare,   // this share of the rate of the closed loops
    kRest,    // one call after so many seconds without any
  };
  Kind kind = Kind::kClosed;
  double value = 0;
};

// Measurements that share a connection in every round.
struct Group {
  const Operation* operation = nullptr;
  std::int64_t size = 0;
  int callers = 1;
  std::vector<Load> loads;  // a share of the closed loops' rate comes after the closed loops
};

// The sizes that the options give for an operation, at least one.
const std::vector<std::int64_t>& SizesOf(const Operation& operation, const Options& options);

std::vector<Group> GroupsOf(const Options& options);

}  // namespace tessera::bench
