// The launch parameters that a request may set.
#pragma once

#include <cstdint>

namespace tessera {

// A request's parameters. 0 means the strategy's own choice. They are checked against the
// strategy's LaunchLimits before launch is called.
struct Launch {
  std::uint32_t block_size = 0;
  std::uint32_t grid_size = 0;
  std::uint32_t items_per_thread = 0;
};

// The values of Launch that a strategy accepts, inclusive. {0, 0}: the strategy has no such
// parameter.
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
