// `tensor_f64` as a part of other strategies.
#pragma once

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Enqueues the product of f64 as `tensor_f64` computes it. wanted: a flag in device memory. If it
// is 0 when the stream gets there, nothing is computed and c is unchanged. If the pointer is null,
// the product is always computed. Throws DeviceError.
void MultiplyF64IfWanted(const MatmulProblem& p, const unsigned* wanted, CudaStream& stream);

}  // namespace tessera
