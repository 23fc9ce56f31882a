// Delays the start of a timed operation until the host has enqueued all of it.
#pragma once

#include "kernels/device/device.h"

namespace tessera::bench {

// Keeps a stream of a CUDA device busy for `us` microseconds, and returns immediately. An event
// enqueued after it is reached only when the following work has been enqueued, so that the time
// between two events is the device's own. An operation of two kernels is then not charged for the
// time that the host takes to launch the second, which differs from host to host. (nvbench holds
// streams for the same reason.)
void LaunchHold(Stream& stream, double us);

}  // namespace tessera::bench
