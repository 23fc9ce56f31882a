// Linalg by LAPACK, for problems whose operands and result are in host memory.
#pragma once

#include <cstdint>

#include "kernels/device/device.h"

namespace tessera {

// Returns the size of the memory that RunLapack needs for copies, in bytes.
std::uint64_t LapackBytes(const LinalgProblem& p);

// Computes the problem's result and sets result->index. Small matrices are divided among the cores.
// Stops between matrices once the stream is stopped. `scratch` has LapackBytes.
void RunLapack(const LinalgProblem& p, const Stream& stream, void* scratch);

}  // namespace tessera
