// Parts of what an expression computes, for the operations that take their elements from one.
#pragma once

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Enqueues elements [first, first + count) of the problem's result, counted in row-major order, by
// the strategy that is chosen for it; they go to out, whatever the problem says. The same bits
// whatever the range. Throws DeviceError.
void LaunchMapRange(const MapProblem& problem, std::int64_t first, std::int64_t count, void* out,
                    Stream& stream);

}  // namespace tessera
