// Reduce along the middle axis of x[outer, length, inner]: rows of a matrix (inner = 1), columns
// (outer = 1), or any consecutive axes of an array. Three questions decide the speed. Do adjacent
// threads read adjacent memory? Does every thread have enough loads in flight? Does every SM have
// enough threads?
//
// A thread loads 16-byte vectors, eight of them before it uses the first
// (kernels/cuda/common/vectors.cuh). A block of 256 threads is a box: `width` threads across
// adjacent vectors of outputs, `height` threads along the axis and, if these are fewer than 256,
// `depth` threads over consecutive values of outer. All three are powers of two.
//
//   columns (inner > 1)                     rows (inner = 1): width 1, vectors run along the axis
//
//          across: vectors of outputs              along the axis
//   axis   [t0   ] [t1   ] [t2   ]                 [t0   ] [t1   ] [t0   ] [t1   ]   row 0
//     |    [t3   ] [t4   ] [t5   ]                 [t2   ] [t3   ] [t2   ] [t3   ]   row 1
//     v    [t0   ] [t1   ] [t2   ]
//
// The height is chosen so that a thread has at most 8 or 16 vectors. Once the height is a whole
// block, each thread takes more vectors. A small number of outputs would leave most of the GPU
// idle, so the axis is then cut into segments with one block each. A block stores the values of its
// segment in device memory and increments the ticket of its outputs. The last block to increment
// the ticket folds all segments in index order and resets the ticket. One launch is therefore
// enough, without atomics on values. The cut depends only on the shape and the element size, so the
// same input gives the same bits on every GPU.
//
// If length and inner are so small that the elements for one value of outer have at most
// kShortBytes bytes (for example pairs of numbers), one thread per value of outer would have only
// one small load in flight. Instead, a block copies a contiguous run of memory to shared memory in
// vectors, and each of its threads folds whole outputs from there. The loads and stores of adjacent
// threads are then adjacent in memory.
//
// If the axis is the outermost one of an array of more than 1 GiB, one launch folds slabs of rows
// into partial results, and another launch folds the partial results (kernels/team/axis_slabs.h).
// If the array is distributed over several GPUs, each GPU folds the slabs that it has.
//
// Cost for 1024 x 1024, f32: 4 MiB read, 4 KiB written, one launch. Along rows there is a block for
// every 2 rows, with 2 vectors per thread. Along columns there are 32 tiles of 8 vectors in 4
// segments, whose values (32 KiB) are written and read again.
//
// The kernels are correct for any extents, including 0 (length 0 gives identities), and for any
// alignment: a thread whose vectors are not aligned assembles them from aligned vectors or, at the
// ends of the array, from single elements. Long f32 axes are folded in single-precision chains of
// at most 64 elements, and the values of the chains are folded in double. If a chain exceeds the
// range of f32, a second launch adds in double.
#include <algorithm>

#include "kernels/cuda/reduce_axes/fold_axis.cuh"
#include "kernels/cuda/reduce_axes/fold_short.cuh"
#include "kernels/cuda/reduce_axes/launch.h"

namespace tessera::axes {
namespace {

// Returns the number of steps in Fold::Wide after a thread's chains, in one launch.
std::int64_t WideSteps(const ReduceAxesProblem& p, const Plan& plan) {
  std::int64_t steps = WalkSteps(plan.steps, SizeOf(p.dtype)) + plan.height_bits;
  // A thread folds at most one value per segment. Then the threads' values are folded.
  if (plan.segments > 1) steps += plan.segments + CeilDiv(plan.segments, kMaxChain) + kBlockBits;
  return steps;
}

// The steps from which the bound and the cost of a problem are computed.
struct Steps {
  std::int64_t chain;  // steps of a thread in Fold::Acc
  std::int64_t wide;   // steps after those, in Fold::Wide
};
Steps StepsOf(const ReduceAxesProblem& p) {
  const auto of = [](const ReduceAxesProblem& launch, const Plan& plan) {
    return Steps{plan.steps, WideSteps(launch, plan)};
  };
  if (IsShort(p)) return {1, p.length};
  if (SlabRows(p) == 0) return of(p, MakePlan(p));
  const Steps slabs = of(Slabs(p), MakeSlabPlan(Slabs(p))), rest = of(Rest(p), MakePlan(Rest(p)));
  return {std::max(slabs.chain, rest.chain), std::max(slabs.wide, rest.wide) + SlabCount(p)};
}

// Returns the number of bytes that a launch needs for the values of segments.
std::uint64_t SegmentBytes(const ReduceAxesProblem& p, const Plan& plan) {
  if (plan.segments == 1) return 0;
  const std::int64_t vector = kVectorBytes / static_cast<std::int64_t>(SizeOf(p.dtype));
  const std::int64_t outputs = plan.rows ? 1 : vector << plan.width_bits;
  return static_cast<std::uint64_t>(plan.tiles * plan.segments * outputs) *
         WideBytes(p.op, p.dtype);
}

// Returns the scratch memory for slabs. Without slabs, scratch memory is negligible.
std::uint64_t Scratch(const ReduceAxesProblem& p) {
  if (SlabRows(p) == 0) return 0;
  return static_cast<std::uint64_t>(SlabCount(p) * p.inner) * WideBytes(p.op, p.dtype) +
         SegmentBytes(Slabs(p), MakeSlabPlan(Slabs(p))) + SegmentBytes(Rest(p), MakePlan(Rest(p)));
}

double Roundoff(const ReduceAxesProblem& p) {
  const Steps steps = StepsOf(p);
  return ReduceRoundoff(p.op, p.dtype, p.length,
                        {std::min<std::int64_t>(steps.chain, kMaxChain), steps.wide});
}

Cost CostOf(const ReduceAxesProblem& p) {
  const bool cut = SlabRows(p) > 0;
  const Plan plan = cut ? MakeSlabPlan(Slabs(p)) : MakePlan(p);
  const auto outputs = static_cast<std::uint64_t>(p.outer * p.inner);
  const auto elements = outputs * static_cast<std::uint64_t>(p.length);
  const auto segments = static_cast<std::uint64_t>(plan.segments);
  const std::uint64_t wide = WideBytes(p.op, p.dtype);
  const std::uint64_t partials = cut ? static_cast<std::uint64_t>(SlabCount(p) * p.inner) : outputs;
  const Steps steps = StepsOf(p);
  return {.bytes = elements * SizeOf(p.dtype) + outputs * SizeOf(ResultDType(p.op, p.dtype)) +
                   (segments > 1 ? 2 * segments * partials * wide : 0) +
                   (cut ? 2 * partials * wide : 0),
          .flops = elements,
          .atomics = segments > 1 ? segments : 0,
          .depth = static_cast<std::uint64_t>(steps.chain + steps.wide)};
}

void EnqueueShared(const ReduceAxesProblem& p, std::span<const TeamShare> shares, Stream& stream) {
  if (!p.continues) stream.result()->integer = 0;
  DispatchDType(p.dtype, [&](auto zero) { Launch<decltype(zero)>(p, shares, Cuda(stream)); });
}
void Enqueue(const ReduceAxesProblem& p, Stream& stream) { EnqueueShared(p, {}, stream); }

bool LeftRange(const ReduceAxesProblem&, Stream& stream) { return stream.result()->integer != 0; }

void EnqueueWide(const ReduceAxesProblem& p, Stream& stream) {
  DispatchDType(p.dtype, [&](auto zero) { LaunchWide<decltype(zero)>(p, Cuda(stream)); });
}
void EnqueueWideAlone(const ReduceAxesProblem& p, std::span<const TeamShare>, Stream& stream) {
  EnqueueWide(p, stream);
}

}  // namespace
}  // namespace tessera::axes

namespace tessera {

extern constexpr Strategy<ReduceAxesProblem> kReduceAxesAxis = {
    .name = "axis",
    .summary = "16-byte loads, blocks laid out according to the shape, long axes cut into segments",
    .source =
        "tree reductions from the notes on CUDA reductions, along one axis of an array; "
        "the last block finishes as in the CUDA sample threadFenceReduction",
    .backend = Backend::kCuda,
    .deterministic = true,
    .roundoff = axes::Roundoff,
    .cost = axes::CostOf,
    .launch = axes::Enqueue,
    .wide = {.left_range = axes::LeftRange, .launch = axes::EnqueueWide},
    .shared = {.launch = axes::EnqueueShared, .launch_wide = axes::EnqueueWideAlone},
    .scratch = axes::Scratch,
};

}  // namespace tessera
