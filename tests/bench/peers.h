// What the vendor's libraries do with the same operands, called as their documents call them: what
// a claim of being faster is measured against, where the library's row of the table does more (the
// reductions of `library` accumulate in double).
#pragma once

#include <cstdint>

#include "kernels/device.h"

namespace tessera::bench {

enum class Peer { kCubSum, kCubMax, kCubArgMax };

// Enqueues the reduction of n floats in device memory on a lane of a CUDA device; results go to
// scratch memory.
void LaunchPeer(Peer peer, Lane& lane, const float* x, std::int64_t n);

}  // namespace tessera::bench
