// The threads that loops on the host are shared out among. A thread that shares out a loop has
// threads of its own for that, which stay with it.
#pragma once

namespace tessera {

// Cores that the process may keep busy: those that it may run on, or fewer by OMP_NUM_THREADS or the
// quota of its control groups. The first call is from the thread that starts the process.
int HostThreads();

// The calling thread shares loops out among so many threads from here on, itself included. They are
// made now: OpenMP ends the process where it cannot make them.
void ShareLoops(int threads);

}  // namespace tessera
