// Matmul as in `warp_tiled`, with operands fetched by Hopper's TMA and multiply-adds arranged so
// that the registers keep up.
//
// `warp_tiled` is limited not by memory but by how fast an SM issues instructions and reads
// registers. A quarter of an SM issues one instruction per cycle, so each instruction that is not a
// multiply-add takes the place of one. Even-numbered registers are in one bank and odd-numbered
// ones in another, and each bank seems to deliver one register per cycle. A multiply-add reads
// three registers. It takes two cycles by itself, or three if all three registers are in one bank.
// If it reads the same register in the same operand position as the previous multiply-add, that
// value comes from a latch (".reuse" in the machine code). It then takes one cycle if the other two
// registers are in different banks. By this count, the inner loop of `warp_tiled` needs 1.42 cycles
// per multiply-add; the measured value is 1.41. For most of some twenty other arrangements, too,
// the measured value was within a tenth of the count. This kernel is therefore arranged as follows:
//
// - A thread computes 8 x 16 elements. The 24 operands of a step take 6 loads and serve 128
//   multiply-adds, and each element of a serves 16 consecutive ones. With 128 sums per thread,
//   there are enough registers for 8 warps per SM. These are enough, since a warp's multiply-adds
//   do not wait for each other.
// - The multiply-adds are not interleaved with copies. As in `tensor_bf16`, a producer uses TMA to
//   fetch the operands, and each consumer (here a warp) waits for them at barriers independently of
//   the others. In a k-tile of 16 steps, 2048 of 2176 instructions are multiply-adds, against 1024
//   of 1183 in `warp_tiled`.
// - The rows of a thread's tile are computed alternately from left to right and from right to left,
//   so that one operand also stays the same from the end of a row to the beginning of the next:
//
//            b0   b1   b2   ..  b15
//       a0    -------------------->
//       a1    <--------------------
//       a2    -------------------->
//
// - A sum and the element of b that it is computed with are in different banks (see StorePartial).
// - Blocks are persistent, one per SM, and none of them idles at the end, because the tiles that
//   remain after the last full round are divided evenly (see stream_k.h). The block that computes
//   the rest of a tile starts from the sums of the tile's first part, so each sum stays one chain
//   in order.
//
// Both operands are fetched with their index i (along m or n) along the rows, because threads read
// them in this order. An operand that is contiguous along k is first transposed in scratch memory.
// For a side of 4096 that is 128 MiB of traffic, about 1 % of the time, and a smaller fraction for
// larger sides. Without the transpose, a thread would load 4 steps of a row together, and the
// registers of a step would be in the same bank for all of its rows. Such a kernel reaches 0.85 to
// 0.90 of the speed of cuBLAS.
//
// Cost for 4096 x 4096 x 4096: 2^37 flops; 3 GiB of loads in tiles of 128 x 256, most of them from
// the L2, and 128 MiB for the copy of an operand that needs one. Products that do not fill the chip
// with such tiles, or that are too narrow to be worth a copy, go to `warp_tiled`.
//
// Lesson: kernels/lessons/hopper_product.cu
#include "kernels/cuda/matmul/hopper/gemm/stream_k.h"
#include "kernels/cuda/matmul/hopper/strategy.cuh"

namespace tessera {

extern const Strategy<MatmulProblem> kMatmulWarpTiled;  // used for products that are too small

namespace {

// The tile of a block and how it is fetched. TensorPipeline uses these names.
struct Tile {
  static constexpr int kRows = 128, kColumns = 256;
  static constexpr int kDepth = 16;  // steps along k per k-tile
  static constexpr int kStages = 8;
  static constexpr int kBytesA = kRows * kDepth * 4, kBytesB = kColumns * kDepth * 4;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kAlignment = 128;  // required for a box in shared memory
  static constexpr int kSharedBytes = kAlignment + kStages * kStageBytes;
  static constexpr int kConsumers = 8, kCluster = 1;  // consumers are warps
  static constexpr int kMultiplying = kConsumers * kWarpSize;
  static constexpr int kThreads = kMultiplying + 128;  // plus a warpgroup that fetches
  static constexpr int kGroup = 16;                    // tile rows per group of blocks
};
using Pipeline = TensorPipeline<Tile>;

constexpr int kWidth = Pack<float>::kSize;
constexpr int kLanesY = 8, kLanesX = 4;
constexpr int kEachY = 8, kEachX = 16;  // elements per thread
constexpr int kWarpRows = kLanesY * kEachY, kWarpColumns = kLanesX * kEachX;
constexpr int kWarpsX = Tile::kColumns / kWarpColumns;

// The parameters of a launch.
struct Work {
  int m, n;
  int row_tiles, column_tiles;
  Sharing sharing;
  bool c_packable;
  float* c;
  float* partials;         // [blocks, Tile::kRows * Tile::kColumns]
  std::uint32_t* written;  // [blocks], set once a partial is written; 0 between launches
};

// --- Which block computes what ---

__device__ Piece PieceOf(const Work& work, int i) {
  return PieceOf(work.sharing, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), i);
}

__device__ TilePlace PlaceOf(const Work& work, int tile) {
  const TilePlace place = GroupedTile<Tile::kGroup>(tile, work.row_tiles, work.column_tiles);
  return {place.row * Tile::kRows, place.column * Tile::kColumns};
}

// --- A thread's share of a tile ---

// The load is volatile, so that the compiler keeps it in order with the waits for barriers, which
// are volatile as well.
__device__ Pack<float> LoadShared(std::uint32_t from) {
  Pack<float> pack;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(pack.v[0]), "=f"(pack.v[1]), "=f"(pack.v[2]), "=f"(pack.v[3])
               : "r"(from));
  return pack;
}

// A thread's elements of one operand for a step, in vectors that are kLanes vectors apart.
template <int kEach, int kLanes>
struct Fragment {
  float v[kEach];

  __device__ void Load(std::uint32_t from) {
#pragma unroll
    for (int g = 0; g < kEach / kWidth; ++g) {
      const Pack<float> pack = LoadShared(from + g * kLanes * int{sizeof(pack)});
#pragma unroll
      for (int w = 0; w < kWidth; ++w) v[g * kWidth + w] = pack.v[w];
    }
  }
};

struct Operands {
  Fragment<kEachY, kLanesY> a;
  Fragment<kEachX, kLanesX> b;

  // `from_a` and `from_b` are the addresses of the thread's first element in the step's rows of the
  // k-tiles.
  __device__ void Load(std::uint32_t from_a, std::uint32_t from_b) {
    a.Load(from_a);
    b.Load(from_b);
  }
};

struct Sums {
  float v[kEachY][kEachX];

  __device__ void Clear() {
#pragma unroll
    for (auto& row : v)
#pragma unroll
      for (float& sum : row) sum = 0;
  }

  __device__ void Multiply(const Operands& step) {
#pragma unroll
    for (int i = 0; i < kEachY; ++i)
#pragma unroll
      for (int j = 0; j < kEachX; ++j) {
        const int x = i % 2 == 0 ? j : kEachX - 1 - j;
        v[i][x] = fma(step.a.v[i], step.b.v[x], v[i][x]);
      }
  }

  // StorePartial and LoadPartial write and read partial sums in a block's memory. The four
  // registers of a 16-byte store are consecutive, and the first has an even number; the same is
  // true of a load of b. Adjacent sums are swapped here, so that the compiler keeps sum j and b[j]
  // in different banks.
  __device__ void StorePartial(float* partial) const {
    auto* to = reinterpret_cast<float4*>(partial) + threadIdx.x;
#pragma unroll
    for (const auto& row : v)
#pragma unroll
      for (int j = 0; j < kEachX; j += kWidth, to += Tile::kMultiplying)
        __stcg(to, make_float4(row[j + 1], row[j], row[j + 3], row[j + 2]));
  }
  __device__ void LoadPartial(const float* partial) {
    const auto* from = reinterpret_cast<const float4*>(partial) + threadIdx.x;
#pragma unroll
    for (auto& row : v)
#pragma unroll
      for (int j = 0; j < kEachX; j += kWidth, from += Tile::kMultiplying) {
        const float4 pack = __ldcg(from);
        row[j + 1] = pack.x, row[j] = pack.y, row[j + 3] = pack.z, row[j + 2] = pack.w;
      }
  }

  // `row` and `column` are the position of the thread's first element in c.
  __device__ void Store(const Work& work, std::int64_t row, std::int64_t column) const {
#pragma unroll
    for (int i = 0; i < kEachY; ++i) {
      const std::int64_t r = row + i / kWidth * kLanesY * kWidth + i % kWidth;
      if (r >= work.m) continue;
#pragma unroll
      for (int j = 0; j < kEachX; j += kWidth)
        StoreClipped(v[i] + j, column + j * kLanesX, work.n, work.c_packable, work.c + r * work.n);
    }
  }
};

// --- The kernel ---

__device__ void Fetch(const CUtensorMap& a_map, const CUtensorMap& b_map, const Work& work,
                      Pipeline pipeline) {
  for (int i = 0;; ++i) {
    const Piece piece = PieceOf(work, i);
    if (piece.k_tiles == 0) return;
    const TilePlace place = PlaceOf(work, piece.tile);
    const int row = static_cast<int>(place.row), column = static_cast<int>(place.column);
    int k = piece.first * Tile::kDepth;
    for (int s = 0; s < piece.k_tiles; ++s, k += Tile::kDepth, pipeline.Next()) {
      pipeline.WaitUntilEmpty();
      BarrierExpect(pipeline.full(), Tile::kStageBytes);
      LoadBox(pipeline.a(), &a_map, row, k, 0, pipeline.full());
      LoadBox(pipeline.b(), &b_map, column, k, 0, pipeline.full());
    }
  }
}

// Adds the products of `k_tiles` k-tiles. `at_a` and `at_b` are the byte offsets of the thread's
// first element in a k-tile.
__device__ void MultiplyKTiles(int k_tiles, int lane, std::uint32_t at_a, std::uint32_t at_b,
                               Pipeline& pipeline, Sums& sums) {
  constexpr int kPitchA = Tile::kRows * 4, kPitchB = Tile::kColumns * 4;
  Operands operands[2];
  pipeline.WaitUntilFull();
  std::uint32_t a = pipeline.a() + at_a, b = pipeline.b() + at_b;
  operands[0].Load(a, b);
#pragma unroll 1
  for (; k_tiles > 0; --k_tiles) {
    const int stage = pipeline.stage();
    pipeline.Next();
#pragma unroll
    for (int l = 0; l < Tile::kDepth; ++l) {
      const int next = (l + 1) % Tile::kDepth;
      if (next == 0 && k_tiles > 1) {  // otherwise the load below is useless but harmless
        pipeline.WaitUntilFull();
        a = pipeline.a() + at_a, b = pipeline.b() + at_b;
      }
      operands[next % 2].Load(a + next * kPitchA, b + next * kPitchB);
      sums.Multiply(operands[l % 2]);
    }
    __syncwarp();  // all lanes have loaded the last step of the k-tile
    pipeline.Release(stage, lane);
  }
  static_assert(Tile::kDepth % 2 == 0, "the first operands of a k-tile have to be operands[0]");
}

__device__ void Multiply(const Work& work, int warp, int lane, Pipeline pipeline) {
  constexpr int kBarrier = 1;  // used by the consumers
  constexpr std::size_t kPartial = Tile::kRows * Tile::kColumns;
  const int y = warp / kWarpsX * kWarpRows + lane / kLanesX * kWidth;
  const int x = warp % kWarpsX * kWarpColumns + lane % kLanesX * kWidth;
  for (int i = 0;; ++i) {
    const Piece piece = PieceOf(work, i);
    if (piece.k_tiles == 0) return;
    Sums sums;
    if (piece.starts) {
      sums.Clear();
    } else {
      if (threadIdx.x == 0) WaitForPartial(work.written + blockIdx.x - 1);
      NamedBarrier(kBarrier, Tile::kMultiplying);  // the partial sums have been written
      sums.LoadPartial(work.partials + (blockIdx.x - 1) * kPartial);
    }
    MultiplyKTiles(piece.k_tiles, lane, y * 4, x * 4, pipeline, sums);
    if (piece.ends) {
      const TilePlace place = PlaceOf(work, piece.tile);
      sums.Store(work, place.row + y, place.column + x);
    } else {
      sums.StorePartial(work.partials + blockIdx.x * kPartial);
      __threadfence();
      NamedBarrier(kBarrier, Tile::kMultiplying);  // all threads have stored their sums
      if (threadIdx.x == 0) AnnouncePartial(work.written + blockIdx.x);
    }
  }
}

__global__ void __launch_bounds__(Tile::kThreads, 1)
    MatmulWarpTiledTma(const __grid_constant__ CUtensorMap a_map,
                       const __grid_constant__ CUtensorMap b_map,
                       const __grid_constant__ Work work) {
  __shared__ alignas(8) std::uint64_t barriers[2 * Tile::kStages];
  const std::uint32_t k_tiles = (SharedAddress(DynamicShared<char>()) + Tile::kAlignment - 1) /
                                Tile::kAlignment * Tile::kAlignment;
  const Pipeline pipeline(k_tiles, SharedAddress(barriers));
  // The shuffle tells the compiler that the value is the same in all lanes of a warp.
  const int warp = __shfl_sync(kFullMask, WarpIndex(), 0);
  if (threadIdx.x == 0) pipeline.Init();
  __syncthreads();  // the barriers are initialized
  if (warp >= Tile::kConsumers) {
    GiveRegistersBack<40>();
    if (threadIdx.x == Tile::kMultiplying) Fetch(a_map, b_map, work, pipeline);
  } else {
    TakeRegisters<232>();
    Multiply(work, warp, LaneIndex(), pipeline);
  }
}

// --- Launch ---

// Returns the operand with k across its rows, transposed or copied if necessary.
TensorOperand<float> Prepared(const StoredMatrix& x, CudaStream& stream) {
  if (!x.mn_major) return Transposed<float, float>(x, stream);
  return x.IsReadable(4) ? x.InPlace<float>() : Copied<float, float>(x, stream);
}

bool IsCopied(const StoredMatrix& x) { return !x.mn_major || !x.IsReadable(4); }

// Returns whether the tiles fill most of the chip and copies are cheap compared with the product.
// An H200 copies an element in about the time that 64 multiply-adds take.
bool IsLarge(const MatmulProblem& p, int multiprocessors) {
  const double copies = (IsCopied(StoredA(p)) ? 64.0 / static_cast<double>(p.n) : 0) +
                        (IsCopied(StoredB(p)) ? 64.0 / static_cast<double>(p.m) : 0);
  return TilesOf<Tile>(p) * 4 >= std::int64_t{multiprocessors} * 3 && copies < 0.15;
}

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  const int multiprocessors = stream.device().info().multiprocessors;
  if (!IsLarge(p, multiprocessors)) {
    kMatmulWarpTiled.launch(p, stream);
    return;
  }
  const auto a = Prepared(StoredA(p), stream);
  const auto b = Prepared(StoredB(p), stream);
  const std::int64_t tiles = TilesOf<Tile>(p),
                     blocks = std::min<std::int64_t>(tiles, multiprocessors);
  Work work{};
  work.m = static_cast<int>(p.m);
  work.n = static_cast<int>(p.n);
  work.row_tiles = static_cast<int>(CeilDiv(p.m, Tile::kRows));
  work.column_tiles = static_cast<int>(CeilDiv(p.n, Tile::kColumns));
  work.sharing = ShareTiles(tiles, CeilDiv(p.k, Tile::kDepth), blocks);
  work.c_packable = IsPackable<float>(p.c, p.n);
  work.c = static_cast<float*>(p.c);
  if (work.sharing.shared != 0) {
    work.partials = static_cast<float*>(
        stream.Scratch(static_cast<std::size_t>(blocks) * Tile::kRows * Tile::kColumns * 4));
    work.written = stream.Tickets();
  }
  AllowSharedBytes(MatmulWarpTiledTma, Tile::kSharedBytes);
  MatmulWarpTiledTma<<<static_cast<unsigned>(blocks), Tile::kThreads, Tile::kSharedBytes,
                       stream.handle()>>>(MapOf(a, 1, Tile::kDepth, 4 * Tile::kRows),
                                          MapOf(b, 1, Tile::kDepth, 4 * Tile::kColumns), work);
  CUDA_CHECK_LAUNCH(MatmulWarpTiledTma);
}

Cost CostOf(const MatmulProblem& p) {
  return TensorCost(p, Tile::kColumns, sizeof(float), 1, IsCopied(StoredA(p)),
                    IsCopied(StoredB(p)));
}

std::uint64_t ScratchOf(const MatmulProblem& p) {
  // There is a tile of partial sums for each SM; see SumsScratch for the maximum number of SMs.
  const auto partials = static_cast<std::uint64_t>(std::min<std::int64_t>(TilesOf<Tile>(p), 160));
  return partials * Tile::kRows * Tile::kColumns * sizeof(float) +
         (IsCopied(StoredA(p)) ? CopyScratch<float>(p.k, p.m) : 0) +
         (IsCopied(StoredB(p)) ? CopyScratch<float>(p.k, p.n) : 0);
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulWarpTiledTma = HopperMatmul({
    .name = "warp_tiled_tma",
    .summary = "8 x 16 elements per thread, fetched by TMA; tiles are divided evenly among the SMs",
    .source = "CUTLASS's SIMT kernels and Stream-K (Osama et al., 2023)",
    .dtypes = DTypesOf(DType::kF32),
    .cost = CostOf,
    .launch = Enqueue,
    .shared = {.launch = LaunchGathered<kMatmulWarpTiledTma>},
    .scratch = ScratchOf,
});
template void LaunchGathered<kMatmulWarpTiledTma>(const MatmulProblem&, std::span<const TeamShare>,
                                                  Stream&);

}  // namespace tessera
