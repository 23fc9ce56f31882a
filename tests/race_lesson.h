// Two wrong kernels of a kind that beginners write. They are not strategies of the table.
#pragma once

#include <cstdint>

#include "kernels/device/device.h"

namespace tessera::test {

// The number of threads per block in both kernels.
inline constexpr unsigned kRaceBlock = 256;

// Each thread does c[0] += a[i] * b[i]. REQUIRES: a CUDA stream, device memory, n > 0.
float RacyDot(const float* a, const float* b, std::int64_t n, Stream& stream);

// All threads of a block write their sums to the block's single cell. REQUIRES: as above.
double RacySum(const double* x, std::int64_t n, unsigned blocks, Stream& stream);

}  // namespace tessera::test
