// Declarations that the cuBLAS strategies (cublas.cu, cublas_lt.cu) and the benchmarks share.
// Included by .cu and .cc files.
#pragma once

#include "kernels/problem/matmul.h"

namespace tessera {

// Returns a bound on the library's error that holds for any order of its additions.
double CublasRoundoff(const MatmulProblem& p);

Cost CublasCost(const MatmulProblem& p);

// Enqueues the product with the fastest algorithm that cublasLt proposes for this product. The
// first call for a combination of extents, pitches, transposes and alignments tries the proposals
// and waits for the stream. tf32: whether f32 operands are rounded to TF32. Throws DeviceError.
// Thread safe if each thread has its own stream. REQUIRES: CublasMissing()
// (kernels/cuda/runtime/cublas_loader.h) returns an empty string, and the operands are
// floating-point.
void LaunchCublasLt(const MatmulProblem& p, bool tf32, Stream& stream);

}  // namespace tessera
