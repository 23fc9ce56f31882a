// Matmul by tiles of tiles: block, warp, thread, each in the memory that belongs to it.
//
// Against `double_buffered`, in which shared memory, not arithmetic, sets the pace (64
// multiply-adds for four loads of 16 bytes):
// - A level between block and thread. A warp computes a rectangle of 64 x 64 on its own, a thread
//   8 x 16 in it: 128 multiply-adds for 6 loads. The 32 lanes form 8 rows of 4, so that a load of a
//   warp finds 8 different packs of a or 4 of b and shared memory hands each to all lanes that want
//   it:
//
//      block 128 x 256          warp 64 x 64: 2 x 4 spans       span 32 x 16: 8 x 4 lanes,
//      +----+----+----+----+    +----+----+----+----+           each 4 x 4 elements
//      | w0 | w1 | w2 | w3 |    |    |    |    |    |           +----+----+----+----+
//      +----+----+----+----+    +----+----+----+----+           | t0 | t1 | t2 | t3 |
//      | w4 | w5 | w6 | w7 |    |    |    |    |    |           | t4 | ..
//      +----+----+----+----+    +----+----+----+----+
//
// - The operands of a step are loaded from shared memory while the step before is computed, into a
//   second set of registers, also across the end of a slab: no multiply-add waits for a load.
// - Three slabs instead of two: one in use, two on their way, so that a slow answer of memory is
//   met by two slabs of arithmetic.
// - Blocks run through c in groups of kGroup tile rows, column by column, so that those that run at
//   the same time cover a square of c. Their operands, which they read from the second level of
//   cache, are then as few as can be:
//
//      0  3  6  9        blocks in the order in which they start, kGroup = 3
//      1  4  7  10
//      2  5  8  11
//      ...
//
// - Three sizes of blocks, for matrices of many, some and few tiles.
//
// Cost for 1024 x 1024 x 1024, f32: 2^31 flops, 128 MiB of loads; 256 tiles of 64 x 64, 64 slabs,
// 64 barriers a block; a chain of 1024. For 4096 x 4096 x 4096: 512 tiles of 128 x 256, nearly four
// for each of 132 multiprocessors, 3 GiB of loads, most from the second level of cache, and 2^37
// flops: 2.7 ms at 51 TFLOP/s, the speed at which the chip's power lets cuBLAS do the same.
//
// Right for any m, n and k, any pitch and alignment, for the reasons of `double_buffered`. f32 is
// multiplied as f32: each element is one chain of k fused multiply-adds, in the same order as in
// `naive`.
#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

constexpr int kStages = 3;
constexpr int kDepth = 16;  // steps along k a slab
constexpr int kGroup = 16;  // tile rows a group of blocks
constexpr int kWidth = Pack<float>::kSize;
constexpr int kLanesY = 8, kLanesX = 4;
constexpr int kSpanY = kLanesY * kWidth, kSpanX = kLanesX * kWidth;

// The tile of a block, the tile of a warp, and how many blocks share a multiprocessor.
template <int kRows_, int kColumns_, int kWarpRows_, int kWarpColumns_, int kBlocks_>
struct Config {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kWarpsX = kColumns / kWarpColumns;
  static constexpr int kThreads = kWarpSize * kWarpsX * (kRows / kWarpRows);
  // Elements a thread.
  static constexpr int kEachY = kWarpRows / kLanesY, kEachX = kWarpColumns / kLanesX;
  static constexpr int kPitchA = kRows + kWidth, kPitchB = kColumns + kWidth;
  static constexpr int kStageA = kDepth * kPitchA, kStageB = kDepth * kPitchB;
  static constexpr int kSharedBytes = kStages * (kStageA + kStageB) * int{sizeof(float)};
};
using Large = Config<128, 256, 64, 64, 1>;
using Medium = Config<128, 128, 64, 32, 2>;
using Small = Config<64, 64, 32, 32, 4>;

// The elements of both operands that a thread needs for one step.
template <class C>
struct Fragment {
  float a[C::kEachY], b[C::kEachX];

  // a and b: the step's row of each slab, at the thread's first element.
  __device__ void Load(const float* a_row, const float* b_row) {
#pragma unroll
    for (int g = 0; g < C::kEachY / kWidth; ++g) {
      const Pack<float> pack = LoadPack(a_row + g * kSpanY);
#pragma unroll
      for (int w = 0; w < kWidth; ++w) a[g * kWidth + w] = pack.v[w];
    }
#pragma unroll
    for (int g = 0; g < C::kEachX / kWidth; ++g) {
      const Pack<float> pack = LoadPack(b_row + g * kSpanX);
#pragma unroll
      for (int w = 0; w < kWidth; ++w) b[g * kWidth + w] = pack.v[w];
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    MatmulWarpTiled(Operand<float> a, Operand<float> b, Packable packable, std::int64_t k,
                    float* c) {
  float* const a_slabs = DynamicShared<float>();
  float* const b_slabs = a_slabs + kStages * C::kStageA;

  // The block's tile in the order of the picture.
  const std::int64_t row_tiles = (a.extent + C::kRows - 1) / C::kRows;
  const std::int64_t column_tiles = (b.extent + C::kColumns - 1) / C::kColumns;
  const std::int64_t group_row = blockIdx.x / (kGroup * column_tiles) * kGroup;
  const std::int64_t in_group = blockIdx.x % (kGroup * column_tiles);
  const std::int64_t group_rows = min(row_tiles - group_row, std::int64_t{kGroup});
  const std::int64_t row = (group_row + in_group % group_rows) * C::kRows;
  const std::int64_t column = in_group / group_rows * C::kColumns;

  // The thread's first element in the tile.
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int y = warp / C::kWarpsX * C::kWarpRows + lane / kLanesX * kWidth;
  const int x = warp % C::kWarpsX * C::kWarpColumns + lane % kLanesX * kWidth;

  SlabCopier<float, C::kRows, kDepth, C::kPitchA, C::kThreads> a_copier(a, packable.a, row);
  SlabCopier<float, C::kColumns, kDepth, C::kPitchB, C::kThreads> b_copier(b, packable.b, column);
  // The slab that begins at k_first, if there is one. A group of copies each time, so that the
  // number of groups under way says which have arrived.
  const auto copy = [&](std::int64_t k_first, int stage) {
    const int depth = static_cast<int>(min(k - k_first, std::int64_t{kDepth}));
    if (depth > 0) {
      a_copier.Copy(depth, a_slabs + stage * C::kStageA);
      b_copier.Copy(depth, b_slabs + stage * C::kStageB);
    }
    CommitCopies();
  };

  float sums[C::kEachY][C::kEachX] = {};
  if (k > 0) {
    for (int s = 0; s < kStages - 1; ++s) copy(s * kDepth, s);
    WaitForCopies<kStages - 2>();
    __syncthreads();  // the first slab is complete
    Fragment<C> fragments[2];
    int stage = 0;
    const float* a_slab = a_slabs + y;
    const float* b_slab = b_slabs + x;
    fragments[0].Load(a_slab, b_slab);
    for (std::int64_t k_first = 0; k_first < k; k_first += kDepth) {
      // Into the place of the slab before this one, with which everybody was done at the barrier.
      copy(k_first + (kStages - 1) * kDepth, stage == 0 ? kStages - 1 : stage - 1);
#pragma unroll
      for (int l = 0; l < kDepth; ++l) {
        if (l + 1 < kDepth) {
          fragments[(l + 1) % 2].Load(a_slab + (l + 1) * C::kPitchA, b_slab + (l + 1) * C::kPitchB);
        } else if (k_first + kDepth < k) {
          WaitForCopies<kStages - 2>();
          __syncthreads();  // the next slab is complete, and everybody has loaded the last of this
          stage = stage + 1 == kStages ? 0 : stage + 1;
          a_slab = a_slabs + stage * C::kStageA + y;
          b_slab = b_slabs + stage * C::kStageB + x;
          fragments[0].Load(a_slab, b_slab);
        }
        const Fragment<C>& now = fragments[l % 2];
#pragma unroll
        for (int i = 0; i < C::kEachY; ++i)
#pragma unroll
          for (int j = 0; j < C::kEachX; ++j) sums[i][j] = fma(now.a[i], now.b[j], sums[i][j]);
      }
    }
  }
  static_assert(kDepth % 2 == 0, "the first fragment of a slab has to be fragments[0]");

#pragma unroll
  for (int i = 0; i < C::kEachY; ++i) {
    const std::int64_t r = row + y + i / kWidth * kSpanY + i % kWidth;
    if (r >= a.extent) continue;
#pragma unroll
    for (int j = 0; j < C::kEachX; j += kWidth)
      StoreClipped(sums[i] + j, column + x + j / kWidth * kSpanX, b.extent, packable.c,
                   c + r * b.extent);
  }
}

template <class C>
std::int64_t Tiles(const MatmulProblem& p) {
  return CeilDiv(p.m, C::kRows) * CeilDiv(p.n, C::kColumns);
}

template <class C>
void Run(const MatmulProblem& p, CudaLane& lane) {
  CUDA_CHECK(cudaFuncSetAttribute(MatmulWarpTiled<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  C::kSharedBytes));
  const auto blocks = static_cast<unsigned>(Tiles<C>(p));
  MatmulWarpTiled<C><<<blocks, C::kThreads, C::kSharedBytes, lane.stream()>>>(
      OperandA<float>(p), OperandB<float>(p), PackableOf<float>(p), p.k, static_cast<float*>(p.c));
  CUDA_CHECK_LAUNCH(MatmulWarpTiled);
}

// What the busiest multiprocessor has to compute, in elements of c; smaller tiles take longer for
// an element, by about the factor given.
template <class C>
double Time(const MatmulProblem& p, int multiprocessors, double factor) {
  return static_cast<double>(CeilDiv(Tiles<C>(p), multiprocessors) * C::kRows * C::kColumns) *
         factor;
}

// The small tiles, since which are used depends on the device.
Cost CostOf(const MatmulProblem& p) {
  return MatmulCost(p, MatmulTileLoads(p, Small::kRows, Small::kColumns));
}

void Enqueue(const MatmulProblem& p, Lane& lane) {
  CudaLane& cuda = Cuda(lane);
  if (p.m == 0 || p.n == 0) return;
  const int multiprocessors = cuda.device().info().multiprocessors;
  const std::array<double, 3> times = {Time<Large>(p, multiprocessors, 1.0),
                                       Time<Medium>(p, multiprocessors, 1.06),
                                       Time<Small>(p, multiprocessors, 1.5)};
  const double best = *std::min_element(times.begin(), times.end());
  if (best == times[0]) {
    Run<Large>(p, cuda);
  } else if (best == times[1]) {
    Run<Medium>(p, cuda);
  } else {
    Run<Small>(p, cuda);
  }
}

}  // namespace

extern const Strategy<MatmulProblem> kMatmulWarpTiled;
constexpr Strategy<MatmulProblem> kMatmulWarpTiled = {
    .name = "warp_tiled",
    .summary = "tiles for block, warp and thread, three slabs, operands one step ahead",
    .source =
        "the SIMT kernels of CUTLASS, and the ladder of public SGEMM kernels (S. Boehm, 2022)",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32),
    .min_compute_capability = 80,
    .deterministic = true,
    .limits = {.block_size = {}, .grid_size = {}, .items_per_thread = {}},
    .roundoff = MatmulChainRoundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = nullptr,
    .refuses = nullptr,
};

}  // namespace tessera
