// Declares the function that other strategies call to compute products as `tensor_f64` does.
#pragma once

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Enqueues an f64 product that is computed in the same way as by `tensor_f64`. `wanted` is a flag
// in device memory, or null to compute the product in any case. If the flag is 0 when the stream
// reaches this work, nothing is computed and c is unchanged. Throws DeviceError.
void MultiplyF64IfWanted(const MatmulProblem& p, const unsigned* wanted, CudaStream& stream);

}  // namespace tessera
