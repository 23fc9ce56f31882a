// Matmul with V x V elements per thread and operands from device memory.
//
// Unlike in `naive`, each step along k loads V elements of each operand into registers and uses
// each element V times. So there are 2 m n k / V loads instead of 2 m n k, and V / 2 multiply-adds
// per load instead of 1 / 2.
//
//                     V  V  V            thread [y, x] of a 16 x 16 block:
//                   +--+--+--+
//                 k |  |b |  |              for every step along k
//                   +--+--+--+                V elements of a, one below the other
//            k                                V elements of b, side by side
//        +-------+  +--+--+--+                V * V multiply-adds into registers
//      V |       |  |  |  |  |
//        +-------+  +--+--+--+
//      V |   a   |  |  |c |  |   <- c[y V ... y V + V, x V ... x V + V]
//        +-------+  +--+--+--+
//
// Two costs remain. First, all threads in a row of the block load the same elements of a, and all
// threads in a column load the same elements of b; only the caches keep these loads from reaching
// device memory. Second, the loads of adjacent threads are V elements apart, so each load of a warp
// touches V times as many cache lines as necessary.
//
// Cost for 1024 x 1024 x 1024, f32, V = 4: 2^31 flops; 2^29 loads (2 GiB), most of them served by
// the caches; no barriers; a chain of 1024 multiply-adds.
//
// For rows and columns beyond an edge, threads load the last one that exists and store nothing, so
// the loop needs no conditions. Blocks of a grid of the maximum size continue with further tiles.
//
// Lesson: kernels/lessons/product_3_registers.cu
#include <algorithm>
#include <limits>

#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/team/shares.h"

namespace tessera {
namespace {

constexpr int kSide = 16;  // threads along a side of a block
constexpr std::uint32_t kDefaultEach = 4;

template <int kEach, class T, class O>
__global__ void __launch_bounds__(kSide* kSide)
    MatmulRegisterTiled(Operand<T> a, Operand<T> b, std::int64_t k, O* c) {
  using Value = ValueOf<T>;
  constexpr int kTile = kSide * kEach;
  const std::int64_t column_tiles = (b.extent + kTile - 1) / kTile;
  const std::int64_t tiles = (a.extent + kTile - 1) / kTile * column_tiles;
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t y = (tile / column_tiles * kSide + threadIdx.x / kSide) * kEach;
    const std::int64_t x = (tile % column_tiles * kSide + threadIdx.x % kSide) * kEach;
    std::int64_t a_at[kEach], b_at[kEach];
#pragma unroll
    for (int v = 0; v < kEach; ++v) {
      a_at[v] = min(y + v, a.extent - 1) * a.stride;
      b_at[v] = min(x + v, b.extent - 1) * b.stride;
    }
    MatmulAcc<T, O> sums[kEach][kEach] = {};
#pragma unroll 1
    for (std::int64_t l = 0; l < k; ++l) {
      Value a_each[kEach], b_each[kEach];
#pragma unroll
      for (int v = 0; v < kEach; ++v)
        a_each[v] = static_cast<Value>(a.data[a_at[v] + l * a.k_stride]);
#pragma unroll
      for (int v = 0; v < kEach; ++v)
        b_each[v] = static_cast<Value>(b.data[b_at[v] + l * b.k_stride]);
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[i][j] = MultiplyAdd(a_each[i], b_each[j], sums[i][j]);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (y + i < a.extent && x + j < b.extent)
          c[(y + i) * b.extent + x + j] = static_cast<O>(sums[i][j]);
      }
    }
  }
}

int Each(const MatmulProblem& p) {
  return static_cast<int>(p.launch.items_per_thread != 0 ? p.launch.items_per_thread
                                                         : kDefaultEach);
}

Cost CostOf(const MatmulProblem& p) { return MatmulCost(p, MatmulTileLoads(p, Each(p), Each(p))); }

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  DispatchAtLeast<1, 2, 4, 8>(Each(p), [&](auto each) {
    constexpr int kEach = each, kTile = kSide * kEach;
    const std::int64_t tiles = CeilDiv(p.m, kTile) * CeilDiv(p.n, kTile);
    if (tiles == 0) return;
    const auto blocks = static_cast<unsigned>(
        std::min<std::int64_t>(tiles, std::numeric_limits<std::int32_t>::max()));
    DispatchMatmul(p, [&](auto t, auto o) {
      using T = decltype(t);
      MatmulRegisterTiled<kEach><<<blocks, kSide * kSide, 0, stream.handle()>>>(
          OperandA<T>(p), OperandB<T>(p), p.k, static_cast<decltype(o)*>(p.c));
      CUDA_CHECK_LAUNCH(MatmulRegisterTiled);
    });
  });
}

std::string Refuses(const MatmulProblem& p) {
  const int each = Each(p);
  return each == 1 || each == 2 || each == 4 || each == 8
             ? ""
             : "launch.items_per_thread to be 1, 2, 4 or 8";
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulRegisterTiled = CudaMatmul({
    .name = "register_tiled",
    .summary = "V x V elements per thread in registers, operands from device memory",
    .source = "thread-level register tiling, from the notes on hardware acceleration",
    .dtypes = kMatmulDTypes,
    .limits = {.items_per_thread = {1, 8}},
    .cost = CostOf,
    .launch = Enqueue,
    .shared = {.launch = LaunchGathered<kMatmulRegisterTiled>},
    .refuses = Refuses,
});
template void LaunchGathered<kMatmulRegisterTiled>(const MatmulProblem&, std::span<const TeamShare>,
                                                   Stream&);

}  // namespace tessera
