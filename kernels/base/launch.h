// How a strategy is launched, as far as a request may say.
#pragma once

#include <cstdint>

namespace tessera {

// A request's knobs. 0: the strategy's own choice. Checked against the strategy's LaunchLimits
// before launch is called.
struct Launch {
  std::uint32_t block_size = 0;
  std::uint32_t grid_size = 0;
  std::uint32_t items_per_thread = 0;
};

// The values of Launch that a strategy honours, inclusive. {0, 0}: the strategy has no such knob.
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
