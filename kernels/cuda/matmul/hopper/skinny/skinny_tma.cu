// Matmul with few rows or few columns as in `skinny`, but with operands fetched by Hopper's TMA.
//
// In `skinny` every warp copies, waits for the k-tile and multiplies. After each k-tile of 8 or 16
// KiB, all threads of the block wait at a barrier, and no thread starts a load until the last
// thread has arrived. Here one thread keeps TMA busy with k-tiles of 32 KiB, as many as fit in
// shared memory. Each warp that multiplies synchronizes with that thread independently, at barriers
// that belong to the k-tiles (see gemm.cuh). So about 200 KiB are in flight to an SM at any time,
// no matter what its warps are doing.
//
// - A tile is the product of 128 rows of the large operand and all vectors of the small one. Each
//   tile is divided along k into k-tiles, which the blocks of a cluster, up to 8, share evenly. The
//   size of the clusters is chosen so that all SMs have about the same amount of work:
//
//         k ->
//       | block 0  | block 1  |   tile 0
//       | block 2  | block 3  |   tile 1
//
//   Then each block adds up one part of the tile's results: the other blocks store their sums for
//   that part in its shared memory, and it adds them in the order of k. No sums go through global
//   memory, and no second kernel is needed to add them.
// - Blocks are persistent: they fetch the next tile while the results of the current one are being
//   added.
// - For f32, without tensor cores, a warp takes 128 rows of the tile, 4 per lane, and some of the
//   k-tile's steps. For 4 steps along k, a lane needs 4 reads of 16 bytes for its rows of the large
//   operand, and one read per vector of the small operand, the same for all lanes. With 16 vectors,
//   there are 20 reads for 256 multiply-adds, for any layout of the operands. The warps' sums are
//   added at the end of a tile.
// - For 16-bit types, with tensor cores, a warp takes 16 rows of the tile, and all steps of the
//   k-tile.
//
// Cost for 8192 x 1 x 8192, f32: 2^27 flops, and 256 MiB that are read once, in 58 us at 4.6 TB/s.
// There are 64 tiles of 128 k-tiles, and each block computes half a tile. The small operand is read
// again from the L2 for every tile, which adds an eighth to the traffic with 16 vectors.
//
// If the address or pitch of the large operand is not a multiple of 16 bytes, `skinny` computes the
// product. A small operand with such an address or pitch is copied. The shape and the device
// determine the order in which the sums of an element are added.
//
// Lesson: kernels/lessons/hopper_product.cu
#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "kernels/cuda/matmul/hopper/skinny/skinny_sums.cuh"

namespace tessera {

extern const Strategy<MatmulProblem> kMatmulSkinny;  // used for operands that TMA cannot read

namespace {

using namespace skinny_tma;

template <class C>
__device__ void FetchTile(const CUtensorMap& wide_map, const CUtensorMap& thin_map,
                          const Share& share, int tile, TensorPipeline<C>& pipeline) {
  constexpr int kBoxDepth = kBoxRow / int{sizeof(typename C::T)};
  const int row = tile * C::kWide;
  for (int k_tile = share.first; k_tile < share.end; ++k_tile, pipeline.Next()) {
    const int k = k_tile * C::kDepth;
    pipeline.WaitUntilEmpty();
    BarrierExpect(pipeline.full(), C::kBytes);
#pragma unroll
    for (int i = 0; i < C::kWideBoxes; ++i) {
      const std::uint32_t to = pipeline.a() + i * C::kWideBoxBytes;
      if constexpr (C::kAlongK) {
        LoadBox(to, &wide_map, k + i * kBoxDepth, row, 0, pipeline.full());
      } else {
        LoadBox(to, &wide_map, row + i * kBoxDepth, k, 0, pipeline.full());
      }
    }
#pragma unroll
    for (int i = 0; i < C::kThinBoxes; ++i)
      LoadBox(pipeline.b() + i * C::kThinBoxBytes, &thin_map,
              C::kThinAlongK ? k + i * kBoxDepth : 0, C::kThinAlongK ? 0 : k, 0, pipeline.full());
  }
}

// Runs in the warpgroup of the fetching thread, which has to call every barrier of the cluster. The
// thread requests the k-tiles of a tile before it waits for the results of the previous tile.
template <class C, class Out>
__device__ void Fetch(const CUtensorMap& wide_map, const CUtensorMap& thin_map,
                      const Work<Out>& work, TensorPipeline<C> pipeline) {
  const Share share(work);
  for (int tile = share.tile; tile < work.tiles; tile += share.step) {
    if (threadIdx.x == C::kMultiplying) FetchTile<C>(wide_map, thin_map, share, tile, pipeline);
    __syncwarp();
    if (tile != share.tile) {
      ClusterWait();  // the sums of the previous tile have arrived
      ClusterArrive();
    }
    ClusterWait();  // all have started or, after the first tile, read its sums
    ClusterArrive();
  }
  ClusterWait();
}

// Calls f(std::integral_constant<int, i>{}) for i = 0, kStep, ... below kEnd.
template <int kStep, int kEnd, int kAt = 0, class F>
__device__ void ForEachOf(F&& f) {
  if constexpr (kAt < kEnd) {
    f(std::integral_constant<int, kAt>{});
    ForEachOf<kStep, kEnd, kAt + kStep>(f);
  }
}

template <class C, class Out>
__device__ void Multiply(const Work<Out>& work, float* cells, TensorPipeline<C> pipeline) {
  using Sums = std::conditional_t<C::kHalves, TensorSums<C>, VectorSums<C>>;
  constexpr int kBarrier = 1;  // the consumers' named barrier
  const Share share(work);
  const int thread = static_cast<int>(threadIdx.x);
  // The shuffle tells the compiler that the value is uniform in each warp.
  const int warp = __shfl_sync(kFullMask, thread / kWarpSize, 0), lane = thread % kWarpSize;
  // [blocks of the cluster][results that this block adds up]
  const float* const received = cells + C::kCellBytes / 4;
  const int results = CeilDiv(C::kResults, share.blocks);
  for (int tile = share.tile; tile < work.tiles; tile += share.step) {
    Sums sums;
#pragma unroll
    for (float& sum : sums.v) sum = 0;
#pragma unroll 1
    for (int k_tile = share.first; k_tile < share.end; ++k_tile) {
      pipeline.WaitUntilFull();
      sums.Add(pipeline.a(), pipeline.b(), warp, lane);
      __syncwarp();  // all lanes have read the k-tile
      pipeline.Release(pipeline.stage(), lane);
      pipeline.Next();
    }

    ClusterWait();  // the cluster's blocks run and have read the sums of the previous tile
    __syncwarp();   // NamedBarrier needs converged warps, and lanes may have diverged
    const auto send = [&](int result, float sum) {
      const int block = result / results;
      StoreSharedAt(SharedAddress(received + share.rank * results + result - block * results),
                    static_cast<unsigned>(block), sum);
    };
    if constexpr (C::kWarpsK == 1) {
      sums.ForEach(warp, lane, [&](int row, int vector, float sum) {
        if (vector < work.vectors) send(vector * C::kWide + row, sum);
      });
    } else {
      ForEachOf<C::kAtOnce, C::kVectors>([&](auto first) {
        if (first >= work.vectors) return;
        NamedBarrier(kBarrier, C::kMultiplying);  // the old sums in the cells have been read
        sums.template Put<first>(cells, warp, lane);
        NamedBarrier(kBarrier, C::kMultiplying);  // the sums of all warps are in the cells
        for (int e = thread; e < C::kAtOnce * C::kWide; e += C::kMultiplying) {
          float sum = cells[e];
#pragma unroll
          for (int part = 1; part < C::kWarpsK; ++part)
            sum += cells[part * (C::kAtOnce * C::kWide) + e];
          send(first * C::kWide + e, sum);
        }
      });
    }
    ClusterArrive();
    ClusterWait();  // all sums have arrived
    for (int e = thread; e < results; e += C::kMultiplying) {
      float sum = received[e];
      for (int block = 1; block < share.blocks; ++block) sum += received[block * results + e];
      const int result = share.rank * results + e;
      if (result >= C::kResults) break;
      work.Store(std::int64_t{tile} * C::kWide + result % C::kWide, result / C::kWide, sum);
    }
    if (tile + share.step < work.tiles) ClusterArrive();  // the sums have been read
  }
}

template <class C, class Out>
__global__ void __launch_bounds__(C::kThreads, 1)
    MatmulSkinnyTma(const __grid_constant__ CUtensorMap wide_map,
                    const __grid_constant__ CUtensorMap thin_map,
                    const __grid_constant__ Work<Out> work) {
  __shared__ alignas(8) std::uint64_t barriers[2 * C::kStages];
  char* const memory = DynamicShared<char>();
  const std::uint32_t begin = SharedAddress(memory);
  const std::uint32_t k_tiles = (begin + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
  auto* const cells =
      reinterpret_cast<float*>(memory + (k_tiles - begin) + C::kStages * C::kStageBytes);
  const TensorPipeline<C> pipeline(k_tiles, SharedAddress(barriers));
  if (threadIdx.x == C::kMultiplying) {
    PrefetchMap(&wide_map);
    PrefetchMap(&thin_map);
    pipeline.Init();
  }
  __syncthreads();  // the barriers are initialized
  ClusterArrive();
  if (threadIdx.x < C::kMultiplying) {
    if constexpr (C::kMovesRegisters) TakeRegisters<232>();
    Multiply<C>(work, cells, pipeline);
  } else {
    if constexpr (C::kMovesRegisters) GiveRegistersBack<40>();
    WaitForKernelBefore();  // the previous kernel may have copied an operand
    Fetch<C>(wide_map, thin_map, work, pipeline);
  }
}

// --- Launch ---

// The number of blocks in a cluster (they share a tile), and the number of clusters to launch.
struct Clusters {
  int blocks, count;
};

// Returns the clusters with which the last block finishes earliest. `fitting` returns how many
// clusters of a given size can run at the same time, which may be fewer than the SMs could hold.
template <class Fitting>
Clusters ChooseClusters(std::int64_t tiles, std::int64_t k_tiles, int multiprocessors,
                        Fitting fitting) {
  constexpr std::int64_t kEnd = 2;  // the time to finish a tile, in k-tiles that a block could read
  Clusters best{1, 1};
  auto least = std::numeric_limits<std::int64_t>::max();
  for (int blocks = 1; blocks <= std::min<std::int64_t>(kMostBlocks, k_tiles); ++blocks) {
    const auto time = [&](int count) {
      return count == 0 ? least : CeilDiv(tiles, count) * (CeilDiv(k_tiles, blocks) + kEnd);
    };
    if (time(multiprocessors / blocks) >= least) continue;
    const int count = fitting(blocks);
    if (time(count) >= least) continue;
    least = time(count);
    best = {blocks, static_cast<int>(std::min<std::int64_t>(count, tiles))};
  }
  return best;
}

// Returns an operand as it is in memory. With a pitch of 1, it counts as contiguous along k.
template <class T>
StoredMatrix Stored(const Operand<T>& x, std::int64_t k) {
  if (x.k_stride == 1) return {.data = x.data, .rows = x.extent, .columns = k, .pitch = x.stride};
  return {.data = x.data, .rows = k, .columns = x.extent, .pitch = x.k_stride, .mn_major = true};
}

// Returns whether TMA can read the small operand in the layout that the tile type C requires.
template <class C>
bool IsReadable(const StoredMatrix& thin) {
  return thin.mn_major != C::kThinAlongK && thin.IsReadable(sizeof(typename C::T));
}

// Returns the small operand, or a copy of it that TMA can read.
template <class C, class T = typename C::T>
TensorOperand<T> Prepared(const StoredMatrix& thin, CudaStream& stream) {
  if (IsReadable<C>(thin)) return thin.InPlace<T>();
  return thin.mn_major ? Transposed<T, T>(thin, stream) : Copied<T, T>(thin, stream);
}

template <class C, class Out>
void Run(const MatmulProblem& p, const StoredMatrix& wide, const StoredMatrix& thin,
         CudaStream& stream) {
  using T = typename C::T;
  const std::int64_t rows = std::max(p.m, p.n), vectors = std::min(p.m, p.n);
  const std::int64_t tiles = CeilDiv(rows, C::kWide), k_tiles = CeilDiv(p.k, C::kDepth);
  const auto kernel = MatmulSkinnyTma<C, Out>;
  AllowSharedBytes(kernel, C::kSharedBytes);
  const Clusters clusters =
      ChooseClusters(tiles, k_tiles, stream.device().info().multiprocessors, [&](int blocks) {
        return ClustersAtATime(kernel, C::kThreads, C::kSharedBytes, blocks, stream);
      });
  const bool a_is_wide = p.m >= p.n;
  const Work<Out> work{
      .tiles = static_cast<int>(tiles),
      .k_tiles = static_cast<int>(k_tiles),
      .wide = static_cast<int>(rows),
      .vectors = static_cast<int>(vectors),
      .c = static_cast<Out*>(p.c),
      .wide_stride = a_is_wide ? p.n : 1,
      .thin_stride = a_is_wide ? 1 : p.n,
  };
  const CUtensorMap wide_map = MapOf(wide.InPlace<T>(), 1, C::kWideBoxRows, C::kWideBoxRowBytes);
  const CUtensorMap thin_map = MapOf(Prepared<C>(thin, stream), 1, C::kThinBoxRows,
                                     C::kThinBoxRowBytes, /*permuted=*/C::kHalves);
  // Even a single block is launched as a cluster. Without a cluster, ClusterWait would return only
  // when all threads of the block wait there, and the fetching thread is the last to wait.
  LaunchOverlapping(kernel,
                    {static_cast<unsigned>(clusters.count * clusters.blocks), C::kThreads,
                     C::kSharedBytes, static_cast<unsigned>(clusters.blocks)},
                    stream, wide_map, thin_map, work);
}

template <class T, class Out, bool kAlongK>
void RunLayout(const MatmulProblem& p, const StoredMatrix& wide, const StoredMatrix& thin,
               CudaStream& stream) {
  const std::int64_t most = std::min(p.m, p.n);
  if constexpr (sizeof(T) == 4) {
    if (most <= 1) return Run<Tile<T, 1, kAlongK>, Out>(p, wide, thin, stream);
    if (most <= 4) return Run<Tile<T, 4, kAlongK>, Out>(p, wide, thin, stream);
  }
  const auto run_many = [&](auto vectors) {
    using Across = Tile<T, vectors(), kAlongK, false>;
    if (IsReadable<Across>(thin)) return Run<Across, Out>(p, wide, thin, stream);
    Run<Tile<T, vectors(), kAlongK>, Out>(p, wide, thin, stream);
  };
  DispatchAtLeast<16, 32>(most, run_many);
}

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  DispatchMatmul(p, [&](auto t, auto o) {
    using T = decltype(t);
    using Out = decltype(o);
    if constexpr (std::is_same_v<T, float> || sizeof(T) == 2) {
      const StoredMatrix a = Stored(OperandA<T>(p), p.k), b = Stored(OperandB<T>(p), p.k);
      const auto [wide, thin] = p.m >= p.n ? std::pair(a, b) : std::pair(b, a);
      if (!wide.IsReadable(sizeof(T))) {
        kMatmulSkinny.launch(p, stream);
      } else if (wide.mn_major) {
        RunLayout<T, Out, false>(p, wide, thin, stream);
      } else {
        RunLayout<T, Out, true>(p, wide, thin, stream);
      }
    }
  });
}

double Roundoff(const MatmulProblem& p) { return kMatmulSkinny.roundoff(p); }
Cost CostOf(const MatmulProblem& p) { return kMatmulSkinny.cost(p); }

std::string Refuses(const MatmulProblem& p) {
  return std::min(p.m, p.n) <= kMostVectors ? TensorRefusal(p) : "m or n of at most 32";
}

// Either the small operand needs a copy with k along the rows, or `skinny` computes the product.
std::uint64_t ScratchOf(const MatmulProblem& p) {
  return std::max(CopyScratch<float>(std::min(p.m, p.n), p.k), kMatmulSkinny.scratch(p));
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulSkinnyTma = HopperMatmul({
    .name = "skinny_tma",
    .summary = "skinny, with operands fetched by Hopper's TMA and tiles shared within a cluster",
    .source = "warp-specialized kernels as in CUTLASS, with one operand a few vectors wide",
    .dtypes = DTypesOf(DType::kF32, DType::kF16, DType::kBF16),
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .refuses = Refuses,
    .scratch = ScratchOf,
});

}  // namespace tessera
