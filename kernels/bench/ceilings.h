// The maximum rates of the device, measured in the same run as the strategies. Every "% of the
// ceiling" refers to these.
#pragma once

#include <cstddef>

#include "kernels/device/device.h"

namespace tessera::bench {

// Each function enqueues one pass on a stream of either kind of device. It works on device memory
// aligned to 16 bytes, and bytes is a multiple of 16. On the CPU a pass runs on as many threads as
// OpenMP provides.

// Reads every byte once, with many 16-byte loads in flight; writes only 16 bytes, to sink.
void LaunchRead(Stream& stream, const void* data, std::size_t bytes, void* sink);
// Reads and writes every byte once; on a CUDA device this is the driver's own copy.
void LaunchCopy(Stream& stream, void* to, const void* from, std::size_t bytes);
// Computes fused multiply-adds of floats or doubles in registers. Returns the number of operations,
// which is two per multiply-add.
double LaunchFma(Stream& stream, bool double_precision, void* sink);

}  // namespace tessera::bench
