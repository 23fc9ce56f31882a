#include "server/clock.h"

#include <chrono>

namespace tessera {

absl::Time SteadyNow() {
  using std::chrono::steady_clock;
  static const absl::Time wall = absl::Now();
  static const steady_clock::time_point begin = steady_clock::now();
  return wall + absl::FromChrono(steady_clock::now() - begin);
}

}  // namespace tessera
