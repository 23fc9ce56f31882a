#include "tests/bench/peers.h"

#include <cub/device/device_reduce.cuh>

#include "kernels/cuda/cuda.h"

namespace tessera::bench {

void LaunchPeer(Peer peer, Lane& lane, const float* x, std::int64_t n) {
  CudaLane& cuda = Cuda(lane);
  auto* value = static_cast<float*>(cuda.Scratch(sizeof(float)));
  auto* index = static_cast<std::int64_t*>(cuda.Scratch(sizeof(std::int64_t)));
  // Each of CUB's calls is made twice: first to ask how much temporary memory it wants.
  void* temporary = nullptr;
  std::size_t bytes = 0;
  const auto call = [&] {
    switch (peer) {
      case Peer::kCubSum:
        return cub::DeviceReduce::Sum(temporary, bytes, x, value, n, cuda.stream());
      case Peer::kCubMax:
        return cub::DeviceReduce::Max(temporary, bytes, x, value, n, cuda.stream());
      case Peer::kCubArgMax:
        return cub::DeviceReduce::ArgMax(temporary, bytes, x, value, index, n, cuda.stream());
    }
    return cudaErrorInvalidValue;
  };
  CUDA_CHECK(call());
  temporary = cuda.Scratch(bytes);
  CUDA_CHECK(call());
}

}  // namespace tessera::bench
