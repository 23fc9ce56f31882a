// A parallel sum on the host, for strategies of other devices that finish there.
#pragma once

#include <cstdint>

#include "kernels/base/element.h"
#include "kernels/device/device.h"

namespace tessera {

// The sum of x[0, n), over all cores, in chunks and chains that n alone decides; any number once
// the stream has been stopped. T: float, double or std::int64_t.
template <class T>
WideOf<T> ParallelSum(const T* x, std::int64_t n, const Stream& stream);

// Additions that one element of it passes at most.
std::int64_t ParallelSumDepth(std::int64_t n);

}  // namespace tessera
