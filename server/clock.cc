#include "server/clock.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>

namespace tessera {
namespace {

std::atomic<std::int64_t> ahead_ns{0};

}  // namespace

absl::Time SteadyNow() {
  using std::chrono::steady_clock;
  static const absl::Time wall = absl::Now();
  static const steady_clock::time_point begin = steady_clock::now();
  return wall + absl::FromChrono(steady_clock::now() - begin) +
         absl::Nanoseconds(ahead_ns.load(std::memory_order_relaxed));
}

absl::Duration WallAhead() {
  static std::atomic<std::int64_t> known_ns{0};
  const std::int64_t ahead = absl::ToInt64Nanoseconds(absl::Now() - SteadyNow());
  const std::int64_t known = known_ns.load(std::memory_order_relaxed);
  if (std::abs(ahead - known) < 1'000'000'000) return absl::Nanoseconds(known);
  known_ns.store(ahead, std::memory_order_relaxed);
  return absl::Nanoseconds(ahead);
}

void AdvanceSteadyNow(absl::Duration by) {
  ahead_ns.fetch_add(absl::ToInt64Nanoseconds(by), std::memory_order_relaxed);
}

}  // namespace tessera
