// The work that strategy_bench launches in addition to the strategies. LaunchRead, LaunchCopy and
// LaunchFma exist in every build, and the other functions only in builds with CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/device.h"

namespace tessera::bench {

#ifdef TESSERA_WITH_CUDA
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

// --- Ceilings: the maximum rates of the device. Every "% of the ceiling" refers to them. ---

// Each function enqueues one pass on a stream of either kind of device. It works on device memory
// aligned to 16 bytes, and bytes is a multiple of 16. On the CPU a pass runs on as many threads as
// OpenMP provides.

// Reads every byte once, with many 16-byte loads in flight; writes only 16 bytes, to sink.
void LaunchRead(Stream& stream, const void* data, std::size_t bytes, void* sink);
// Reads and writes every byte once; on a CUDA device this is the driver's own copy.
void LaunchCopy(Stream& stream, void* to, const void* from, std::size_t bytes);
// Computes fused multiply-adds of floats or doubles in registers. Returns the number of operations,
// which is two per multiply-add.
double LaunchFma(Stream& stream, bool double_precision, void* sink);

// The CUDA implementations of the three functions above.
void LaunchReadCuda(Stream& stream, const void* data, std::size_t bytes, void* sink);
void LaunchCopyCuda(Stream& stream, void* to, const void* from, std::size_t bytes);
double LaunchFmaCuda(Stream& stream, bool double_precision, void* sink);

// --- The hold ---

// Enqueues a kernel that keeps a stream of a CUDA device busy for `us` microseconds. An event after
// this kernel is reached only when the host has enqueued the work that follows the event, so the
// time between two events is purely device time. An operation of two kernels is then not charged
// for the time that the host takes to launch the second kernel, which differs from host to host.
// (nvbench holds streams for the same reason.)
void LaunchHold(Stream& stream, double us);

// --- Peers: calls of CUDA's libraries ---

// These calls are made as the libraries' documentation recommends. The strategies `library` and
// `cublas` are not always a fair comparison: the reductions of `library` accumulate in double, and
// `cublas` uses the algorithm that the library's own heuristics rank first. In these cases, a
// claim of being faster than the library refers to the calls below.

enum class Peer { kCubSum, kCubMax, kCubArgMax, kCublasNrm2, kCublasAsum };

// Whether this host has the libraries.
bool HasPeers();

// Enqueues the reduction of n floats in device memory; results are written to scratch memory. CUB's
// sums are the same from run to run on one device; this is the only deterministic mode of the CUB
// version that comes with CUDA 13.0. REQUIRES: HasPeers().
void LaunchPeer(Peer peer, Stream& stream, const float* x, std::int64_t n);

// Enqueues the sums of `rows` rows of `length` floats each, with CUB's segmented reduction.
// REQUIRES: HasPeers(); rows and length below 2^31.
void LaunchRowSums(Stream& stream, const float* x, std::int64_t rows, std::int64_t length);

// Enqueues `count` dot products of vectors of n floats each, with cuBLAS's batched matrix product
// in f32. a and b each hold `count` vectors, one after the other. REQUIRES: HasPeers().
void LaunchDots(Stream& stream, const float* a, const float* b, std::int64_t count, std::int64_t n);

}  // namespace tessera::bench
