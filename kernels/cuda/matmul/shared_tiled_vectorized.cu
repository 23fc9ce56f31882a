// Matmul with tiles in shared memory that are moved 16 bytes at a time.
//
// Blocks compute L x L tiles, and threads V x V elements, as in `shared_tiled`. But every load and
// store moves a 16-byte vector (4 floats or 2 doubles) instead of one element, so fewer loads and
// stores are needed, a quarter as many in f32:
// - From global memory to registers, each operand moves in vectors along its contiguous dimension.
// - From registers to the k-tile, an operand that is contiguous along k is transposed, because in
//   both k-tiles a row is one step along k, and a thread reads them by rows:
//
//       a, row i:  [l l+1 l+2 l+3]  one load        k-tile   l    ....i....
//                                                          l+1  ....i....   four stores into
//                                                          l+2  ....i....   different rows
//                                                          l+3  ....i....
//
//   The rows of a k-tile are 4 elements longer than the tile, so that the threads of a warp, which
//   store two vectors for each of 16 values of i, use 32 different banks.
// - From the k-tile to registers, a thread loads V / 4 vectors that are a span apart (ThreadTile in
//   tiles.cuh). If they were side by side, adjacent threads would read every second vector and use
//   each bank twice.
// - From registers to c, the same vectors are stored.
//
// The loads are issued before the barrier that precedes overwriting the k-tiles, so the wait for
// slower warps hides part of the memory latency.
//
// Cost for 1024 x 1024 x 1024, f32: 2^31 flops, 128 MiB of loads; 256 tiles of 64 x 64, 64 k-tiles,
// 128 barriers per block; a chain of 1024 multiply-adds. For each k-tile, a thread of a 128 x 128
// tile does 512 multiply-adds with 2 loads from global memory, 5 stores to shared memory (if one
// operand is transposed) and 32 loads from shared memory.
//
// Lesson: kernels/lessons/product_3_registers.cu
#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/team/shares.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;

using Large = SquareTile<128, 8, 8>;
using Small = SquareTile<64, 16, 4>;  // more blocks, for matrices with few tiles

// Fetches a thread's share of one operand's k-tiles: k-tile[l][i] = operand[first + i, k_first +
// l], or 0 beyond the edges. It fetches a vector at a time along the dimension in which memory is
// contiguous.
template <class C, class T>
class PackFetcher {
  static constexpr int kWidth = Pack<T>::kSize;
  static constexpr int kPacks = C::kTile * C::kDepth / (kThreads * kWidth);
  static_assert(kPacks * kThreads * kWidth == C::kTile * C::kDepth);
  static_assert(kThreads % (C::kDepth / kWidth) == 0 && kThreads % (C::kTile / kWidth) == 0);

 public:
  __device__ PackFetcher(const Operand<T>& operand, bool packable, std::int64_t first)
      : data_(operand.data), packable_(packable), along_k_(operand.k_stride == 1) {
    const int thread = static_cast<int>(threadIdx.x);
    i_ = along_k_ ? thread / (C::kDepth / kWidth) : thread % (C::kTile / kWidth) * kWidth;
    l_ = along_k_ ? thread % (C::kDepth / kWidth) * kWidth : thread / (C::kTile / kWidth);
    i_step_ = along_k_ ? kThreads / (C::kDepth / kWidth) : 0;
    l_step_ = along_k_ ? 0 : kThreads / (C::kTile / kWidth);
    rows_ = static_cast<int>(min(operand.extent - first, std::int64_t{C::kTile}));
    next_ = (first + i_) * operand.stride + l_ * operand.k_stride;
    step_ = i_step_ * operand.stride + l_step_ * operand.k_stride;
    k_tile_step_ = C::kDepth * operand.k_stride;
  }

  // Loads the next k-tile into registers. Its first `depth` rows are within k.
  __device__ void Load(int depth) {
#pragma unroll
    for (int c = 0; c < kPacks; ++c) {
      const int i = i_ + c * i_step_;
      const int l = l_ + c * l_step_;
      const T* from = data_ + next_ + c * step_;
      const int inside = along_k_ ? (i < rows_ ? depth - l : 0) : (l < depth ? rows_ - i : 0);
      if (packable_ && inside >= kWidth) {
        packs_[c] = LoadPack(from);
      } else {
#pragma unroll
        for (int w = 0; w < kWidth; ++w) packs_[c].v[w] = w < inside ? from[w] : T(0);
      }
    }
    next_ += k_tile_step_;
  }

  __device__ void Store(T (&k_tile)[C::kDepth][C::kPitch]) const {
#pragma unroll
    for (int c = 0; c < kPacks; ++c) {
      const int i = i_ + c * i_step_;
      const int l = l_ + c * l_step_;
      if (along_k_) {
#pragma unroll
        for (int w = 0; w < kWidth; ++w) k_tile[l + w][i] = packs_[c].v[w];
      } else {
        StorePack(&k_tile[l][i], packs_[c]);
      }
    }
  }

 private:
  const T* data_;
  bool packable_, along_k_;
  int i_, l_, i_step_, l_step_;  // the thread's first vector, and the step to the next one
  int rows_;                     // number of values of i before the operand's end
  std::int64_t next_, step_, k_tile_step_;
  Pack<T> packs_[kPacks];
};

template <class C, class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 1)
    MatmulSharedTiledVectorized(Operand<T> a, Operand<T> b, Packable packable, std::int64_t k,
                                T* c) {
  __shared__ __align__(16) T a_k_tile[C::kDepth][C::kPitch];
  __shared__ __align__(16) T b_k_tile[C::kDepth][C::kPitch];
  const std::int64_t column_tiles = (b.extent + C::kTile - 1) / C::kTile;
  const std::int64_t row = blockIdx.x / column_tiles * C::kTile;
  const std::int64_t column = blockIdx.x % column_tiles * C::kTile;

  PackFetcher<C, T> a_fetcher(a, packable.a, row);
  PackFetcher<C, T> b_fetcher(b, packable.b, column);
  ThreadTile<T, C::kTile, C::kEach> tile;
  static_assert(tile.kThreads == kThreads);
  for (std::int64_t k_first = 0; k_first < k; k_first += C::kDepth) {
    const int depth = static_cast<int>(min(k - k_first, std::int64_t{C::kDepth}));
    a_fetcher.Load(depth);
    b_fetcher.Load(depth);
    __syncthreads();  // all threads have read the previous k-tiles
    a_fetcher.Store(a_k_tile);
    b_fetcher.Store(b_k_tile);
    __syncthreads();  // the k-tiles are complete
#pragma unroll
    for (int l = 0; l < C::kDepth; ++l) tile.Multiply(a_k_tile[l], b_k_tile[l]);
  }
  tile.Store(row, column, a.extent, b.extent, packable.c, c);
}

void Enqueue(const MatmulProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  RunTiles<Large, Small>(p, cuda, [&](auto config, unsigned blocks) {
    DispatchReal(p.dtype, [&](auto zero) {
      using T = decltype(zero);
      MatmulSharedTiledVectorized<decltype(config)><<<blocks, kThreads, 0, cuda.handle()>>>(
          OperandA<T>(p), OperandB<T>(p), PackableOf<T>(p), p.k, static_cast<T*>(p.c));
    });
  });
  CUDA_CHECK_LAUNCH(MatmulSharedTiledVectorized);
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulSharedTiledVectorized = CudaMatmul({
    .name = "shared_tiled_vectorized",
    .summary = "tiles in shared memory, moved 16 bytes at a time",
    .source = "S. Boehm's series of SGEMM kernels (2022), extended to partial tiles",
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .cost = TilesCost<Small>,
    .launch = Enqueue,
    .shared = {.launch = LaunchGathered<kMatmulSharedTiledVectorized>},
});
template void LaunchGathered<kMatmulSharedTiledVectorized>(const MatmulProblem&,
                                                           std::span<const TeamShare>, Stream&);

}  // namespace tessera
