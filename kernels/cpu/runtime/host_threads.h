// The threads that run parallel loops on the host. Each thread that starts parallel loops has its
// own helper threads, which it keeps.
#pragma once

#include <string>

namespace tessera {

// Returns how many cores the process may keep busy: the number of cores on which it may run, or
// fewer if OMP_NUM_THREADS or its cgroups' CPU quota is lower. The main thread must make the first
// call.
int HostThreads();

// Counts these cores, and limits OpenBLAS to as many threads. root: the root of the file system,
// for tests.
int LimitThreads(const std::string& root);

// Sets how many threads, including the calling one, run the calling thread's parallel loops from
// then on. The threads are created immediately, and OpenMP ends the process if it cannot create
// them.
void ShareLoops(int threads);

}  // namespace tessera
