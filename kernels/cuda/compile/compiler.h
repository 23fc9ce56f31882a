// Kernels that the driver compiles while the server runs, for expressions that come again. Thread
// safe.
#pragma once

#include <cstdint>

#include "kernels/cuda/compile/kernel_text.h"

namespace tessera {
class CudaStream;
}

namespace tessera::compiled {

// Enqueues the plan's kernel, behind all work of the stream, whose device is current. False: there
// is none, or not yet, or it cannot be launched; the second call with a plan has it compiled in the
// background, once for all streams and for devices of one compute capability. The first launch
// loads it, as that of any kernel. Throws DeviceError.
bool Launch(const KernelPlan& plan, const Arguments& arguments, std::uint32_t blocks,
            std::uint32_t threads, CudaStream& stream);

// For tests. Whether Launch waits for a kernel that is not there yet; false at first.
void CompileBeforeUse(bool on);
// For tests: how many kernels Launch has enqueued in this process.
std::int64_t Launches();

}  // namespace tessera::compiled
