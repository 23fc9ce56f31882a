// Hopper's matrix instructions as functions: what PTX offers for compute capability 9.0 alone and
// CUDA C++ has no words for. One function an instruction, nothing else; what they are used for is
// told in gemm.cuh. The semantics are those of the PTX ISA, 8.0, "mbarrier",
// "cp.async.bulk.tensor", "wgmma" and "setmaxnreg".
//
// wgmma and setmaxnreg need a file that is compiled for sm_90a (CMakeLists.txt); the rest does with
// sm_90, and for older GPUs a file only compiles as long as its code for them uses none of it.
#pragma once

#include <cuda.h>  // the type CUtensorMap; nothing links with the driver

#include <cstdint>
#include <type_traits>

#include "kernels/base/element.h"

namespace tessera {

// 19 bits of an f32 (8 of the exponent, 10 of the fraction) in 32: what the tensor cores multiply
// when they are given f32. They leave the low 13 bits unread.
struct Tf32 {
  std::uint32_t bits;
};

// The address of shared memory as the instructions below want it.
__device__ inline std::uint32_t SharedAddress(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

// --- Barriers in shared memory ---
//
// An mbarrier counts arrivals, and bytes that TMA still owes. When neither is left its phase ends,
// and the next begins with the count it was made with. Phases are told apart by their parity;
// waiting for parity 1 on a new barrier returns at once.

__device__ inline void BarrierInit(std::uint32_t barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes new barriers visible to the cluster's other blocks and to TMA.
__device__ inline void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and promises so many bytes for this phase.
__device__ inline void BarrierExpect(std::uint32_t barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ inline void BarrierArrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives on the barrier at the same place in the shared memory of another block of the cluster.
__device__ inline void BarrierArriveAt(std::uint32_t barrier, unsigned block) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

__device__ inline void BarrierWait(std::uint32_t barrier, unsigned parity) {
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// A barrier of `threads` threads of the block, one of 16; 0 is __syncthreads.
__device__ inline void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same without waiting for the others.
__device__ inline void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- Clusters ---

__device__ inline unsigned ClusterRank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline unsigned ClusterSize() {
  unsigned blocks;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  return blocks;
}

// A barrier of all threads of all blocks of the cluster, in two halves.
__device__ inline void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void ClusterWait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ inline void ClusterBarrier() {
  ClusterArrive();
  ClusterWait();
}

// Stores at the same place in the shared memory of another block of the cluster.
__device__ inline void StoreSharedAt(std::uint32_t to, unsigned block, float value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.f32 [remote], %2;\n"
      "}" ::"r"(to),
      "r"(block), "f"(value)
      : "memory");
}

// --- TMA ---
//
// A tensor map describes matrices in global memory, and the box of one that an instruction copies;
// x counts elements along the contiguous dimension, y along the other. What of a box lies outside
// the matrix is zero when read, and not written.

__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box at (x, y) of the z-th matrix into shared memory; its bytes count for the barrier.
__device__ inline void LoadBox(std::uint32_t to, const CUtensorMap* map, int x, int y, int z,
                               std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same into every block of the cluster whose bit is set, and for the barrier of each.
__device__ inline void LoadBoxMulticast(std::uint32_t to, const CUtensorMap* map, int x, int y,
                                        int z, std::uint32_t barrier, unsigned blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(static_cast<std::uint16_t>(blocks))
      : "memory");
}

// A box from shared memory to (x, y) of the z-th matrix.
__device__ inline void StoreBox(const CUtensorMap* map, int x, int y, int z, std::uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ inline void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the thread's stores have read their shared memory.
__device__ inline void WaitForStoresToRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Orders the thread's writes to shared memory before what TMA reads of it.
__device__ inline void FenceForCopyEngine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- Registers ---

// Called by all threads of a warpgroup: what some give back, others can take.
template <int kRegisters>
__device__ void GiveRegistersBack() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- Shared memory by its address ---

__device__ inline float LoadShared(std::uint32_t from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}
__device__ inline void StoreShared(std::uint32_t to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
__device__ inline void StorePair(std::uint32_t to, float low, float high) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(low), "f"(high) : "memory");
}

// Four 8 x 8 matrices of 16 bits from a warp's registers to shared memory. Lane l holds elements
// 2 (l % 4) and the next of row l / 4 of each; to: where row l % 8 of matrix l / 8 goes, 16 bytes.
__device__ inline void StoreMatrices(std::uint32_t to, std::uint32_t m0, std::uint32_t m1,
                                     std::uint32_t m2, std::uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace tessera
