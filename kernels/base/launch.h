// The launch parameters that a request may set.
#pragma once

#include <cstdint>

namespace tessera {

// A request's parameters. 0 leaves the choice to the strategy. Values are checked against the
// strategy's LaunchLimits before Strategy::launch is called.
struct Launch {
  std::uint32_t block_size = 0;
  std::uint32_t grid_size = 0;
  std::uint32_t items_per_thread = 0;
};

// The inclusive ranges of the Launch values that a strategy accepts. {0, 0} means that the strategy
// does not have this parameter.
struct LaunchLimits {
  struct Range {
    std::uint32_t min = 0;
    std::uint32_t max = 0;
  };
  Range block_size;
  Range grid_size;
  Range items_per_thread;
};

}  // namespace tessera
