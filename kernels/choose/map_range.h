// Computes parts of an expression's result, for operations that take their elements from an
// expression.
#pragma once

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Enqueues the computation of elements [first, first + count) of the problem's result, counted in
// row-major order, with the default strategy. The elements are written to out, and problem.out is
// ignored. The bits do not depend on the range. Throws DeviceError.
void LaunchMapRange(const MapProblem& problem, std::int64_t first, std::int64_t count, void* out,
                    Stream& stream);

}  // namespace tessera
