// How a long reduction along the outermost axis is cut for several devices. Each device folds some
// slabs of rows, each to a partial result for every column. The device of the request then folds
// the partial results of all slabs, from first to last:
//
//     x [length, inner]           partials [slabs, inner]      out [inner]
//     rows   0 .. r - 1      ->   slab 0                 --+
//     rows   r .. 2 r - 1    ->   slab 1                 --+->
//     ..                          ..                       |
//     remaining rows         ->   the last slab          --+
//
// A device reads its own rows, except for up to half a slab at either end, and only partial results
// travel. If columns were cut instead, each device would read most of its columns from the others.
// The slabs depend on the problem alone, so that any division of them, including one device with
// all slabs, gives the same bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/problem/strategy.h"
#include "kernels/same_bits/reduction.h"

namespace tessera {

// Usually the number of GPUs of a host. Every slab costs a single GPU a little.
inline constexpr std::int64_t kSlabs = 8;
// The smallest array, in bytes, that is worth a second launch.
inline constexpr std::int64_t kLeastSlabbedBytes = std::int64_t{1} << 30;
// Partial results take at most the array's size divided by this. That is little to write and to
// transfer, and it stays within the default --scratch-limit of a device, 1/16 of what its buffers
// may take, when eight devices share the array.
inline constexpr std::int64_t kArrayOverPartials = 128;

// Returns the rows of a slab; 0 if the problem is not cut. kSlabs slabs of this size may be
// followed by one with the remaining rows.
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
