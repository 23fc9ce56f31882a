// What product_bench needs from CUDA. Standard library only.
#pragma once

#include <cstdint>

#include "kernels/base/dtype.h"

namespace tessera::bench {

// How b gets to a GPU that does not hold it. kernels/cuda/team/shares.h describes the variants.
enum class Way { kChosen, kBeforehand, kRemote };
void SetWay(Way way);

// Times a square product of f32 or f64 that cuBLASXt computes on the first `count` GPUs. Returns
// the time of the fastest round, measured with the host's clock. a and b are first copied to other
// memory on the first GPU. Returns 0 if the library is missing or fails.
double XtMicroseconds(DType dtype, std::int64_t side, const void* a, const void* b, int count,
                      int rounds);

}  // namespace tessera::bench
