// `tensor_f64` as a part of other strategies.
#pragma once

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Enqueues the product of f64 as `tensor_f64` computes it. wanted: a flag in device memory; where
// it is 0 when the stream comes to it, nothing is computed and c stays as it is. Null: always
// wanted. Throws DeviceError.
void MultiplyF64IfWanted(const MatmulProblem& p, const unsigned* wanted, CudaStream& stream);

}  // namespace tessera
