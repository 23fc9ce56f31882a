// The ceilings of one kind of device each.
#pragma once

#include "tests/bench/ceilings.h"

namespace tessera::bench {

void LaunchReadCuda(Lane& lane, const void* data, std::size_t bytes, void* sink);
void LaunchCopyCuda(Lane& lane, void* to, const void* from, std::size_t bytes);
double LaunchFmaCuda(Lane& lane, bool double_precision, void* sink);

}  // namespace tessera::bench
