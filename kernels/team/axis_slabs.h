// How a long reduction along the outermost axis is divided among several devices. Each device folds
// some slabs of rows; every slab gives one partial result per column. The device that runs the
// request then folds the partial results of all slabs, from first to last:
//
//     x [length, inner]           partials [slabs, inner]      out [inner]
//     rows   0 .. r - 1      ->   slab 0                 --+
//     rows   r .. 2 r - 1    ->   slab 1                 --+->
//     ..                          ..                       |
//     remaining rows         ->   the last slab          --+
//
// A device reads only rows that it holds, except for up to half a slab at either end, and only
// partial results are transferred. If the columns were divided instead, each device would read most
// of its columns from the other devices. The slabs depend only on the problem, so every assignment
// of slabs to devices gives the same bits, including one device with all slabs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/problem/strategy.h"
#include "kernels/same_bits/reduction.h"

namespace tessera {

// The number of slabs, which is usually the number of GPUs in a host. If a single GPU does all the
// work, every slab adds a small cost.
inline constexpr std::int64_t kSlabs = 8;
// The smallest array, in bytes, that is folded in slabs, which take a second launch.
inline constexpr std::int64_t kLeastSlabbedBytes = std::int64_t{1} << 30;
// Partial results take at most the array's size divided by this number, so that writing and
// transferring them costs little. If eight devices share the array, the results also fit in the
// default --scratch-limit of one device, which is 1/16 of the limit on its buffers.
inline constexpr std::int64_t kArrayOverPartials = 128;

// Returns the number of rows in a slab, or 0 if the problem is not divided into slabs. kSlabs slabs
// of this size may be followed by one with the remaining rows.
inline std::int64_t SlabRows(const ReduceAxesProblem& p) {
  if (std::max(p.outer, p.outer_of_all) != 1 || p.inner_of_all != 0 || p.inner < 2) return 0;
  const std::int64_t column = p.length * static_cast<std::int64_t>(SizeOf(p.dtype));
  const bool large = column > kLeastSlabbedBytes / p.inner;
  const std::int64_t partials = (kSlabs + 1) * static_cast<std::int64_t>(WideBytes(p.op, p.dtype));
  return large && partials <= column / kArrayOverPartials ? p.length / kSlabs : 0;
}
// REQUIRES: SlabRows(p) > 0.
inline std::int64_t SlabCount(const ReduceAxesProblem& p) {
  return kSlabs + (p.length % kSlabs != 0);
}

}  // namespace tessera
