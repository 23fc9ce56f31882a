// How a launch divides a reduction along an axis: the box of threads that a block is, the tiles of
// outputs, and the segments of the axis.
//
// Invariant: a plan depends only on the shape of the whole problem and the element size, so the
// bits are the same for any share of the problem and on every GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/vectors.cuh"

namespace tessera::axes {

inline constexpr int kBlockBits = 8;
inline constexpr int kBlock = 1 << kBlockBits;
// A block along columns is at least 8 vectors wide if there are that many. Eight vectors are a
// whole cache line of 128 bytes. In a wider block, of up to 32 vectors (a whole warp), fewer values
// are folded across threads. A block is widened only while there are 2^kTilesBits blocks side by
// side, because fewer blocks would require more segments.
inline constexpr int kLeastWidthBits = 3;
inline constexpr int kMostWidthBits = 5;
inline constexpr int kTilesBits = 5;
// The work is divided among this many threads before a thread gets more than one vector. An H200
// runs twice as many threads at the same time.
inline constexpr std::int64_t kThreads = std::int64_t{1} << 17;
// The number of blocks that a cut of the axis aims for. It is the number that 132 SMs run at the
// same time under the launch bounds of the kernels, for sums of elements of `size` bytes. Both
// numbers are constants, so that bits do not depend on the device.
constexpr std::int64_t BlocksWanted(std::int64_t size) { return 132 * (size < 4 ? 3 : 4); }
// The minimum number of vectors per thread in a segment, so that a thread has a full batch of loads
// in flight.
inline constexpr std::int64_t kLeastSteps = 8;
// How blocks are laid out over the array, and how the axis is cut.
struct Plan {
  bool rows;             // inner = 1: vectors run along the axis
  int width_bits;        // log2 of the number of threads across vectors of outputs
  int height_bits;       // log2 of the number of threads along the axis
  std::int64_t across;   // tiles along inner
  std::int64_t tiles;    // in total
  std::int64_t steps;    // vectors per thread in one segment
  std::int64_t segment;  // elements of the axis in one segment
  std::int64_t segments;
};

// Returns the plan for `outer` values of outer; a launch may have a different number of them.
// most_in_column: the maximum number of vectors of a column per thread before several threads share
// the column.
inline Plan MakePlan(const ReduceAxesProblem& p, std::int64_t outer,
                     std::int64_t most_in_column = 2 * kVectorsInFlight) {
  const std::int64_t vector = kVectorBytes / static_cast<std::int64_t>(SizeOf(p.dtype));
  Plan plan{};
  const std::int64_t inner = std::max(p.inner, p.inner_of_all);
  plan.rows = inner == 1;
  const std::int64_t steps = plan.rows ? CeilDiv(p.length, vector) : p.length;
  const std::int64_t columns = CeilDiv(inner, vector);  // vectors of outputs
  // The maximum number of vectors per thread. A short row is read by few lanes, each of which takes
  // several of its vectors. A column of up to two batches of loads is read by one thread.
  const std::int64_t most = !plan.rows ? most_in_column : steps <= 128 ? 4 : kVectorsInFlight;
  const std::int64_t all = outer * columns * steps;
  const std::int64_t each = std::clamp<std::int64_t>(all / kThreads, 1, most);
  const int column_bits = std::min(CeilLog2(columns), kBlockBits);
  const int least_width =
      std::clamp(CeilLog2(columns) - kTilesBits, kLeastWidthBits, kMostWidthBits);
  plan.height_bits =
      std::min(CeilLog2(CeilDiv(steps, each)), kBlockBits - std::min(column_bits, least_width));
  plan.width_bits = std::min(column_bits, kBlockBits - plan.height_bits);
  const std::int64_t depth = kBlock >> (plan.width_bits + plan.height_bits);
  const std::int64_t width = std::int64_t{1} << plan.width_bits;
  plan.across = CeilDiv(CeilDiv(p.inner, vector), width);
  plan.tiles = plan.across * CeilDiv(p.outer, depth);
  plan.steps = CeilDiv(steps, std::int64_t{1} << plan.height_bits);
  // The block that folds the segments needs a thread for each output of one tile.
  const bool whole =
      plan.tiles == 0 || depth > 1 || (!plan.rows && vector << plan.width_bits > kBlock);
  const std::int64_t cut =
      whole ? 1
            : std::clamp<std::int64_t>(BlocksWanted(kVectorBytes / vector) /
                                           (CeilDiv(columns, width) * CeilDiv(outer, depth)),
                                       1, std::max<std::int64_t>(1, plan.steps / kLeastSteps));
  plan.steps = CeilDiv(plan.steps, cut);
  plan.segment = (plan.steps << plan.height_bits) * (plan.rows ? vector : 1);
  plan.segments =
      std::max<std::int64_t>(1, CeilDiv(p.length, std::max<std::int64_t>(1, plan.segment)));
  return plan;
}

inline Plan MakePlan(const ReduceAxesProblem& p) {
  return MakePlan(p, std::max(p.outer, p.outer_of_all));
}
// Returns the plan for slabs. It has enough segments even if each GPU has only one slab. It has up
// to 64 vectors per thread, so that blocks have less to fold for each of the many results
// (docs/notebook.md, "Columns").
inline Plan MakeSlabPlan(const ReduceAxesProblem& slabs) {
  return MakePlan(slabs, /*outer=*/1, /*most_in_column=*/64);
}

}  // namespace tessera::axes
