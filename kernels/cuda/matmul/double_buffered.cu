// Matmul with the next k-tile on its way while this one is used.
//
// Against `shared_tiled_vectorized`: there the block alternates, all of it, between waiting for
// memory and computing. Here every operand has two k-tiles in shared memory, and cp.async (compute
// capability 8.0) copies into one of them in the background, past the registers, while the block
// computes with the other:
//
//     shared_tiled   | fetch 0 | use 0 | fetch 1 | use 1 | fetch 2 | use 2 |
//
//     here           | copy 0  | copy 1         | copy 2         |
//                              | wait  use 0    | wait  use 1    | ...
//                              ^ one barrier a k-tile: k-tile s is complete for everybody,
//                                and nobody uses k-tile s - 1 any more, so that k-tile s + 1
//                                may take its place
//
// One barrier a k-tile instead of two; and as S = 16 for L = 128 too, where it was 8, a quarter of
// the barriers there. Waiting is left only where a copy takes longer than a k-tile's arithmetic: 16
// steps of 64 multiply-adds per thread are about 4000 cycles of an SM with two blocks, and memory
// answers in under 1000.
//
// A copy in the background moves 16 bytes to where they are aligned and contiguous; it cannot
// transpose them. An operand that is contiguous along k therefore travels one element a copy, which
// costs four times the copy instructions, 8 for every 1024 multiply-adds, and no registers.
//
// Cost for 1024 x 1024 x 1024, f32: 2^31 flops, 128 MiB of loads; 256 tiles of 64 x 64, 64 k-tiles,
// 64 barriers per block; a chain of 1024.
//
// Right for any m, n and k: a copy may read less than it writes, and the rest is zero, which adds
// 0 * 0; results beyond the edges are not stored. For any pitch and alignment: an operand that does
// not begin and advance in multiples of 16 bytes travels one element a copy, and c is then stored
// one element at a time. Each element is one chain of k fused multiply-adds, in the same order as
// in `naive`.
#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/team/shares.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int kStages = 2;

// L and V; (L / V)^2 threads per block.
template <int kTile_, int kEach_>
struct Config {
  static constexpr int kTile = kTile_;
  static constexpr int kEach = kEach_;
  static constexpr int kPitch = kTile + 4;
};
using Large = Config<128, 8>;
using Small = Config<64, 4>;  // more blocks, for matrices with few tiles

template <class C, class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    MatmulDoubleBuffered(Operand<T> a, Operand<T> b, Packable packable, std::int64_t k, T* c) {
  constexpr int kDepth = 64 / sizeof(T);  // S: two stages fit the 48 KiB that every block may have
  __shared__ __align__(16) T a_k_tiles[kStages][kDepth][C::kPitch];
  __shared__ __align__(16) T b_k_tiles[kStages][kDepth][C::kPitch];
  const std::int64_t column_tiles = (b.extent + C::kTile - 1) / C::kTile;
  const std::int64_t row = blockIdx.x / column_tiles * C::kTile;
  const std::int64_t column = blockIdx.x % column_tiles * C::kTile;

  using Copier = KTileCopier<T, C::kTile, kDepth, C::kPitch, kThreads>;
  Copier a_copier(a, packable.a, row);
  Copier b_copier(b, packable.b, column);
  const auto copy = [&](std::int64_t k_first, int stage) {
    const int depth = static_cast<int>(min(k - k_first, std::int64_t{kDepth}));
    if (depth <= 0) return;
    a_copier.Copy(depth, &a_k_tiles[stage][0][0]);
    b_copier.Copy(depth, &b_k_tiles[stage][0][0]);
    CommitCopies();
  };

  ThreadTile<T, C::kTile, C::kEach> tile;
  static_assert(tile.kThreads == kThreads);
  copy(0, 0);
  int stage = 0;
  for (std::int64_t k_first = 0; k_first < k; k_first += kDepth) {
    WaitForCopies<0>();
    __syncthreads();  // the k-tile is complete, and nobody uses the one before any more
    copy(k_first + kDepth, 1 - stage);
#pragma unroll
    for (int l = 0; l < kDepth; ++l) tile.Multiply(a_k_tiles[stage][l], b_k_tiles[stage][l]);
    stage = 1 - stage;
  }
  tile.Store(row, column, a.extent, b.extent, packable.c, c);
}

template <class C>
std::int64_t Tiles(const MatmulProblem& p) {
  return CeilDiv(p.m, C::kTile) * CeilDiv(p.n, C::kTile);
}

template <class C, class T>
void RunConfig(const MatmulProblem& p, CudaStream& stream) {
  const auto blocks = static_cast<unsigned>(Tiles<C>(p));
  MatmulDoubleBuffered<C><<<blocks, kThreads, 0, stream.handle()>>>(
      OperandA<T>(p), OperandB<T>(p), PackableOf<T>(p), p.k, static_cast<T*>(p.c));
  CUDA_CHECK_LAUNCH(MatmulDoubleBuffered);
}

template <class T>
void Run(const MatmulProblem& p, CudaStream& stream) {
  // Large tiles move less, once there are two for every SM to overlap.
  if (Tiles<Large>(p) >= 2 * stream.device().info().multiprocessors) {
    RunConfig<Large, T>(p, stream);
  } else {
    RunConfig<Small, T>(p, stream);
  }
}

// The small tiles, since which are used depends on the device.
Cost CostOf(const MatmulProblem& p) {
  return MatmulCost(p, MatmulTileLoads(p, Small::kTile, Small::kTile));
}

void Enqueue(const MatmulProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  p.dtype == DType::kF32 ? Run<float>(p, cuda) : Run<double>(p, cuda);
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulDoubleBuffered = {
    .name = "double_buffered",
    .summary = "the next k-tile is copied in the background (cp.async) while this one is used",
    .source = "the ladder of public SGEMM kernels (S. Boehm, 2022), with cp.async and edges",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .min_compute_capability = 80,
    .deterministic = true,
    .roundoff = MatmulChainRoundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .launch_shared = LaunchGathered<kMatmulDoubleBuffered>,
};

}  // namespace tessera
