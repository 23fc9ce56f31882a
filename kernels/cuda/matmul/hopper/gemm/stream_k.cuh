// Stream-K: passes the partial sums of a tile from one cluster to the next.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/matmul/hopper/gemm/tile.cuh"

namespace tessera {

// Called by one thread. Waits until another worker has set the flag, and clears it for the next
// launch.
__device__ inline void WaitForPartial(std::uint32_t* written) {
  std::uint32_t set = 0;
  while (set == 0)
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(set) : "l"(written) : "memory");
  *written = 0;
}
__device__ inline void AnnouncePartial(std::uint32_t* written) {
  asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(written) : "memory");
}

// The number of threads in a consumer and its messenger. The two synchronize at named barriers. The
// messenger is a warp of the fetching warpgroup. It announces to other blocks that the consumer's
// sums are stored, or waits until another block's sums are stored, so the consumer does not have to
// wait for memory. At each barrier one side arrives and the other waits, since bar.sync requires
// all threads that wait at a barrier to be at the same instruction.
template <class C>
inline constexpr int kMessageThreads = C::kWarpgroup + kWarpSize;

// Four sums as one vector.
template <class C>
using FourSums = std::conditional_t<std::is_integral_v<typename C::Sum>, int4, float4>;

// Returns the address of a thread's first vector of sums among the partial results of a block's
// consumer. The thread's vectors are kWarpgroup vectors apart.
template <class C>
__device__ FourSums<C>* PartialOf(const TensorWork& work, int block, int consumer, int thread) {
  constexpr int kPacks = C::kGroupRows * C::kColumns / 4;
  return static_cast<FourSums<C>*>(work.partials) +
         (std::int64_t{block} * C::kConsumers + consumer) * kPacks + thread;
}

template <class Sum>
__device__ void AddSum(Sum x, Sum& sum) {
  if constexpr (std::is_integral_v<Sum>) {
    sum = WrapAdd(sum, x);
  } else {
    sum += x;
  }
}

// Stores the sums of the first part of a tile for the next cluster.
template <class C, int kCount>
__device__ void StorePartial(const typename C::Sum (&d)[kCount], const TensorWork& work,
                             int consumer, int thread) {
  FourSums<C>* to = PartialOf<C>(work, static_cast<int>(blockIdx.x), consumer, thread);
#pragma unroll
  for (int i = 0; i < kCount; i += 4, to += C::kWarpgroup)
    __stcg(to, FourSums<C>{d[i], d[i + 1], d[i + 2], d[i + 3]});
  NamedBarrierArrive(BarrierOf<C>(Meeting::kSumsStored, consumer), kMessageThreads<C>);
}

// Adds the sums that the previous cluster has stored.
template <class C, int kCount>
__device__ void AddPartial(typename C::Sum (&d)[kCount], const TensorWork& work, int consumer,
                           int thread) {
  NamedBarrier(BarrierOf<C>(Meeting::kMayLoad, consumer), kMessageThreads<C>);
  const FourSums<C>* from =
      PartialOf<C>(work, static_cast<int>(blockIdx.x) - C::kCluster, consumer, thread);
#pragma unroll
  for (int i = 0; i < kCount; i += 4, from += C::kWarpgroup) {
    const FourSums<C> pack = __ldcg(from);
    AddSum(pack.x, d[i]), AddSum(pack.y, d[i + 1]);
    AddSum(pack.z, d[i + 2]), AddSum(pack.w, d[i + 3]);
  }
}

// Called by a messenger. Announces or waits for sums, in the order of its consumer's pieces.
template <class C>
__device__ void PassMessages(const TensorWork& work, int cluster, int clusters, int consumer) {
  const bool speaks = threadIdx.x % kWarpSize == 0;
  std::uint32_t* const written =
      work.written + static_cast<int>(blockIdx.x) * C::kConsumers + consumer;
  for (int i = work.sharing.rounds;; ++i) {
    const Piece piece = PieceOf(work.sharing, cluster, clusters, i);
    if (piece.k_tiles == 0) return;
    if (!piece.ends) {
      NamedBarrier(BarrierOf<C>(Meeting::kSumsStored, consumer), kMessageThreads<C>);
      if (speaks) AnnouncePartial(written);
    }
    if (!piece.starts) {
      if (speaks) WaitForPartial(written - C::kCluster * C::kConsumers);
      __syncwarp();
      NamedBarrierArrive(BarrierOf<C>(Meeting::kMayLoad, consumer), kMessageThreads<C>);
    }
  }
}

}  // namespace tessera
