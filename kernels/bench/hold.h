// The start of a timed operation, put off until the host has enqueued all of it.
#pragma once

#include "kernels/device/device.h"

namespace tessera::bench {

// Keeps a stream of a CUDA device busy for `us` microseconds and returns at once. An event behind
// it is reached when what follows is enqueued already, so that the time between two events is the
// device's own: an operation of two kernels is not charged for how long the host takes to launch
// the second, which differs from host to host. (nvbench holds streams for the same reason.)
void LaunchHold(Stream& stream, double us);

}  // namespace tessera::bench
