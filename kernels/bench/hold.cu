#include "kernels/bench/hold.h"

#include <cstdint>

#include "kernels/cuda/runtime/cuda.h"

namespace tessera::bench {
namespace {

__device__ std::uint64_t Nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void Hold(std::uint64_t ns) {
  const std::uint64_t begin = Nanoseconds();
  while (Nanoseconds() - begin < ns) {
  }
}

}  // namespace

void LaunchHold(Stream& stream, double us) {
  Hold<<<1, 1, 0, Cuda(stream).handle()>>>(static_cast<std::uint64_t>(us * 1e3));
  CUDA_CHECK_LAUNCH(Hold);
}

}  // namespace tessera::bench
