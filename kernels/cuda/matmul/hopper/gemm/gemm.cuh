// Matmul on Hopper's tensor cores: the kernel of the strategies `tensor_bf16`, `tensor_f16`,
// `tensor_tf32` and `tensor_f32x3`, the preparation of its operands, and the division of the work.
// ptx.cuh and wgmma.cuh contain the individual instructions.
//
// In `warp_tiled`, every thread alternates between loading, multiplying and waiting. This kernel
// differs as follows:
//
// - The warps of a block are specialized. One warpgroup, the producer, fetches: one of its threads
//   tells TMA which boxes of a and b to load. The other warpgroups, the consumers, multiply; there
//   is one for every 64 rows of the tile. wgmma reads both operands from shared memory directly, so
//   they do not pass through registers. Almost all registers hold sums: 64 x 256 sums take 128
//   registers per thread. Since a fetching thread needs few registers and a multiplying thread
//   many, the producer gives some of its registers to the consumers.
// - Producer and consumers synchronize at two barriers for each of the kStages stages. The arriving
//   bytes complete the "full" barrier, and consumers arrive at the "empty" barrier when wgmma has
//   read the k-tile. So up to kStages k-tiles are in flight. While the results of one tile are
//   being written, k-tiles of the block's next tile are already being fetched.
//
//      producer   wait empty[s], fetch k-tile s --+                  +--> next round
//                                               v                  |
//      consumers               wait full[s], multiply k-tile s, arrive at empty[s]
//
// - A k-tile is 128 bytes deep, and the 16-byte vectors of each row are swizzled. TMA and tensor
//   cores use the same pattern, which costs nothing and avoids all bank conflicts.
// - 16-bit operands may have either layout in shared memory, with k along the rows or across them,
//   so transposes cost nothing. For f32, k has to go along the rows, unless the operand comes
//   through registers, which is possible for one of the two operands (MultiplyTurned).
// - Blocks are persistent: there is one per SM, and each computes tile after tile. The tiles are in
//   the order shown in warp_tiled.cu, so tiles computed at the same time share rows and columns.
//   The path to the first multiplication is short, since a small product takes little longer than
//   that.
// - Two blocks, one below the other, can form a cluster, in which each block fetches half of the
//   columns of b for both blocks.
// - Each consumer copies its results to shared memory box by box, and TMA writes whole lines from
//   there.
// - If there are too few tiles for the SMs, the tiles are made smaller, or k is split into pieces
//   whose sums a second kernel adds, always in the same order. If there are many tiles, but their
//   number is not a multiple of the number of SMs, some tiles are split in two (see stream_k.h).
//
// TMA reads zeros outside a matrix, and writes nothing outside c. It requires addresses and pitches
// that are multiples of 16 bytes. Other operands and results go through scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/cuda/matmul/hopper/gemm/epilogue.cuh"
#include "kernels/cuda/matmul/hopper/gemm/mainloop.cuh"
#include "kernels/cuda/matmul/hopper/gemm/operands.cuh"
#include "kernels/cuda/matmul/hopper/gemm/stream_k.cuh"
#include "kernels/cuda/matmul/hopper/gemm/tuning.cuh"
#include "kernels/cuda/matmul/tiles.cuh"
#include "kernels/cuda/runtime/overlap.cuh"

namespace tessera {

template <class C, bool kMnA, bool kMnB>
__global__ void __cluster_dims__(C::kCluster, 1, 1) __launch_bounds__(C::kThreads, 1)
    MatmulTensor(const __grid_constant__ CUtensorMap a_map,
                 const __grid_constant__ CUtensorMap b_map,
                 const __grid_constant__ CUtensorMap c_map,
                 const __grid_constant__ TensorWork work) {
  using T = typename C::T;
  __shared__ alignas(8) std::uint64_t barriers[2 * C::kStages];
  const std::uint32_t k_tiles =
      (SharedAddress(DynamicShared<char>()) + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
  TensorPipeline<C> pipeline(k_tiles, SharedAddress(barriers));
  // The shuffle tells the compiler that the value is uniform in each warp.
  const int warpgroup = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / C::kWarpgroup, 0);
  const int rank = C::kCluster == 1 ? 0 : static_cast<int>(ClusterRank());
  const int cluster = static_cast<int>(blockIdx.x) / C::kCluster;
  const int clusters = static_cast<int>(gridDim.x) / C::kCluster;

  // While one warp initializes the barriers, the others determine the block's first piece of work.
  // This takes nearly a thousand cycles, because the parameters are not in any cache yet.
  if (threadIdx.x == C::kThreads - kWarpSize) {
    PrefetchMap(&a_map);
    PrefetchMap(&b_map);
    PrefetchMap(&c_map);
    pipeline.Init();
  }
  Piece piece = PieceOf(work.sharing, cluster, clusters, 0);
  TensorPlace place(work, piece);
  if constexpr (C::kCluster == 1) {
    __syncthreads();  // the barriers are initialized
  } else {
    ClusterBarrier();  // the barriers are initialized in all blocks
  }
  WaitForKernelBefore();

  if (warpgroup == C::kConsumers) {
    if constexpr (C::kConsumers > 1) GiveRegistersBack<40>();
    if (threadIdx.x == C::kConsumers * C::kWarpgroup) {
      Abreast abreast(work.steps_of_all, work.steps);
      for (int i = 1; piece.k_tiles != 0; ++i) {
        FetchKTiles<C, kMnA, kMnB>(a_map, b_map, work, place, rank, abreast, pipeline);
        piece = PieceOf(work.sharing, cluster, clusters, i);
        place = TensorPlace(work, piece);
      }
      abreast.Leave();
      AllowNextKernel();
    } else if (work.sharing.shared != 0) {
      const int warp = static_cast<int>(threadIdx.x) % C::kWarpgroup / kWarpSize;
      if (warp >= 1 && warp <= C::kConsumers) PassMessages<C>(work, cluster, clusters, warp - 1);
    }
  } else {
    if constexpr (C::kConsumers > 1) TakeRegisters<232>();
    const int thread = static_cast<int>(threadIdx.x) % C::kWarpgroup;
    const std::uint32_t staging =
        k_tiles + C::kStages * C::kStageBytes + warpgroup * C::kStagingBytes;
    const auto next = [&](int i) {
      piece = PieceOf(work.sharing, cluster, clusters, i);
      place = TensorPlace(work, piece);
    };
    for (int i = 1; piece.k_tiles != 0; next(i++)) {
      typename C::Sum d[C::kColumns / 2];
      if constexpr (kIsTurned<C, kMnA>) {
        MultiplyTurned<C>(place.k_tiles, warpgroup, thread, pipeline, d);
      } else if constexpr (C::kParts == 1) {
        MultiplyKTiles<C, kMnA, kMnB>(place.k_tiles, warpgroup, thread, pipeline, d);
      } else {
        MultiplyParts<C, kMnA, kMnB>(place.k_tiles, warpgroup, thread, pipeline, d);
      }
      if (!piece.ends) {
        StorePartial<C>(d, work, warpgroup, thread);
        continue;
      }
      if (!piece.starts) AddPartial<C>(d, work, warpgroup, thread);
      if constexpr (C::kParts > 1) {
        bool finite = true;
#pragma unroll
        for (float sum : d) finite = finite && fabsf(sum) <= std::numeric_limits<float>::max();
        if (!finite) *work.nonfinite = 1;
      }
      const int row = (place.row_tile * C::kCluster + rank) * C::kRows + warpgroup * C::kGroupRows;
      const int column = place.column_tile * C::kColumns;
      if (sizeof(T) != 2 || C::kParts > 1 || work.floats) {
        StoreTile<C, typename C::Sum, kIsTurned<C, kMnA>>(d, c_map, staging, row, column,
                                                          place.split);
      } else if constexpr (sizeof(T) == 2) {
        StoreTile<C, T, false>(d, c_map, staging, row, column, place.split);
      }
    }
    if (thread == 0) WaitForStoresToRead();
  }
  // No block exits while another may still write to its shared memory.
  if constexpr (C::kCluster > 1) ClusterBarrier();
}

// --- Launch ---

// Returns how many clusters of `blocks` blocks can run on the GPU at the same time, for a kernel
// whose blocks each occupy a whole SM. A GPU consists of groups of SMs of different sizes, and a
// cluster has to fit into one group.
template <class... Parameters>
int ClustersAtATime(void (*kernel)(Parameters...), unsigned threads, std::size_t shared_bytes,
                    int blocks, const CudaStream& stream) {
  if (blocks <= 2) return stream.device().info().multiprocessors / blocks;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count = 0;
  CUDA_CHECK(cudaOccupancyMaxActiveClusters(&count, kernel, &config));
  return count;
}

// A division of the work: the tile, the number of pieces that k is split into, and whether some
// tiles are split between two clusters.
struct TensorPlan {
  int tile = 0;  // an index into the strategy's tiles
  int splits = 1;
  bool shares = false;
  double time = std::numeric_limits<double>::infinity();
};

// Launches the plan. `c` is an array [splits, m, pitch].
template <class C, bool kMnA, bool kMnB, class O>
void LaunchTensor(const MatmulProblem& p, const TensorOperand<typename C::T>& a,
                  const TensorOperand<typename C::T>& b, const TensorPlan& plan, const O* c,
                  std::int64_t pitch, unsigned* nonfinite, CudaStream& stream) {
  using T = typename C::T;
  const auto map = [](const TensorOperand<T>& x, bool mn_major) {
    return MapOf(x, C::kParts, mn_major ? C::kDepth : C::kGroupRows, mn_major ? 128 : C::kRowBytes);
  };
  const CUtensorMap a_map = map(a, kMnA), b_map = map(b, kMnB);

  TensorWork work = kIsTurned<C, kMnA> ? WorkOfTiles<C>(p.n, p.m) : WorkOfTiles<C>(p.m, p.n);
  work.k_tiles = static_cast<int>(CeilDiv(p.k, C::kDepth));
  const std::int64_t split_k_tiles = CeilDiv(work.k_tiles, plan.splits);
  const std::int64_t splits = CeilDiv(work.k_tiles, split_k_tiles);
  const std::int64_t pieces = std::int64_t{work.tiles.value()} * splits;
  const std::int64_t clusters =
      std::min<std::int64_t>(stream.device().info().multiprocessors / C::kCluster, pieces);
  work.sharing = plan.shares ? ShareTiles(pieces, split_k_tiles, clusters)
                             : WholeTiles(pieces, split_k_tiles, clusters);
  work.steps = StepsAbreast(work.sharing, clusters);
  work.steps_of_all = stream.Tickets() + CudaStream::kTickets - 1;
  if (work.sharing.shared != 0) {
    work.partials = stream.Scratch(
        static_cast<std::size_t>(clusters * C::kCluster * C::kRows * C::kColumns) * 4);
    work.written = stream.Tickets();
  }
  work.nonfinite = nonfinite;
  work.floats = std::is_same_v<O, float>;
  const CUtensorMap c_map = MakeTensorMap<O>(c, splits, p.m, p.n, pitch, /*box_rows=*/64,
                                             /*row_bytes=*/128);

  const auto kernel = MatmulTensor<C, kMnA, kMnB>;
  AllowSharedBytes(kernel, C::kSharedBytes);
  LaunchOverlapping(kernel,
                    {static_cast<unsigned>(clusters * C::kCluster), C::kThreads, C::kSharedBytes},
                    stream, a_map, b_map, c_map, work);
}

}  // namespace tessera
