// Matmul in f64 on the tensor cores, whose f64 is IEEE arithmetic: twice the speed of the same
// sums by fused multiply-adds.
//
// Against `tensor_mma`: an instruction multiplies 16 x 8 by 8 x 8 elements, and each lane brings
// four elements of a and two of b, a row of the fragment for every group of four lanes. ldmatrix
// does not know f64, so lanes load vectors of 16 bytes, two elements, and which elements those are
// is chosen to suit them: the instruction's steps t and t + 4 are the neighbours 2 t and 2 t + 1 of
// k, its rows g and g + 8 the neighbours 2 g and 2 g + 1 of i. Then a lane's four elements are a
// square, which is two vectors however the operand lies in memory:
//
//          k ->   t = 0   t = 1   t = 2   t = 3
//        i      +-------+-------+-------+-------+     along k: a vector is a row of a square
//        |  g=0 | 0 | 2 | 0 | 2 |       |       |     along i: a column
//        v      | 1 | 3 | 1 | 3 |       |       |
//               +-------+-------+-------+-------+
//           g=1 | 0 | 2 | ..
//
// b is treated alike; its columns 2 g and 2 g + 1 belong to two instructions, so that a lane ends
// up with four neighbours of a row of c.
//
// 64 sums of 64 bits a thread leave no registers for two sets of operands. Those of b have two; a's
// squares are loaded anew as soon as the last of their four instructions has read them, three
// squares, 384 cycles, before they are needed again.
//
// Cost for 1024 x 1024 x 1024: 2^31 flops, 256 MiB of loads; 256 tiles of 64 x 64, 64 slabs of 16
// steps, 64 barriers a block; a chain of 1024. For 4096 x 4096 x 4096: 1024 tiles of 128 x 128,
// nearly eight for each of 132 multiprocessors; 2^37 flops, 2.05 ms at 67 TFLOP/s.
//
// Right for any m, n and k: copies beyond the edges write zeros, which add 0 * 0, and results
// beyond the edges are not stored. For any pitch and alignment: where vectors are not aligned,
// elements travel one by one. Each sum has k terms, added in some order with one rounding each.
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/matmul/mma.cuh"
#include "kernels/cuda/matmul/slabs.cuh"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

constexpr int kStages = 3;
constexpr int kDepth = 16;  // steps along k a slab: rows of 128 bytes
constexpr int kStep = 8;    // of one instruction
constexpr int kGroup = 16;  // tile rows a group of blocks

// The tile of a block and the tile of a warp.
template <int kRows_, int kColumns_, int kWarpRows_, int kWarpColumns_>
struct Config {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;
  static constexpr int kWarpsX = kColumns / kWarpColumns;
  static constexpr int kThreads = kWarpSize * kWarpsX * (kRows / kWarpRows);
  static constexpr int kA = kRows * kDepth, kB = kColumns * kDepth;
  static constexpr int kSharedBytes = kStages * (kA + kB) * int{sizeof(double)};
};
using Large = Config<128, 128, 64, 32>;
using Small = Config<64, 64, 32, 32>;  // for matrices with few tiles

template <class C, bool kAAlongK, bool kBAlongK>
__global__ void __launch_bounds__(C::kThreads, 1)
    MatmulTensorF64(Operand<double> a, Operand<double> b, Packable packable, std::int64_t k,
                    double* c) {
  using SlabA = SquareSlab<C::kRows, kDepth, kAAlongK>;
  using SlabB = SquareSlab<C::kColumns, kDepth, kBAlongK>;
  double* const a_slabs = DynamicShared<double>();
  double* const b_slabs = a_slabs + kStages * C::kA;
  const TilePlace place = GroupedTile<kGroup>(blockIdx.x, (a.extent + C::kRows - 1) / C::kRows,
                                              (b.extent + C::kColumns - 1) / C::kColumns);
  const std::int64_t row = place.row * C::kRows, column = place.column * C::kColumns;

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp_y = warp / C::kWarpsX * C::kWarpRows, warp_x = warp % C::kWarpsX * C::kWarpColumns;
  const int y = warp_y + lane / 4 * 2, x = warp_x + lane / 4 * 2, l_lane = lane % 4 * 2;

  SlabStream<double, SlabA, C::kThreads> a_stream(a, row, 0);
  SlabStream<double, SlabB, C::kThreads> b_stream(b, column, 0);
  std::int64_t left = k;  // steps along k from the next slab to be copied on
  const auto copy = [&](int stage) {
    if (left > 0) {
      const int depth = static_cast<int>(min(left, std::int64_t{kDepth}));
      a_stream.Copy(a, packable.a, depth, a_slabs + stage * C::kA);
      b_stream.Copy(b, packable.b, depth, b_slabs + stage * C::kB);
      left -= kDepth;
    }
    CommitCopies();
  };

  constexpr int kTilesY = C::kWarpRows / 16, kTilesX = C::kWarpColumns / 16;
  double as[kTilesY][4], bs[2][kTilesX][4];
  const auto load_a = [&](int i, int stage, int l) {
    LoadSquare<SlabA>(a_slabs + stage * C::kA, y + i * 16, l + l_lane, as[i]);
  };
  const auto load_b = [&](int buffer, int stage, int l) {
#pragma unroll
    for (int j = 0; j < kTilesX; ++j)
      LoadSquare<SlabB>(b_slabs + stage * C::kB, x + j * 16, l + l_lane, bs[buffer][j]);
  };

  double sums[kTilesY][kTilesX][2][4] = {};
  for (int s = 0; s < kStages - 1; ++s) copy(s);
  WaitForCopies<kStages - 2>();
  __syncthreads();  // the first slab is complete
#pragma unroll
  for (int i = 0; i < kTilesY; ++i) load_a(i, 0, 0);
  load_b(0, 0, 0);
  int stage = 0;
  for (std::int64_t k_first = 0; k_first < k; k_first += kDepth) {
    // Into the place of the slab before this one, with which everybody was done at the barrier.
    copy(stage == 0 ? kStages - 1 : stage - 1);
    static_assert(kDepth / kStep % 2 == 0, "the first step of a slab has to be in buffer 0");
#pragma unroll
    for (int l = 0; l < kDepth; l += kStep) {
      const int buffer = l / kStep % 2, next = (l + kStep) % kDepth;
      if (next == 0) {
        WaitForCopies<kStages - 2>();
        __syncthreads();  // the next slab is complete, and everybody has loaded the last of this
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
      load_b(1 - buffer, stage, next);
#pragma unroll
      for (int i = 0; i < kTilesY; ++i) {
#pragma unroll
        for (int j = 0; j < kTilesX; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            MultiplyDoubles(as[i], bs[buffer][j][h], bs[buffer][j][h + 2], sums[i][j][h]);
        load_a(i, stage, next);  // these are not needed any more in this step
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kTilesY; ++i) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const std::int64_t r = row + y + i * 16 + v;
      if (r >= a.extent) continue;
#pragma unroll
      for (int j = 0; j < kTilesX; ++j) {
        // Of the instruction's columns 2 t and 2 t + 1, of the pair of tiles 4 t to 4 t + 3.
        const std::int64_t e = column + warp_x + j * 16 + lane % 4 * 4;
        const double first[2] = {sums[i][j][0][2 * v], sums[i][j][1][2 * v]};
        const double second[2] = {sums[i][j][0][2 * v + 1], sums[i][j][1][2 * v + 1]};
        StoreClipped(first, e, b.extent, packable.c, c + r * b.extent);
        StoreClipped(second, e + 2, b.extent, packable.c, c + r * b.extent);
      }
    }
  }
}

template <class C>
std::int64_t Tiles(const MatmulProblem& p) {
  return CeilDiv(p.m, C::kRows) * CeilDiv(p.n, C::kColumns);
}

template <class C>
void Run(const MatmulProblem& p, CudaLane& lane) {
  DispatchLayouts(!p.transpose_a, p.transpose_b, [&](auto a_along_k, auto b_along_k) {
    const auto kernel = MatmulTensorF64<C, a_along_k, b_along_k>;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
    kernel<<<static_cast<unsigned>(Tiles<C>(p)), C::kThreads, C::kSharedBytes, lane.stream()>>>(
        OperandA<double>(p), OperandB<double>(p), PackableOf<double>(p), p.k,
        static_cast<double*>(p.c));
    CUDA_CHECK_LAUNCH(MatmulTensorF64);
  });
}

// The small tiles, since which are used depends on the device.
Cost CostOf(const MatmulProblem& p) {
  return MatmulCost(p, MatmulTileLoads(p, Small::kRows, Small::kColumns));
}

void Enqueue(const MatmulProblem& p, Lane& lane) {
  CudaLane& cuda = Cuda(lane);
  if (p.m == 0 || p.n == 0) return;
  if (Tiles<Large>(p) >= cuda.device().info().multiprocessors) {
    Run<Large>(p, cuda);
  } else {
    Run<Small>(p, cuda);
  }
}

}  // namespace

extern const Strategy<MatmulProblem> kMatmulTensorF64;
constexpr Strategy<MatmulProblem> kMatmulTensorF64 = {
    .name = "tensor_f64",
    .summary = "f64 on the tensor cores, from Ampere on (mma.sync)",
    .source = "the f64 tensor cores of compute capability 8.0 and 9.0; NVIDIA PTX ISA, mma.m16n8k8",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF64),
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
