// A server as a process: it ends with a signal, or with its device.
#pragma once

#include <memory>
#include <vector>

#include "kernels/device/device.h"
#include "server/options.h"

namespace tessera {

// Stopped as asked is 0, and a second signal 128 + its number.
inline constexpr int kExitFailure = 1;
inline constexpr int kExitDeviceLost = 70;  // EX_SOFTWARE: an orchestrator should start it anew
inline constexpr int kExitCutOff = 75;      // EX_TEMPFAIL: calls were cut off by --drain-timeout

// Ignores signals that the server has no use for, which would end the process. Call it first in
// main.
void IgnoreStraySignals();

// From here on SIGTERM and SIGINT end the process in order: at once, with 0, until it serves. Call
// it from the main thread. SIGHUP has files read again (Server::RequestReload). SIGUSR1 begins a
// profiler's window, or ends it.
void WatchSignals();

// Serves until SIGTERM, SIGINT or the loss of a device. Returns kExitFailure when it cannot start,
// or ends the process with that code where it cannot make the threads that it needs; otherwise it
// does not return, but ends the process. Throws std::system_error where making a thread fails
// later. Call it once, from the main thread.
int Serve(const Options& options, std::vector<std::unique_ptr<Device>> devices);

}  // namespace tessera
