// The server as a process, which ends when it gets a signal or loses its devices.
#pragma once

#include <memory>
#include <vector>

#include "kernels/device/device.h"
#include "server/options.h"

namespace tessera {

// Exit codes. A server that stops as requested returns 0; a second signal N gives 128 + N.
inline constexpr int kExitFailure = 1;
inline constexpr int kExitDeviceLost = 70;  // EX_SOFTWARE: an orchestrator should restart it
inline constexpr int kExitNotSaved = 74;    // EX_IOERR: the last snapshot failed
inline constexpr int kExitCutOff = 75;      // EX_TEMPFAIL: calls were cut off by --drain-timeout

// Ignores signals that the server does not use and that would end the process. Call it first in
// main.
void IgnoreStraySignals();

// Makes SIGTERM and SIGINT stop the server gracefully; before it serves, they end the process
// immediately with 0. SIGHUP makes the server read its files again (Server::RequestReload). SIGUSR1
// begins or ends a profiler's window. Call it from the main thread.
void WatchSignals();

// Serves until SIGTERM, SIGINT or the loss of all devices. Returns kExitFailure if the server
// cannot start, for example because it lacks descriptors, or ends the process with that code if the
// threads that it needs cannot be created. Otherwise does not return, but ends the process. Throws
// std::system_error if creating a thread fails later. Call it once, from the main thread.
int Serve(const Options& options, std::vector<std::unique_ptr<Device>> devices);

}  // namespace tessera
