// Matmul with one to eight steps along k: an outer product, or the sum of a few outer products.
//
// Nearly all of the work is writing c, because for k = 1 each element takes only one multiply-add.
// Strategies with tiles for many multiply-adds fetch k-tiles of 8 or more steps, wait for them at
// barriers, and write c in one burst at the end. Here no warp waits for another, and the columns of
// b stay in registers while the rows of a are processed:
//
//                    b   k x 128, one register per lane, step and column
//                  +-----+-----+-----+-----+
//      a           | 32  | 32  | 32  | 32  |   columns of a warp
//     rows x k     +-----+-----+-----+-----+
//     in shared -> row by row, with four stores per lane
//     memory
//
// - The four columns of a lane are 32 apart, so that a warp stores 128 contiguous bytes (of f32) at
//   a time, for any pitch and alignment of c. With four adjacent columns, a lane could store 16
//   bytes with one instruction, but the product then took 25 us instead of 19, unless the stores
//   were marked as streaming.
// - Rows of a and columns of b are loaded together, before the only wait. A warp has 8 rows, or 16
//   rows if it loads many elements of b relative to the bytes that it writes. With fewer rows, b
//   would be loaded too often; with more, SMs would be idle at the end.
//
// - If c has few rows, the warps of a block are placed side by side, so that few or none of them
//   are idle.
//
// Cost for 4096 x 4096 x 1, f32: 2^25 flops and 64 MiB written, 19.8 us on an H200 (cuBLAS takes
// 30.9 us); 2048 blocks without barriers. The variants that were tried are in docs/notebook.md.
//
// Lesson: kernels/lessons/product_1_naive.cu
#include <string>

#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/team/shares.h"

namespace tessera {
namespace {

constexpr int kMostSteps = 8;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kEach = 4;  // columns per lane
constexpr int kColumns = kEach * kWarpSize;

// Returns the number of rows per warp. `steps` is a power of two.
constexpr int Rows(std::size_t element_size, int steps) {
  return element_size == 2 || steps == kMostSteps ? 16 : 8;
}

// Returns the number of rows in a block's grid of warps, a power of two. The grid has kWarps /
// WarpsDown columns.
int WarpsDown(std::int64_t m, int rows) {
  return 1 << std::min(CeilLog2(CeilDiv(m, rows)), CeilLog2(kWarps));
}

// Each warp computes a tile of Rows x kColumns elements.
template <int kSteps, class T, class O>
__global__ void __launch_bounds__(kThreads)
    MatmulOuterProduct(Operand<T> a, Operand<T> b, int k, int warps_down, O* c) {
  using Value = ValueOf<T>;
  constexpr int kRows = Rows(sizeof(T), kSteps);
  __shared__ __align__(16) Value a_rows[kWarps][kRows][kSteps];
  const int warp = WarpIndex(), lane = LaneIndex();
  const int warps_across = kWarps / warps_down;
  const auto column_tiles = static_cast<unsigned>(CeilDiv(b.extent, kColumns * warps_across));
  const std::int64_t row =
      (std::int64_t{blockIdx.x / column_tiles} * warps_down + warp / warps_across) * kRows;
  const std::int64_t column =
      (std::int64_t{blockIdx.x % column_tiles} * warps_across + warp % warps_across) * kColumns +
      lane;
  const auto rows = static_cast<int>(min(a.extent - row, std::int64_t{kRows}));
  const std::int64_t columns = b.extent - column;  // columns from the lane's first one to the edge

  Value b_each[kSteps][kEach];
#pragma unroll
  for (int l = 0; l < kSteps; ++l)
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const std::int64_t from = (column + j * kWarpSize) * b.stride + l * b.k_stride;
      b_each[l][j] = l < k && j * kWarpSize < columns ? static_cast<Value>(b.data[from]) : Value{};
    }
#pragma unroll
  for (int e = lane; e < kRows * kSteps; e += kWarpSize) {
    const int i = e / kSteps, l = e % kSteps;
    a_rows[warp][i][l] = i < rows && l < k
                             ? static_cast<Value>(a.data[(row + i) * a.stride + l * a.k_stride])
                             : Value{};
  }
  __syncwarp();  // the warp's rows are in shared memory

  O* to = c + row * b.extent + column;
#pragma unroll 4
  for (int i = 0; i < rows; ++i, to += b.extent) {
    MatmulAcc<T, O> sums[kEach] = {};
#pragma unroll
    for (int l = 0; l < kSteps; ++l)
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        sums[j] = MultiplyAdd(a_rows[warp][i][l], b_each[l][j], sums[j]);
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (j * kWarpSize < columns) to[j * kWarpSize] = static_cast<O>(sums[j]);
  }
}

template <int kSteps>
void Run(const MatmulProblem& p, CudaStream& stream) {
  const int rows = Rows(SizeOf(p.dtype), kSteps);
  const int down = WarpsDown(p.m, rows);
  const auto blocks =
      static_cast<unsigned>(CeilDiv(p.m, down * rows) * CeilDiv(p.n, kColumns * (kWarps / down)));
  DispatchMatmul(p, [&](auto t, auto o) {
    using T = decltype(t);
    MatmulOuterProduct<kSteps><<<blocks, kThreads, 0, stream.handle()>>>(
        OperandA<T>(p), OperandB<T>(p), static_cast<int>(p.k), down,
        static_cast<decltype(o)*>(p.c));
    CUDA_CHECK_LAUNCH(MatmulOuterProduct);
  });
}

// Calls f with k rounded up to a number of steps for which a kernel exists.
template <class F>
auto DispatchSteps(const MatmulProblem& p, F&& f) {
  return DispatchAtLeast<1, 2, 4, kMostSteps>(p.k, f);
}

void Enqueue(const MatmulProblem& p, Stream& stream) {
  DispatchSteps(p, [&](auto steps) { Run<steps>(p, Cuda(stream)); });
}

Cost CostOf(const MatmulProblem& p) {
  const int rows = DispatchSteps(p, [&](auto steps) { return Rows(SizeOf(p.dtype), steps); });
  return MatmulCost(p, MatmulTileLoads(p, rows, kColumns));
}

std::string Refuses(const MatmulProblem& p) { return p.k <= kMostSteps ? "" : "k of at most 8"; }

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulOuterProduct = CudaMatmul({
    .name = "outer_product",
    .summary = "few steps along k: columns of b in registers, c written at memory speed",
    .source = "definition: a product is the sum of k outer products",
    .dtypes = kMatmulDTypes,
    .cost = CostOf,
    .launch = Enqueue,
    .shared = {.launch = LaunchGathered<kMatmulOuterProduct>},
    .refuses = Refuses,
});
template void LaunchGathered<kMatmulOuterProduct>(const MatmulProblem&, std::span<const TeamShare>,
                                                  Stream&);

}  // namespace tessera
