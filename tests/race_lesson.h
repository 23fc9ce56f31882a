// Two kernels that beginners write and that are wrong, to be watched failing. Not rows of the
// table.
#pragma once

#include <cstdint>

#include "kernels/device.h"

namespace tessera::test {

// Both run with this many threads per block.
inline constexpr unsigned kRaceBlock = 256;

// "a . b" by a thread an element, of which each does c[0] += a[i] * b[i]. REQUIRES: a CUDA stream,
// device memory, n > 0.
float RacyDot(const float* a, const float* b, std::int64_t n, Stream& stream);

// "The sum of x" by `blocks` blocks whose threads stride through x and all write what they have to
// the one cell of their block; the host adds the cells. REQUIRES: as above.
double RacySum(const double* x, std::int64_t n, unsigned blocks, Stream& stream);

}  // namespace tessera::test
