// What product_bench needs from CUDA. Standard library only.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"

namespace tessera::bench {

// How b gets to a GPU that does not have it: kernels/cuda/team/shares.cuh.
enum class Way { kChosen, kBeforehand, kRemote };
void SetWay(Way way);

// Returns the best time over some rounds of a square product of f32 or f64 by cuBLASXt on the first
// `count` GPUs, by the host's clock. a and b are copied to memory of the first GPU. Returns 0 if
// there is no such library or it fails.
double XtMicroseconds(DType dtype, std::int64_t side, const void* a, const void* b, int count,
                      int rounds);

}  // namespace tessera::bench
