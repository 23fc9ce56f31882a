// Matmul that fetches the next k-tile while it uses the current one.
//
// In `shared_tiled_vectorized` the whole block alternates between waiting for memory and computing.
// Here shared memory holds two k-tiles of each operand. While the block computes with one of them,
// cp.async (compute capability 8.0) fills the other in the background, bypassing the registers:
//
//     shared_tiled   | fetch 0 | use 0 | fetch 1 | use 1 | fetch 2 | use 2 |
//
//     here           | copy 0  | copy 1         | copy 2         |
//                              | wait  use 0    | wait  use 1    | ...
//                              ^ one barrier per k-tile: k-tile s is complete for all threads,
//                                and all are done with k-tile s - 1, so k-tile s + 1 may take its
//                                place
//
// There is one barrier per k-tile instead of two. For L = 128, S is 16 instead of 8, so there are
// half as many k-tiles and, in total, a quarter of the barriers. The block waits only if a copy
// takes longer than the arithmetic on a k-tile. The 16 steps of a k-tile, with 64 multiply-adds per
// thread, take about 4000 cycles on an SM with two blocks, whereas memory responds in under 1000.
//
// A background copy writes 16 aligned bytes and cannot transpose them. An operand that is
// contiguous along k is therefore copied one element at a time. These copies take four times as
// many instructions, 8 for every 1024 multiply-adds, but no registers.
//
// Cost for 1024 x 1024 x 1024, f32: 2^31 flops and 128 MiB of loads. There are 256 tiles of 64 x 64
// with 64 k-tiles each, 64 barriers per block, and chains of 1024 multiply-adds.
//
// Lesson: kernels/lessons/product_4_double_buffer.cu
#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/team/shares.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int kStages = 2;

// The depth is chosen for f32: two stages fit in the 48 KiB that any block may use.
using Large = SquareTile<128, 16, 8>;
using Small = SquareTile<64, 16, 4>;  // more blocks, for matrices with few tiles

template <class C, class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    MatmulDoubleBuffered(Operand<T> a, Operand<T> b, Packable packable, std::int64_t k, T* c) {
  constexpr int kDepth = C::kDepth * sizeof(float) / sizeof(T);
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
    __syncthreads();  // the k-tile is complete, and all threads are done with the previous one
    copy(k_first + kDepth, 1 - stage);
#pragma unroll
    for (int l = 0; l < kDepth; ++l) tile.Multiply(a_k_tiles[stage][l], b_k_tiles[stage][l]);
    stage = 1 - stage;
  }
  tile.Store(row, column, a.extent, b.extent, packable.c, c);
}

void Enqueue(const MatmulProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  RunTiles<Large, Small>(p, cuda, [&](auto config, unsigned blocks) {
    DispatchReal(p.dtype, [&](auto zero) {
      using T = decltype(zero);
      MatmulDoubleBuffered<decltype(config)><<<blocks, kThreads, 0, cuda.handle()>>>(
          OperandA<T>(p), OperandB<T>(p), PackableOf<T>(p), p.k, static_cast<T*>(p.c));
    });
  });
  CUDA_CHECK_LAUNCH(MatmulDoubleBuffered);
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulDoubleBuffered = CudaMatmul({
    .name = "double_buffered",
    .summary = "the next k-tile is copied in the background (cp.async) while this one is used",
    .source = "S. Boehm's series of SGEMM kernels (2022), with cp.async and partial tiles",
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .min_compute_capability = 80,
    .cost = TilesCost<Small>,
    .launch = Enqueue,
    .shared = {.launch = LaunchGathered<kMatmulDoubleBuffered>},
});
template void LaunchGathered<kMatmulDoubleBuffered>(const MatmulProblem&,
                                                    std::span<const TeamShare>, Stream&);

}  // namespace tessera
