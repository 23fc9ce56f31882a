// Calls of the vendor's libraries on the same operands, as their documentation recommends. The
// strategies `library` and `cublas` are not always a fair comparison: the reductions of `library`
// accumulate in double, and `cublas` takes the algorithm that the library's own heuristics rank
// first. In these cases, a claim of being faster than the library refers to the calls in this file.
#pragma once

#include <cstdint>

#include "kernels/device/device.h"

namespace tessera::bench {

enum class Peer { kCubSum, kCubMax, kCubArgMax, kCublasNrm2, kCublasAsum };

// Enqueues the reduction of n floats in device memory on a stream of a CUDA device; results are
// written to scratch memory. CUB's sums are the same from run to run on one device; this is the
// only deterministic mode of the CUB version that comes with CUDA 13.0. REQUIRES: HasPeers().
void LaunchPeer(Peer peer, Stream& stream, const float* x, std::int64_t n);

// Does the same for the sums of `rows` rows of `length` floats each, with CUB's segmented
// reduction. REQUIRES: HasPeers(); rows and length below 2^31.
void LaunchRowSums(Stream& stream, const float* x, std::int64_t rows, std::int64_t length);

// Enqueues `count` dot products of vectors of n floats each, with cuBLAS's batched matrix product
// in f32. a and b each hold `count` vectors, one after the other. REQUIRES: HasPeers().
void LaunchDots(Stream& stream, const float* a, const float* b, std::int64_t count, std::int64_t n);

// Whether this host has the libraries.
bool HasPeers();

}  // namespace tessera::bench
