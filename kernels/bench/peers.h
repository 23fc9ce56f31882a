// The vendor's libraries on the same operands, called as their documentation says. Claims of being
// faster are measured against these calls where the library's strategy does more (the reductions of
// `library` accumulate in double) or less (`cublas` takes the algorithm that the library's own
// heuristics rank first).
#pragma once

#include <cstdint>

#include "kernels/device/device.h"

namespace tessera::bench {

enum class Peer { kCubSum, kCubMax, kCubArgMax, kCublasNrm2, kCublasAsum };

// Enqueues the reduction of n floats in device memory on a stream of a CUDA device; results go to
// scratch memory. CUB's sums are the same from run to run on one device, the only deterministic
// mode of the CUB that comes with CUDA 13.0. REQUIRES: HasPeers().
void LaunchPeer(Peer peer, Stream& stream, const float* x, std::int64_t n);

// Likewise for the sums of `rows` rows of `length` floats each, by CUB's segmented reduction.
// REQUIRES: HasPeers(); rows and length below 2^31.
void LaunchRowSums(Stream& stream, const float* x, std::int64_t rows, std::int64_t length);

// Enqueues the dot products of `count` pairs of vectors of n floats each, stored one pair after the
// other, by cuBLAS's batched matrix product, in f32. REQUIRES: HasPeers().
void LaunchDots(Stream& stream, const float* a, const float* b, std::int64_t count, std::int64_t n);

// Whether this host has the libraries.
bool HasPeers();

}  // namespace tessera::bench
