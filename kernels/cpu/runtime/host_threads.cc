#include "kernels/cpu/runtime/host_threads.h"

#include <cblas.h>

#include <algorithm>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/device/host_memory.h"

namespace tessera {

int LimitThreads(const std::string& root) {
#ifdef _OPENMP
  int cores = omp_get_max_threads();
#else
  int cores = 1;
#endif
  if (const int quota = ReadCpuQuota(root); quota > 0) cores = std::min(cores, quota);
  // OpenBLAS creates its threads when it is loaded; this limits how many of them work.
  if (openblas_get_num_threads() > cores) openblas_set_num_threads(cores);
  return cores;
}

int HostThreads() {
  static const int threads = LimitThreads("");
  return threads;
}

void ShareLoops([[maybe_unused]] int threads) {
#ifdef _OPENMP
  omp_set_num_threads(threads);
  if (threads == 1) return;
#pragma omp parallel
  {
    asm volatile("" ::: "memory");  // the compiler would remove an empty region and its threads
  }
#endif
}

}  // namespace tessera
