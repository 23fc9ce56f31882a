// Functions for Hopper's matrix instructions, which exist in PTX only for compute capability 9.0
// and not in CUDA C++. Each function wraps one instruction; gemm.cuh explains how they are used.
// For their semantics, see "mbarrier", "cp.async.bulk.tensor", "wgmma" and "setmaxnreg" in the PTX
// ISA, 8.0.
//
// A file that uses wgmma or setmaxnreg must be compiled for sm_90a (CMakeLists.txt). The other
// functions need sm_90. A file compiles for older GPUs only if its code for these GPUs uses none of
// the functions.
#pragma once

#include <cuda.h>  // for the type CUtensorMap; nothing links against the driver

#include <cstdint>
#include <type_traits>

#include "kernels/base/element.h"

namespace tessera {

// The 19 bits of an f32 that the tensor cores multiply (the sign, 8 bits of the exponent, and 10 of
// the fraction), in a 32-bit word. The tensor cores ignore the low 13 bits.
struct Tf32 {
  std::uint32_t bits;
};

// Returns the address of shared memory in the form that the instructions below take.
__device__ inline std::uint32_t SharedAddress(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

// --- Barriers in shared memory ---
//
// An mbarrier counts pending arrivals, and bytes that TMA has yet to deliver. When both are zero,
// its phase ends, and the next phase begins with the initial count. Phases are distinguished by
// their parity: waiting for parity 1 on a new barrier returns immediately.

__device__ inline void BarrierInit(std::uint32_t barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes new barriers visible to the cluster's other blocks and to TMA.
__device__ inline void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and adds `bytes` to the bytes that TMA has to deliver in this phase.
__device__ inline void BarrierExpect(std::uint32_t barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ inline void BarrierArrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives on the barrier at the same offset in the shared memory of another block of the cluster.
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

// Waits at named barrier `id`, one of the block's 16, until `threads` threads have arrived. Barrier
// 0 is __syncthreads.
__device__ inline void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at named barrier `id` without waiting for the other threads.
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

// A barrier for all threads of the cluster, in two halves.
__device__ inline void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void ClusterWait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ inline void ClusterBarrier() {
  ClusterArrive();
  ClusterWait();
}

// Stores a value at the same offset in the shared memory of another block of the cluster.
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
// A tensor map describes matrices in global memory, and the shape of the box that an instruction
// copies. x counts elements along the contiguous dimension, and y counts along the other. The part
// of a box that is outside the matrix is read as zeros and is not written.

__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at (x, y) of the z-th matrix to shared memory. The barrier counts its bytes.
__device__ inline void LoadBox(std::uint32_t to, const CUtensorMap* map, int x, int y, int z,
                               std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Copies the box to every block of the cluster whose bit in `blocks` is set. The barrier of each of
// these blocks counts its bytes.
__device__ inline void LoadBoxMulticast(std::uint32_t to, const CUtensorMap* map, int x, int y,
                                        int z, std::uint32_t barrier, unsigned blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(static_cast<std::uint16_t>(blocks))
      : "memory");
}

// Copies a box from shared memory to (x, y) of the z-th matrix.
__device__ inline void StoreBox(const CUtensorMap* map, int x, int y, int z, std::uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ inline void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the thread's TMA stores have read the shared memory that they copy from.
__device__ inline void WaitForStoresToRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Orders the thread's accesses to shared memory before later accesses by TMA.
__device__ inline void FenceForCopyEngine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- Registers ---

// Called by all threads of a warpgroup. Registers that one warpgroup releases are available to
// others.
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
__device__ inline void StorePair(std::uint32_t to, std::int32_t low, std::int32_t high) {
  asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high) : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements from a warp's registers to shared memory. Lane l
// holds elements 2 (l % 4) and 2 (l % 4) + 1 in row l / 4 of each matrix. In lane l, `to` is the
// address of the 16 bytes for row l % 8 of matrix l / 8.
__device__ inline void StoreMatrices(std::uint32_t to, std::uint32_t m0, std::uint32_t m1,
                                     std::uint32_t m2, std::uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace tessera
