// Matmul with tiles in shared memory: a block computes L x L elements of c, and a thread V x V of
// them.
//
// In `register_tiled`, threads load from device memory what adjacent threads load as well. Here the
// block advances along k in k-tiles of S steps. Its threads together fetch S x L elements of each
// operand into shared memory, and each element is used L times. So there are 2 m n k / L loads from
// device memory instead of 2 m n k / V. For each step, a thread then loads V elements of each
// operand from shared memory into registers and uses each of them V times, which takes 2 m n k / V
// loads from shared memory. With L = 128 and V = 8, sixteen loads serve 64 multiply-adds.
//
//                   k-tile of b, S x L        one fetch, thread t of 256: cells t, t + 256, ...
//                  +----------------+
//                S |                |
//         S        +----------------+
//      +----+      +----------------+
//      |    |      |     | V |      |
//    L |    |      |     +---+      |       then S steps, each V + V loads from the k-tiles
//      |    |      |    V|   |      |       and V * V multiply-adds
//      +----+      +----------------+
//    k-tile of a        tile of c, L x L
//
// There are two barriers per k-tile: one before it is overwritten and one before it is read.
// Threads do no arithmetic while they wait for memory, and only other blocks on the same SM can
// fill these gaps.
//
// Cost for 1024 x 1024 x 1024, f32: 2^31 flops, 128 MiB of loads; 256 tiles of 64 x 64, 64 k-tiles,
// 128 barriers per block; a chain of 1024 multiply-adds.
//
// Lessons: kernels/lessons/product_2_tiles.cu, kernels/lessons/product_3_registers.cu
#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/team/shares.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;

using Large = SquareTile<128, 8, 8>;
using Small = SquareTile<64, 16, 4>;  // more blocks, for matrices with few tiles

// Fetches a thread's share of one operand's k-tiles: k-tile[l][i] = operand[first + i, k_first +
// l], or 0 beyond the edges. All threads of the block fetch together, and consecutive threads fetch
// consecutive elements along the dimension in which memory is contiguous. Each thread then advances
// by as many cells as there are threads, which is a step along the other dimension only.
template <class C, class T>
class KTileFetcher {
 public:
  __device__ KTileFetcher(const Operand<T>& operand, std::int64_t first) : data_(operand.data) {
    static_assert(kThreads % C::kDepth == 0 && kThreads % C::kTile == 0);
    const int thread = static_cast<int>(threadIdx.x);
    const bool along_k = operand.k_stride == 1;
    i_ = along_k ? thread / C::kDepth : thread % C::kTile;
    l_ = along_k ? thread % C::kDepth : thread / C::kTile;
    i_step_ = along_k ? kThreads / C::kDepth : 0;
    l_step_ = along_k ? 0 : kThreads / C::kTile;
    rows_ = static_cast<int>(min(operand.extent - first, std::int64_t{C::kTile}));
    next_ = (first + i_) * operand.stride + l_ * operand.k_stride;
    step_ = i_step_ * operand.stride + l_step_ * operand.k_stride;
    k_tile_step_ = C::kDepth * operand.k_stride;
  }

  // Fetches the next k-tile, of which only the first `depth` rows are within the operand.
  __device__ void Fetch(int depth, ValueOf<T> (&k_tile)[C::kDepth][C::kPitch]) {
#pragma unroll
    for (int c = 0; c < C::kTile * C::kDepth / kThreads; ++c) {
      const int i = i_ + c * i_step_;
      const int l = l_ + c * l_step_;
      k_tile[l][i] = i < rows_ && l < depth ? static_cast<ValueOf<T>>(data_[next_ + c * step_]) : 0;
    }
    next_ += k_tile_step_;
  }

 private:
  const T* data_;
  int i_, l_, i_step_, l_step_;  // the thread's first cell, and the step to the next one
  int rows_;                     // number of values of i before the operand's end
  std::int64_t next_, step_, k_tile_step_;
};

// Two blocks share an SM, so that one computes while the other fetches. With 64-bit sums there is
// one block, because the sums alone take half the registers.
template <class C, class T, class O>
__global__ void __launch_bounds__(kThreads, sizeof(MatmulAcc<T, O>) == 4 ? 2 : 1)
    MatmulSharedTiled(Operand<T> a, Operand<T> b, std::int64_t k, O* c, StackSteps stack) {
  using Value = ValueOf<T>;
  stack.MoveToProduct(a, b, c);
  constexpr int kEach = C::kEach;
  static_assert(C::kSide * C::kSide == kThreads);
  __shared__ __align__(16) Value a_k_tile[C::kDepth][C::kPitch];
  __shared__ __align__(16) Value b_k_tile[C::kDepth][C::kPitch];
  const std::int64_t column_tiles = (b.extent + C::kTile - 1) / C::kTile;
  const std::int64_t row = blockIdx.x / column_tiles * C::kTile;
  const std::int64_t column = blockIdx.x % column_tiles * C::kTile;
  const int y = static_cast<int>(threadIdx.x) / C::kSide * kEach;
  const int x = static_cast<int>(threadIdx.x) % C::kSide * kEach;

  KTileFetcher<C, T> a_fetcher(a, row);
  KTileFetcher<C, T> b_fetcher(b, column);
  MatmulAcc<T, O> sums[kEach][kEach] = {};
  for (std::int64_t k_first = 0; k_first < k; k_first += C::kDepth) {
    __syncthreads();  // all threads have read the previous k-tiles
    const int depth = static_cast<int>(min(k - k_first, std::int64_t{C::kDepth}));
    a_fetcher.Fetch(depth, a_k_tile);
    b_fetcher.Fetch(depth, b_k_tile);
    __syncthreads();  // the k-tiles are complete
#pragma unroll
    for (int l = 0; l < C::kDepth; ++l) {
      Value a_each[kEach], b_each[kEach];
#pragma unroll
      for (int v = 0; v < kEach; ++v) a_each[v] = a_k_tile[l][y + v];
#pragma unroll
      for (int v = 0; v < kEach; ++v) b_each[v] = b_k_tile[l][x + v];
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[i][j] = MultiplyAdd(a_each[i], b_each[j], sums[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (row + y + i < a.extent && column + x + j < b.extent)
        c[(row + y + i) * b.extent + column + x + j] = static_cast<O>(sums[i][j]);
    }
  }
}

void Enqueue(const MatmulProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  RunTiles<Large, Small>(p, cuda, [&](auto config, unsigned blocks) {
    DispatchMatmul(p, [&](auto t, auto o) {
      using T = decltype(t);
      ForEachStackPart(p, kMostGridRows, [&](const MatmulProblem& first, const StackSteps& stack) {
        const dim3 grid(blocks, static_cast<unsigned>(stack.products));
        MatmulSharedTiled<decltype(config)><<<grid, kThreads, 0, cuda.handle()>>>(
            OperandA<T>(first), OperandB<T>(first), p.k, static_cast<decltype(o)*>(first.c), stack);
        CUDA_CHECK_LAUNCH(MatmulSharedTiled);
      });
    });
  });
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulSharedTiled = CudaMatmul({
    .name = "shared_tiled",
    .summary =
        "L x L elements per block through k-tiles in shared memory, V x V per thread in registers",
    .source =
        "shared-memory tiling with cooperative fetching, from the notes on hardware acceleration",
    .dtypes = kMatmulDTypes,
    .cost = TilesCost<Small>,
    .launch = Enqueue,
    .shared = {.launch = LaunchGathered<kMatmulSharedTiled>},
    .stacks = true,
});
template void LaunchGathered<kMatmulSharedTiled>(const MatmulProblem&, std::span<const TeamShare>,
                                                 Stream&);

}  // namespace tessera
