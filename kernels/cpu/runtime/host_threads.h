// The threads that run parallel loops on the host. Each thread that starts parallel loops has its
// own threads for them, and keeps them.
#pragma once

namespace tessera {

// Returns how many cores the process may keep busy: those that it may run on, or fewer if
// OMP_NUM_THREADS or the quota of its control groups says so. The main thread must make the first
// call.
int HostThreads();

// Sets how many threads, including the calling one, run the calling thread's parallel loops from
// then on. They are created immediately: OpenMP ends the process if it cannot create them.
void ShareLoops(int threads);

}  // namespace tessera
