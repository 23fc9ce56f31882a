// Time as the server counts it.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tessera {

// The wall clock as it was when the process first asked, and from then on the steady clock: a wall
// clock that is set forward or back neither expires buffers nor ends uploads. Thread safe.
absl::Time SteadyNow();

// For tests: moves what SteadyNow() returns forward, for the whole process and for good. Wakes no
// thread that sleeps. Thread safe.
void AdvanceSteadyNow(absl::Duration by);

}  // namespace tessera
