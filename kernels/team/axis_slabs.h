// How a long reduction along the outermost axis is cut for several devices: into slabs of rows, of
// which each device folds some to a partial result for every column. The device of the request
// folds those of all slabs, from first to last:
//
//     x [length, inner]           partials [slabs, inner]      out [inner]
//     rows   0 .. r - 1      ->   slab 0                 --+
//     rows   r .. 2 r - 1    ->   slab 1                 --+->
//     ..                          ..                       |
//     rows that are left     ->   the last slab          --+
//
// A device reads the rows that it has, but for half a slab at either end, and partial results are
// what travels. Cutting columns instead would have each device read most of its columns from the
// others. The slabs depend on the problem alone, so that any division of them has the same bits,
// that of one device too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/problem/strategy.h"
#include "kernels/same_bits/reduction.h"

namespace tessera {

// As many GPUs as a host has, mostly: every slab costs one GPU alone a little.
inline constexpr std::int64_t kSlabs = 8;
// Bytes of an array that is worth a second launch.
inline constexpr std::int64_t kLeastSlabbedBytes = std::int64_t{1} << 30;
// What partial results take is at most the array's size divided by this: little to write and to
// pass on, and within the default --scratch-limit of a device, 1/16 of what its buffers may take,
// where eight of them have the array.
inline constexpr std::int64_t kArrayOverPartials = 128;

// Rows of a slab; 0: the problem is not cut. Behind kSlabs slabs of so many rows may come one of
// those that are left.
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
