// Reduce along the middle axis of x[outer, length, inner]: rows of a matrix (inner = 1), columns
// (outer = 1), or any axes of an array that are neighbours. Three questions decide: do neighbouring
// threads read neighbouring elements, has every thread enough to do, and has every multiprocessor.
//
// Short axes (length <= 32), and rows up to 1024: a group of 1 to 32 lanes of a warp an output.
// With inner > 1 one lane an output does: its neighbours have the neighbouring outputs. Along a row
// the lanes of a group take neighbouring elements and fold by shuffles. No barrier, and any number
// of outputs fills the chip.
//
// Long axes: a block a tile of up to 32 neighbouring outputs. Its threads form a rectangle, as wide
// as the tile, which takes as many steps of the axis at once as it has rows: with inner = 1 that is
// a block a row, with inner >= 32 every warp reads 32 columns, and in between a warp reads several
// short pieces that lie one behind the other. The columns of the rectangle are folded by a tree in
// shared memory. When there are fewer tiles than the chip can run blocks, the axis is cut into
// segments, a block each, and a second kernel, the one for short axes, folds their partial values.
//
// No atomics, and every fold in an order that shape and device decide: the same input gives the
// same bits.
//
// Cost for 1024 x 1024, f32: 4 MiB read, 4 KiB written. Along rows one launch of 128 blocks without
// a barrier. Along columns 32 tiles in 16 segments, 4 barriers a block, 128 KiB written and read
// again, and a second launch.
//
// Right for any extents, 0 included (length 0: identities), and any alignment: loads are scalar.
// For long f32 axes: chains of at most 64 in single precision, the rest double.
#include <algorithm>
#include <bit>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

constexpr int kBlock = 256;
constexpr std::int64_t kShortAxis = 32;
constexpr std::int64_t kShortRow = 1024;
// Elements of a row that a lane takes before another lane joins.
constexpr std::int64_t kLeastPerLane = 4;
// Blocks of 256 threads that one multiprocessor runs at once.
constexpr std::int64_t kBlocksPerMultiprocessor = 8;

// Folds x[outer, length, inner] over length to out[outer, inner], a group of 2^lane_bits lanes an
// output. x holds elements or, with kPartials, values of segments that are already folded. count:
// how many elements each output stands for.
template <class F, bool kPartials, class In>
__global__ void __launch_bounds__(kBlock)
    FoldByGroups(const In* x, std::int64_t outputs, std::int64_t length, std::int64_t inner,
                 int lane_bits, std::int64_t count, typename F::Out* out) {
  using Wide = typename F::Wide;
  const int lanes = 1 << lane_bits;
  const std::int64_t output = GridThread() >> lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  Wide value = F::template Identity<Wide>();
  if (output < outputs) {
    const In* axis = x + output / inner * length * inner + output % inner;
    value = FoldThread<F>(lane, length, lanes, [=](std::int64_t j) {
      if constexpr (kPartials) {
        return axis[j * inner];
      } else {
        return F::Load(axis[j * inner], j);
      }
    });
  }
  // Blocks are whole warps, and every lane takes part. What a lane gets from the next group or from
  // beyond the warp stays in lanes that the first of its group no longer reads.
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    value = F::Combine(value, ShuffleDown(kFullMask, value, offset));
  if (lane == 0 && output < outputs) out[output] = F::FinishAxis(value, count);
}

// How the threads of a block lie over tiles of neighbouring outputs, and how the axis is cut.
struct Tiling {
  int width_bits;  // a tile is 2^width_bits outputs wide, its block kBlock >> width_bits high
  std::int64_t row_tiles;  // tiles along inner
  std::int64_t segments;   // pieces of the axis
  std::int64_t segment;    // steps of the axis in each; the last ones may have fewer or none
};

Tiling MakeTiling(const ReduceAxesProblem& p, std::int64_t concurrent_blocks) {
  const std::int64_t width = std::min<std::int64_t>(
      static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(p.inner))), kWarpSize);
  Tiling tiling{};
  tiling.width_bits = CeilLog2(width);
  tiling.row_tiles = CeilDiv(p.inner, width);
  const std::int64_t tiles = p.outer * tiling.row_tiles;
  // A segment keeps every thread of its block busy for one batch of loads at least.
  const std::int64_t least_segment = kBlock / width * kBatch;
  tiling.segments = std::clamp<std::int64_t>(CeilDiv(concurrent_blocks, tiles), 1,
                                             std::max<std::int64_t>(1, p.length / least_segment));
  tiling.segment = CeilDiv(p.length, tiling.segments);
  return tiling;
}

// Folds x[outer, length, inner] over length. One segment: to out[outer, inner]; else to
// partials[outer, inner, segments].
template <class F, class T>
__global__ void __launch_bounds__(kBlock)
    FoldByTiles(const T* x, std::int64_t length, std::int64_t inner, Tiling tiling,
                typename F::Wide* partials, typename F::Out* out) {
  using Wide = typename F::Wide;
  __shared__ Wide cells[kBlock];
  const int thread = static_cast<int>(threadIdx.x);
  const int width = 1 << tiling.width_bits;
  const int height = kBlock >> tiling.width_bits;
  const int y = thread >> tiling.width_bits;
  const std::int64_t segment = blockIdx.x % tiling.segments;
  const std::int64_t tile = blockIdx.x / tiling.segments;
  const std::int64_t row = tile / tiling.row_tiles;
  const std::int64_t column = tile % tiling.row_tiles * width + (thread & (width - 1));

  Wide value = F::template Identity<Wide>();
  if (column < inner) {
    const T* axis = x + row * length * inner + column;
    const std::int64_t begin = segment * tiling.segment;
    const std::int64_t end = min(length, begin + tiling.segment);
    value = FoldThread<F>(begin + y, end, height,
                          [=](std::int64_t j) { return F::Load(axis[j * inner], j); });
  }
  cells[thread] = value;
  __syncthreads();  // the rectangle is complete
  for (int half = height / 2; half > 0; half /= 2) {
    if (y < half) cells[thread] = F::Combine(cells[thread], cells[thread + half * width]);
    __syncthreads();  // the upper half has been read, the lower half is written
  }
  if (y != 0 || column >= inner) return;
  const std::int64_t output = row * inner + column;
  if (tiling.segments == 1) {
    out[output] = F::FinishAxis(cells[thread], length);
  } else {
    partials[output * tiling.segments + segment] = cells[thread];
  }
}

template <class F, bool kPartials, class In>
void LaunchGroups(const In* x, std::int64_t outputs, std::int64_t length, std::int64_t inner,
                  std::int64_t count, typename F::Out* out, cudaStream_t stream) {
  // Lanes that share an output read along a row; with inner > 1 they would be inner elements apart.
  const int lane_bits =
      inner == 1 ? std::min(CeilLog2(CeilDiv(length, kLeastPerLane)), CeilLog2(kWarpSize)) : 0;
  const auto blocks = static_cast<unsigned>(CeilDiv(outputs << lane_bits, kBlock));
  FoldByGroups<F, kPartials>
      <<<blocks, kBlock, 0, stream>>>(x, outputs, length, inner, lane_bits, count, out);
  CUDA_CHECK_LAUNCH(FoldByGroups);
}

template <ReduceOp op, class T>
void Run(const ReduceAxesProblem& p, CudaLane& lane) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  const auto* x = static_cast<const T*>(p.x);
  auto* out = static_cast<typename F::Out*>(p.out);
  const std::int64_t outputs = p.outer * p.inner;
  if (outputs == 0) return;
  if (p.length <= kShortAxis || (p.inner == 1 && p.length <= kShortRow)) {
    LaunchGroups<F, false>(x, outputs, p.length, p.inner, p.length, out, lane.stream());
    return;
  }
  const Tiling tiling =
      MakeTiling(p, kBlocksPerMultiprocessor * lane.device().info().multiprocessors);
  Wide* partials = nullptr;
  if (tiling.segments > 1) {
    partials = static_cast<Wide*>(
        lane.Scratch(static_cast<std::size_t>(outputs * tiling.segments) * sizeof(Wide)));
  }
  const auto blocks = static_cast<unsigned>(p.outer * tiling.row_tiles * tiling.segments);
  FoldByTiles<F><<<blocks, kBlock, 0, lane.stream()>>>(x, p.length, p.inner, tiling, partials, out);
  CUDA_CHECK_LAUNCH(FoldByTiles);
  if (partials != nullptr) {
    LaunchGroups<F, true>(static_cast<const Wide*>(partials), outputs, tiling.segments, 1, p.length,
                          out, lane.stream());
  }
}

// Holds for every tiling, which depends on the device: a chain in Fold::Acc, then any order.
double Roundoff(const ReduceAxesProblem& p) {
  return ReduceRoundoff(p.op, p.dtype, p.length, std::min<std::int64_t>(p.length, kMaxChain),
                        p.length);
}

Cost CostOf(const ReduceAxesProblem& p) {
  const auto outputs = static_cast<std::uint64_t>(p.outer * p.inner);
  const auto elements = outputs * static_cast<std::uint64_t>(p.length);
  return {.bytes = elements * SizeOf(p.dtype) + outputs * SizeOf(ResultDType(p.op, p.dtype)),
          .flops = elements,
          .atomics = 0,
          .depth = static_cast<std::uint64_t>(std::min(p.length, kShortAxis) + CeilLog2(p.length))};
}

void Enqueue(const ReduceAxesProblem& p, Lane& lane) {
  DispatchDType(p.dtype, [&](auto zero) {
    DispatchOp(p.op, [&](auto op) { Run<op(), decltype(zero)>(p, Cuda(lane)); });
  });
}

}  // namespace

extern const Strategy<ReduceAxesProblem> kReduceAxesAxis;
constexpr Strategy<ReduceAxesProblem> kReduceAxesAxis = {
    .name = "axis",
    .summary = "lanes, warps or blocks an output by the shape, long axes cut into segments",
    .source = "tree reductions of the notes on CUDA reductions, laid along one axis of an array",
    .backend = Backend::kCuda,
    .dtypes = AllDTypes(),
    .min_compute_capability = kBaseComputeCapability,
    .deterministic = true,
    .limits = {.block_size = {}, .grid_size = {}, .items_per_thread = {}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = nullptr,
};

}  // namespace tessera
