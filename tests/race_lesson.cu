#include "tests/race_lesson.h"

#include <vector>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera::test {
namespace {

// += is three steps: read the cell, add, write it back. The 32 threads of a warp read at the same
// time, each adds its own product to the same old value, and only one of the 32 writes survives.
// Warps that run at the same time interfere with each other in the same way.
__global__ void RacyDotKernel(const float* a, const float* b, std::int64_t n, float* c) {
  const std::int64_t i = GridThread();
  if (i < n) c[0] += a[i] * b[i];
}

// Of the blockDim.x sums of a block, its cell keeps only the sum that is written last.
__global__ void RacySumKernel(const double* x, std::int64_t n, double* partials) {
  double sum = 0;
  for (std::int64_t i = GridThread(); i < n; i += GridThreads()) sum += x[i];
  partials[blockIdx.x] = sum;
}

}  // namespace

float RacyDot(const float* a, const float* b, std::int64_t n, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  auto* c = static_cast<float*>(cuda.Scratch(sizeof(float)));
  CUDA_CHECK(cudaMemsetAsync(c, 0, sizeof(float), cuda.handle()));
  RacyDotKernel<<<static_cast<unsigned>(CeilDiv(n, kRaceBlock)), kRaceBlock, 0, cuda.handle()>>>(
      a, b, n, c);
  CUDA_CHECK_LAUNCH(RacyDotKernel);
  float result = 0;
  cuda.CopyToHost(&result, c, sizeof result);
  return result;
}

double RacySum(const double* x, std::int64_t n, unsigned blocks, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  auto* partials = static_cast<double*>(cuda.Scratch(blocks * sizeof(double)));
  RacySumKernel<<<blocks, kRaceBlock, 0, cuda.handle()>>>(x, n, partials);
  CUDA_CHECK_LAUNCH(RacySumKernel);
  std::vector<double> cells(blocks);
  cuda.CopyToHost(cells.data(), partials, blocks * sizeof(double));
  double sum = 0;
  for (double cell : cells) sum += cell;
  return sum;
}

}  // namespace tessera::test
