// Products of matrices of signed bytes on Hopper's tensor cores, one product per modulus. Only the
// residues of the products are kept. `ozaki_f64` spends most of its time here.
//
// The kernel differs from the one in gemm.cuh in two ways. First, sums are 32 bits wide and exact,
// since a sum of 2^16 products of two residues is at most 2^30. After that many steps along k, the
// sums are replaced by their residues. Second, a consumer's results, one byte each, do not go
// through shared memory, because the only kernel that reads them accepts any order. Each thread
// writes the results that it holds, 16 bytes at a time, and adjacent threads write adjacent
// vectors. The shared memory that this saves holds another pipeline stage.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/matmul/hopper/gemm/mainloop.cuh"
#include "kernels/cuda/matmul/hopper/gemm/operands.cuh"
#include "kernels/cuda/matmul/hopper/gemm/tuning.cuh"
#include "kernels/cuda/matmul/hopper/ozaki/ozaki.h"

namespace tessera::ozaki {

using ByteTile = TensorTile<std::int8_t, 128, 256, /*kCluster=*/2, /*kStages=*/4, /*kBoxes=*/0,
                            /*kParts=*/1, /*kBatch=*/true>;
inline constexpr int kClusterRows = ByteTile::kRows * ByteTile::kCluster;
inline constexpr int kTileColumns = ByteTile::kColumns;
// The number of k-tiles after which the sums are replaced by their residues.
inline constexpr int kExactTiles = (1 << 16) / ByteTile::kDepth;

// Residues of a matrix with k along the rows: [kModuli, rows, pitch].
struct Residues {
  std::int8_t* data;
  std::int64_t rows, pitch;
};

// Residues of a product are stored in vectors of 16. A tile of c has [2 consumers, 8, 128 threads]
// vectors. Byte 4 j + i of a thread's vector v is the residue of its sum d[16 v + 4 j + i];
// wgmma.cuh describes the position of that sum in the tile. There are [kModuli, row tiles, column
// tiles] tiles, and a row tile has the rows of one block.
inline constexpr int kVectors = kTileColumns / 2 / 16;
inline constexpr int kTileVectors = ByteTile::kConsumers * kVectors * ByteTile::kWarpgroup;

// Called by a consumer. Sets d to the residues of the product of one piece of work.
__device__ inline void MultiplyBytes(int k_tiles, int consumer, int thread, const Modulus& modulus,
                                     TensorPipeline<ByteTile>& pipeline, std::int32_t (&d)[128]) {
  for (int first = 0; first < k_tiles; first += kExactTiles) {
    const int end = min(first + kExactTiles, k_tiles);
    int last = 0;
    for (int k_tile = first; k_tile < end; ++k_tile, pipeline.Next()) {
      pipeline.WaitUntilFull();
      ProductsFence();
      TensorKTile<ByteTile, false, false>(pipeline, consumer).Multiply(0, 0, k_tile != 0, d);
      CommitProducts();
      WaitForProducts<1>();
      if (k_tile != first) pipeline.Release(last, thread);
      last = pipeline.stage();
    }
    WaitForProducts<0>();
    SumsAreComplete(d);
    pipeline.Release(last, thread);
#pragma unroll
    for (std::int32_t& sum : d) sum = Residue(sum, modulus);
    SumsAreComplete(d);  // required before the next product adds to the sums
  }
}

__device__ inline std::uint32_t PackBytes(const std::int32_t* x) {
  const std::uint32_t low = __byte_perm(x[0], x[1], 0x0040), high = __byte_perm(x[2], x[3], 0x0040);
  return __byte_perm(low, high, 0x5410);
}

// work.k_tiles counts the k-tiles of all moduli, as if k were split into kModuli pieces. If the
// flag `plain` is set, nothing is computed.
__global__ void __cluster_dims__(ByteTile::kCluster, 1, 1) __launch_bounds__(ByteTile::kThreads, 1)
    MultiplyResidues(const __grid_constant__ CUtensorMap a_map,
                     const __grid_constant__ CUtensorMap b_map,
                     const __grid_constant__ TensorWork work, const __grid_constant__ Table table,
                     const unsigned* plain, uint4* out) {
  using C = ByteTile;
  if (*plain != 0) return;
  __shared__ alignas(8) std::uint64_t barriers[2 * C::kStages];
  const std::uint32_t k_tiles =
      (SharedAddress(DynamicShared<char>()) + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
  TensorPipeline<C> pipeline(k_tiles, SharedAddress(barriers));
  // The shuffle tells the compiler that the value is uniform in each warp.
  const int warpgroup = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / C::kWarpgroup, 0);
  const int rank = static_cast<int>(ClusterRank());
  const int cluster = static_cast<int>(blockIdx.x) / C::kCluster;
  const int clusters = static_cast<int>(gridDim.x) / C::kCluster;
  if (threadIdx.x == 0) {
    PrefetchMap(&a_map);
    PrefetchMap(&b_map);
    pipeline.Init();
  }
  ClusterBarrier();  // the barriers are initialized

  const auto piece_of = [&](int i) { return PieceOf(work.sharing, cluster, clusters, i); };
  if (warpgroup == C::kConsumers) {
    GiveRegistersBack<40>();
    if (threadIdx.x == C::kConsumers * C::kWarpgroup) {
      Abreast alone;
      Piece piece = piece_of(0);
      for (int i = 1; piece.k_tiles != 0; piece = piece_of(i++)) {
        FetchKTiles<C, false, false>(a_map, b_map, work, TensorPlace(work, piece), rank, alone,
                                     pipeline);
      }
    }
  } else {
    TakeRegisters<232>();
    const int thread = static_cast<int>(threadIdx.x) % C::kWarpgroup;
    const int column_tiles = work.tiles.value() / work.row_tiles;
    Piece piece = piece_of(0);
    for (int i = 1; piece.k_tiles != 0; piece = piece_of(i++)) {
      const TensorPlace place(work, piece);
      std::int32_t d[C::kColumns / 2];
      MultiplyBytes(place.k_tiles, warpgroup, thread, table.moduli[place.split], pipeline, d);
      const std::int64_t row_tile =
          std::int64_t{place.split * work.row_tiles + place.row_tile} * C::kCluster + rank;
      uint4* const to = out + (row_tile * column_tiles + place.column_tile) * kTileVectors +
                        warpgroup * (kVectors * C::kWarpgroup) + thread;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const std::int32_t* const sums = d + 16 * v;
        to[v * C::kWarpgroup] = {PackBytes(sums), PackBytes(sums + 4), PackBytes(sums + 8),
                                 PackBytes(sums + 12)};
      }
    }
  }
  // No block exits while another may still write to its shared memory.
  ClusterBarrier();
}

// Enqueues the products of residues. `a` and `b` are the residues of the operands; the rows of a
// are rows of c, and the rows of b are columns of c. `out` is memory for the residues of the
// product's tiles.
inline void EnqueueResidueProducts(const Residues& a, const Residues& b, std::int64_t k,
                                   const unsigned* plain, uint4* out, CudaStream& stream) {
  using C = ByteTile;
  const auto map = [k](const Residues& x) {
    return MakeTensorMap<std::int8_t>(x.data, kModuli, x.rows, k, x.pitch, C::kGroupRows,
                                      C::kRowBytes);
  };
  TensorWork work = WorkOfTiles<C>(a.rows, b.rows);
  const std::int64_t k_tiles = CeilDiv(k, C::kDepth);
  work.k_tiles = static_cast<int>(k_tiles * kModuli);
  const std::int64_t pieces = std::int64_t{work.tiles.value()} * kModuli;
  const std::int64_t clusters =
      std::min<std::int64_t>(stream.device().info().multiprocessors / C::kCluster, pieces);
  work.sharing = WholeTiles(pieces, k_tiles, clusters);
  AllowSharedBytes(MultiplyResidues, C::kSharedBytes);
  MultiplyResidues<<<static_cast<unsigned>(clusters * C::kCluster), C::kThreads, C::kSharedBytes,
                     stream.handle()>>>(map(a), map(b), work, kTable, plain, out);
  CUDA_CHECK_LAUNCH(MultiplyResidues);
}

}  // namespace tessera::ozaki
