// Delays the start of a timed operation until the host has enqueued all of it.
#pragma once

#include "kernels/device/device.h"

namespace tessera::bench {

// Enqueues a kernel that keeps a stream of a CUDA device busy for `us` microseconds. An event
// behind this kernel is reached only after the host has enqueued the work that follows the event,
// so the time between two events is purely device time. An operation of two kernels is then not
// charged for the time that the host takes to launch the second kernel, which differs from host to
// host. (nvbench holds streams for the same reason.)
void LaunchHold(Stream& stream, double us);

}  // namespace tessera::bench
