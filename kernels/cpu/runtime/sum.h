// A parallel sum on the host, for strategies of other devices that finish on the host.
#pragma once

#include <cstdint>

#include "kernels/base/element.h"
#include "kernels/device/device.h"

namespace tessera {

// Returns the sum of x[0, n), computed by all cores, in chunks and chains that depend only on n.
// Once the stream has been stopped, the result is unspecified. T: float, double or std::int64_t.
template <class T>
WideOf<T> ParallelSum(const T* x, std::int64_t n, const Stream& stream);

// Returns the maximum number of additions that one element passes through.
std::int64_t ParallelSumDepth(std::int64_t n);

}  // namespace tessera
