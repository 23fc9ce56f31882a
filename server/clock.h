// The server's clock.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tessera {

// Returns the wall clock's time at the first call plus the time that the steady clock has measured
// since then. Setting the wall clock therefore neither expires buffers nor ends uploads. Thread
// safe.
absl::Time SteadyNow();

// Returns how far the wall clock is ahead of SteadyNow(). Differences of less than a second from
// the value before count as none, so that a moment has the same time in every response until the
// wall clock is set. Thread safe.
absl::Duration WallAhead();

// For tests: advances SteadyNow() permanently and for the whole process. Does not wake threads that
// are sleeping. Thread safe.
void AdvanceSteadyNow(absl::Duration by);

}  // namespace tessera
