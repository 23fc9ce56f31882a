// Declarations that the strategies of the vendor's library (cublas.cu, cublas_lt.cu) share with
// each other and with the benchmarks. Included by .cu and .cc files.
#pragma once

#include "kernels/problem/matmul.h"

namespace tessera {

// Returns the error bound of the library, which adds in an unspecified order.
double CublasRoundoff(const MatmulProblem& p);

Cost CublasCost(const MatmulProblem& p);

// Enqueues the product by the fastest of the algorithms that cublasLt proposes for such a problem.
// The first call for a combination of extents, pitches, transposes and alignments tries the
// proposals and waits for the stream. tf32: f32 operands are rounded to TF32. Throws DeviceError.
// Thread safe if each thread has its own stream. REQUIRES: CublasMissing() of
// kernels/cuda/runtime/cublas_loader.h returns an empty string, and the operands are
// floating-point.
void LaunchCublasLt(const MatmulProblem& p, bool tf32, Stream& stream);

}  // namespace tessera
