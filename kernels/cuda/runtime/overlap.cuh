// Launches that overlap (CUDA's programmatic dependent launch). From compute capability 9.0 on, a
// kernel may start while the previous kernel on the stream is still running, once all blocks of the
// previous kernel have called AllowNextKernel or ended. This saves the one or two microseconds
// between two kernels. The kernel must call WaitForKernelBefore before it accesses global memory.
// On older GPUs, kernels run one after another as usual.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

__device__ inline void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void AllowNextKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether the kernel's code on the current GPU contains the wait. A GPU of compute capability 9.0
// may run code compiled for an older GPU, which contains no wait. Queries the driver once for each
// kernel and GPU. Thread safe.
inline bool IsToOverlap(const void* kernel, const CudaDevice& device) {
  if (device.info().compute_capability < 90) return false;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, bool> known;
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = known.try_emplace({kernel, device.ordinal()}, false);
  if (is_new) {
    cudaFuncAttributes attributes{};
    entry->second =
        cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
  }
  return entry->second;
}

struct LaunchGrid {
  unsigned blocks, threads;
  std::size_t shared_bytes;
  unsigned cluster = 0;  // blocks per cluster; 0: as the kernel specifies, if it does
};

// Launches a kernel that calls WaitForKernelBefore.
template <class... Parameters, class... Arguments>
void LaunchOverlapping(void (*kernel)(Parameters...), const LaunchGrid& grid, CudaStream& stream,
                       const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (IsToOverlap(reinterpret_cast<const void*>(kernel), stream.device())) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {grid.cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream.handle();
  config.attrs = attributes;
  config.numAttrs = count;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace tessera
