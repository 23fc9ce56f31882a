// The kernel of Map for chains (chain.cuh). It is correct for any n and block size: threads share
// only the values that are the same for all elements, and the elements of a group that reaches
// beyond the end are loaded and stored one by one.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/map/chain.cuh"

namespace tessera::chained {

inline constexpr std::uint32_t kBlock = kMostThreads;

// The number of groups per thread (a step is decoded once for all of them), and the number of
// blocks per SM for __launch_bounds__.
template <class T>
constexpr int kGroupsOf = 2;
template <class T>
constexpr int kBlocksOf = sizeof(T) == 2 ? 3 : 4;

// Calls f(O{}) for the type of the result of a chain of T.
template <class T, class F>
__device__ __forceinline__ void DispatchOut(DType dtype, F f) {
  if (dtype == DType::kBool) return f(bool{});
  if constexpr (std::is_same_v<T, float>) {
    if (dtype == DType::kBF16) return f(BFloat16{});
    if (dtype == DType::kF16) return f(Half{});
  }
  f(T{});
}

template <class O, int kW>
__device__ __forceinline__ void Store(const Side<O, kW>& side, O* to, std::int64_t left) {
  if (left >= kW) {
    *reinterpret_cast<Side<O, kW>*>(to) = side;
    return;
  }
#pragma unroll
  for (int j = 0; j < kW; ++j)
    if (j < left) to[j] = side.elements[j];
}

template <class T, bool kSaves, int kGroups = kGroupsOf<T>, int kBlocks = kBlocksOf<T>>
__global__ void __launch_bounds__(kBlock, kBlocks)
    MapChained(const __grid_constant__ Chain chain, std::int64_t n, void* out) {
  using V = ValueOf<T>;
  constexpr int kW = kWidth<T>;
  constexpr int kEach = kGroups * kW;
  extern __shared__ uint4 loaded[];
  __shared__ V singles[kMostSingles];
  const std::int64_t block = std::int64_t{blockIdx.x} * (std::int64_t{blockDim.x} * kEach);
  // Returns the first element of this thread's group g.
  const auto first = [&](int g) {
    return block + (std::int64_t{g} * blockDim.x + threadIdx.x) * kW;
  };
  const Groups<T, kGroups> groups = {reinterpret_cast<Group<T>*>(loaded) + threadIdx.x};
#pragma unroll 1
  for (int i = 0; i < chain.inputs; ++i) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      if (first(g) < n) StartLoad<T>(chain.input[i], first(g), n - first(g), groups(i, g));
  }
  EndLoads();
  LoadSingles<T>(chain, singles);
  __syncthreads();  // singles are written
  WaitForLoads<0>();
  Settle(chain, groups);
  V value[kEach];
  Evaluate<kSaves>(chain, groups, singles, value);

  DispatchOut<T>(chain.out, [&](auto o) {
    using O = decltype(o);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      Side<O, kW> side;
#pragma unroll
      for (int j = 0; j < kW; ++j) side.elements[j] = static_cast<O>(value[g * kW + j]);
      if (first(g) < n) Store(side, static_cast<O*>(out) + first(g), n - first(g));
    }
  });
}

template <class T, bool kSaves>
void Launch(const MapProblem& p, const Chain& chain, CudaStream& stream) {
  constexpr int kGroups = kGroupsOf<T>;
  const Grid grid = MakeGrid(p.n, p.launch, kBlock, kGroups * kWidth<T>);
  MapChained<T, kSaves>
      <<<grid.blocks, grid.block_size, Groups<T, kGroups>::Bytes(chain), stream.handle()>>>(
          chain, p.n, p.out);
  CUDA_CHECK_LAUNCH(MapChained);
}

// Launches the problem's kernel if the problem is a chain whose result Map can store. Returns
// whether it has launched the kernel. The kernel for chains that save no value has no code for
// saving.
inline bool LaunchChain(const MapProblem& p, CudaStream& stream) {
  Chain chain;
  if (!IsAligned(p.out) || !Match(p, &chain)) return false;
  if (chain.out == DType::kI32 && chain.dtype != DType::kI32) return false;
  DispatchDType(chain.dtype, [&](auto t) {
    using T = decltype(t);
    chain.saves ? Launch<T, true>(p, chain, stream) : Launch<T, false>(p, chain, stream);
  });
  return true;
}

}  // namespace tessera::chained
