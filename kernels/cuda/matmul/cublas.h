// What the strategies of the vendor's library share (cublas.cu, cublas_lt.cu), and the benchmarks
// use. Included by .cu and .cc files.
#pragma once

#include "kernels/problem/matmul.h"

namespace tessera {

// The error bound of the library, whose additions have an order of its own.
double CublasRoundoff(const MatmulProblem& p);

Cost CublasCost(const MatmulProblem& p);

// Enqueues the product by the fastest of the algorithms that cublasLt proposes for such a problem.
// The first call for extents, pitches, transposes and alignments tries them and waits for the
// stream. tf32: f32 operands are rounded to TF32. Throws DeviceError. Thread safe, each thread with
// a stream of its own. REQUIRES: CublasMissing() of kernels/cuda/runtime/cublas_loader.h is empty;
// floating-point operands.
void LaunchCublasLt(const MatmulProblem& p, bool tf32, Stream& stream);

}  // namespace tessera
