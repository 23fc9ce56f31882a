// The CUDA implementations of the ceilings.
#pragma once

#include "kernels/bench/ceilings.h"

namespace tessera::bench {

void LaunchReadCuda(Stream& stream, const void* data, std::size_t bytes, void* sink);
void LaunchCopyCuda(Stream& stream, void* to, const void* from, std::size_t bytes);
double LaunchFmaCuda(Stream& stream, bool double_precision, void* sink);

}  // namespace tessera::bench
