// Kernels that the driver compiles while the server runs, for expressions that are used repeatedly.
// Thread safe.
#pragma once

#include <cstdint>

#include "kernels/cuda/compile/kernel_text.h"

namespace tessera {
class CudaStream;
}

namespace tessera::compiled {

// Enqueues the plan's kernel after all earlier work of the stream. REQUIRES: the stream's device is
// current. Returns false if the kernel is not compiled yet, cannot be compiled or cannot be
// launched. The second call with a plan starts its compilation in the background, once for all
// streams and for all devices of the same compute capability. The first launch loads the kernel, as
// it does for any kernel. Throws DeviceError.
bool Launch(const KernelPlan& plan, const Arguments& arguments, std::uint32_t blocks,
            std::uint32_t threads, CudaStream& stream);

// For tests: sets whether Launch waits for a kernel that is not compiled yet. The default is false.
void CompileBeforeUse(bool on);
// For tests: returns the number of kernels that Launch has enqueued in this process.
std::int64_t Launches();

}  // namespace tessera::compiled
