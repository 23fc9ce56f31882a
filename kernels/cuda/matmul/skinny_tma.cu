// Matmul with few rows or few columns as in `skinny`, fetched by Hopper's copy engine.
//
// In `skinny` every warp copies, waits for the slab and multiplies, and after each slab of 8 or 16
// KiB the whole block meets at a barrier: while it does, nobody asks for more. Here one thread
// keeps the copy engine busy with slabs of 32 KiB, as many as shared memory holds, and the warps
// that multiply meet it at the slabs' own barriers, each on its own (see tensor.cuh). About 200 KiB
// are on their way to a multiprocessor at any time, whatever its warps are doing.
//
// - A block stays for the whole launch, one a multiprocessor. Tiles, 128 or 256 elements of the
//   large operand by all vectors, are cut along k into slabs, and all slabs of all tiles are shared
//   out evenly, one run of them to each block, wherever in a tile that begins or ends (Stream-K,
//   Osama, Merrill, Cecka, Garland and Owens, 2023):
//
//         k ->
//       | block 0          | block 1    |   tile 0
//       | 1   | block 2            | 3  |   tile 1
//       | block 3      | block 4        |   tile 2
//
//   Blocks that share a tile leave their sums in scratch memory, and the last of them to arrive
//   adds all, in the order of k. No second kernel has to begin after the first has ended.
// - f32 without tensor cores: a warp takes 128 elements of the large operand, 4 a lane, and a part
//   of the slab's steps. For 4 steps along k a lane reads 4 vectors of 16 bytes of its own, and
//   one, the same for all lanes, of each of the small operand's vectors: with 16 of those, 20 reads
//   for 256 multiply-adds, whichever way either operand lies. The warps' sums meet at the end of a
//   tile.
// - 16 bits on the tensor cores: a warp has 16 or 32 rows of the tile, and all steps of the slab.
//
// Cost for 8192 x 1 x 8192, f32: 2^27 flops, 256 MiB read once, 58 us at 4.6 TB/s; 32 or 64 tiles
// of 8192 slabs, 62 a block. The small operand is read again for every tile, from the second level
// of cache: with 16 vectors that is an eighth of the traffic, or a sixteenth.
//
// Right for any m, n and k of which m or n is at most 32: the engine reads zeros outside a matrix,
// and results beyond the edges are not stored. A large operand whose address or pitch is no
// multiple of 16 bytes is left to `skinny`; a small one is copied. The sums of an element are added
// in an order that the shape and the device decide.
#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "kernels/cuda/matmul/mma.cuh"
#include "kernels/cuda/matmul/tensor.cuh"

namespace tessera {

extern const Strategy<MatmulProblem> kMatmulSkinny;  // for what the copy engine can not read

namespace {

constexpr int kMostVectors = 32;
constexpr int kBoxRow = 128;  // bytes of a row of a box whose packs the engine permutes
constexpr int kSteps = 4;     // along k that a lane multiplies at a time without tensor cores

// The tile of a block, and how it is fetched; the names that TensorPipeline knows are its own.
template <class T_, int kVectors_, bool kAlongK_>
struct Config {
  using T = T_;
  static constexpr int kVectors = kVectors_;  // of the small operand, rounded up
  static constexpr bool kAlongK = kAlongK_;   // how the large operand lies in memory
  static constexpr bool kHalves = sizeof(T) == 2;

  // The large operand's share of a slab: 256 or 128 bytes a row of the tile along k.
  static constexpr int kWide = kAlongK ? 128 : 256;
  static constexpr int kBytesA = 32 * 1024;
  static constexpr int kDepth = kBytesA / kWide / int{sizeof(T)};
  // Boxes of kBoxRow bytes a row, but that f32 across k needs no permutation, and one box does.
  static constexpr bool kOneBox = !kAlongK && !kHalves;
  static constexpr int kWideBoxes =
      kOneBox ? 1 : (kAlongK ? kDepth : kWide) * int{sizeof(T)} / kBoxRow;
  static constexpr int kWideBoxRows = kAlongK ? kWide : kDepth;
  static constexpr int kWideBoxRowBytes = kOneBox ? kWide * int{sizeof(T)} : kBoxRow;
  static constexpr int kWideBoxBytes = kBytesA / kWideBoxes;

  // The small operand's, k along the rows.
  static constexpr int kThinBoxes = kDepth * int{sizeof(T)} / kBoxRow;
  static constexpr int kThinBoxBytes = kVectors * kBoxRow;
  static constexpr int kBytes = kBytesA + kThinBoxes * kThinBoxBytes;

  static constexpr int kAlignment = 1024;  // of a permuted box in shared memory
  static constexpr int kStageBytes = (kBytes + kAlignment - 1) / kAlignment * kAlignment;
  static constexpr int kConsumers = 8, kCluster = 1;  // warps
  static constexpr int kMultiplying = kConsumers * kWarpSize;
  static constexpr int kThreads = kMultiplying + 128;  // registers move between warpgroups
  // Whether the sums do not fit otherwise.
  static constexpr bool kMovesRegisters = !kHalves && kVectors == 32;

  // How the warps share a slab.
  static constexpr int kWarpRows = kHalves ? kWide / kConsumers : kSteps * kWarpSize;
  static constexpr int kWarpsWide = kWide / kWarpRows, kWarpsK = kConsumers / kWarpsWide;
  static constexpr int kSums = kHalves ? kWarpRows / 16 * kVectors / 2 : kSteps * kVectors;

  // Where the warps' sums meet, a few vectors at a time.
  static constexpr int kAtOnce = std::min(kVectors, kHalves ? 16 : 4);
  static constexpr int kCellBytes = kWarpsK * kAtOnce * kWide * 4;
  static constexpr int kStages = std::min(8, (226 * 1024 - kAlignment - kCellBytes) / kStageBytes);
  static constexpr int kSharedBytes = kAlignment + kStages * kStageBytes + kCellBytes;
};

// What the blocks of a launch are told.
template <class Out>
struct Work {
  std::int64_t units;  // slabs of all tiles, at least one a block
  int slabs;           // of a tile
  int wide, vectors;   // extents
  Out* c;
  std::int64_t wide_stride, thin_stride;  // of c
  float* partials;                        // [blocks][2][C::kVectors][C::kWide], or unused
  std::uint32_t* arrived;                 // [blocks]; zero before and after

  __device__ std::int64_t FirstUnit(int block) const {
    return units * block / static_cast<int>(gridDim.x);
  }
  __device__ int BlockOf(std::int64_t unit) const {
    const auto blocks = static_cast<std::int64_t>(gridDim.x);
    return static_cast<int>(((unit + 1) * blocks - 1) / units);
  }
  // The memory for a block's sums of a tile: a block shares at most one tile with blocks before it,
  // and one, whose first it is, with blocks after it.
  template <class C>
  __device__ float* Partial(int block, bool is_first) const {
    return partials + (2 * block + (is_first ? 1 : 0)) * (C::kVectors * C::kWide);
  }
  __device__ void Store(std::int64_t row, int vector, float sum) const {
    if (row < wide && vector < vectors)
      c[row * wide_stride + vector * thin_stride] = static_cast<Out>(sum);
  }
};

// Slabs [first, first + slabs) of a tile. Calls f for each piece of the block's run.
struct Piece {
  int tile, first, slabs;
};
template <class Out, class F>
__device__ void ForEachPiece(const Work<Out>& work, F&& f) {
  const int block = static_cast<int>(blockIdx.x);
  const std::int64_t end = work.FirstUnit(block + 1);
  for (std::int64_t unit = work.FirstUnit(block); unit < end;) {
    const auto first = static_cast<int>(unit % work.slabs);
    const auto slabs =
        static_cast<int>(min(end - unit, static_cast<std::int64_t>(work.slabs - first)));
    f(Piece{static_cast<int>(unit / work.slabs), first, slabs});
    unit += slabs;
  }
}

template <class C, class Out>
__device__ void Fetch(const CUtensorMap& wide_map, const CUtensorMap& thin_map,
                      const Work<Out>& work, TensorPipeline<C> pipeline) {
  constexpr int kBoxDepth = kBoxRow / int{sizeof(typename C::T)};
  ForEachPiece(work, [&](const Piece& piece) {
    const int row = piece.tile * C::kWide;
    int k = piece.first * C::kDepth;
    for (int s = 0; s < piece.slabs; ++s, k += C::kDepth, pipeline.Next()) {
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
        LoadBox(pipeline.b() + i * C::kThinBoxBytes, &thin_map, k + i * kBoxDepth, 0, 0,
                pipeline.full());
    }
  });
}

__device__ float4 LoadShared4(std::uint32_t from) {
  float4 pack;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(pack.x), "=f"(pack.y), "=f"(pack.z), "=f"(pack.w)
               : "r"(from));
  return pack;
}

// The sums of a thread without tensor cores, [kSteps][kVectors]: lane l has rows l, l + 32, ... of
// the warp's 128 if the large operand lies along k, or else rows 4 l to 4 l + 3.
template <class C>
struct VectorSums {
  static constexpr int kPacks = C::kDepth / kSteps / C::kWarpsK;  // along k of a slab, of a warp
  static constexpr int kRowPacks = kBoxRow / 16;
  float v[C::kSums];

  __device__ static int Row(int lane, int i) {
    return C::kAlongK ? i * kWarpSize + lane : lane * kSteps + i;
  }

  __device__ void Add(std::uint32_t wide, std::uint32_t thin, int warp, int lane) {
    const int warp_row = warp % C::kWarpsWide * C::kWarpRows;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int pack = warp / C::kWarpsWide * kPacks + p;
      const int box = pack / kRowPacks, place = pack % kRowPacks;
      float w[kSteps][kSteps];  // [step][row]
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if constexpr (C::kAlongK) {
          const float4 x =
              LoadShared4(wide + box * C::kWideBoxBytes +
                          (warp_row + i * kWarpSize + lane) * kBoxRow + ((place ^ lane % 8) << 4));
          w[0][i] = x.x, w[1][i] = x.y, w[2][i] = x.z, w[3][i] = x.w;
        } else {
          const float4 x = LoadShared4(wide + (pack * kSteps + i) * C::kWideBoxRowBytes +
                                       (warp_row + lane * kSteps) * 4);
          w[i][0] = x.x, w[i][1] = x.y, w[i][2] = x.z, w[i][3] = x.w;
        }
      }
#pragma unroll
      for (int u = 0; u < C::kVectors; ++u) {
        const float4 x = LoadShared4(thin + box * C::kThinBoxBytes + u * kBoxRow + place * 16);
        const float steps[kSteps] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int l = 0; l < kSteps; ++l)
#pragma unroll
          for (int i = 0; i < kSteps; ++i)
            v[i * C::kVectors + u] = fma(w[l][i], steps[l], v[i * C::kVectors + u]);
      }
    }
  }

  // The sums of vectors [first, first + kAtOnce) into cells[part of k][vector][row of the tile].
  template <int kFirst>
  __device__ void Put(float* cells, int warp, int lane) const {
    float* const part = cells + warp / C::kWarpsWide * (C::kAtOnce * C::kWide) +
                        warp % C::kWarpsWide * C::kWarpRows;
#pragma unroll
    for (int j = 0; j < C::kAtOnce; ++j)
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        part[j * C::kWide + Row(lane, i)] = v[i * C::kVectors + kFirst + j];
  }
};

// The sums of a thread with tensor cores, as mma.cuh tells: [16 rows][8 vectors][4].
template <class C>
struct TensorSums {
  static constexpr int kTiles = C::kWarpRows / 16;
  float v[C::kSums];

  __device__ void Add(std::uint32_t wide, std::uint32_t thin, int warp, int lane) {
    using T = typename C::T;
    const int warp_row = warp * C::kWarpRows;
#pragma unroll
    for (int l = 0; l < C::kDepth / 16; ++l) {
      // Two packs of 16 bytes are 16 steps; a row of a box has 64.
      const int box = l / 4, place = l % 4 * 2;
      unsigned a[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int row = warp_row + i * 16;
        if constexpr (C::kAlongK) {
          LoadMatrices<false>(wide + box * C::kWideBoxBytes + (row + lane % 16) * kBoxRow +
                                  (((place + lane / 16) ^ lane % 8) << 4),
                              a[i]);
        } else {
          const int k = l * 16 + lane / 16 * 8 + lane % 8;
          LoadMatrices<true>(wide + row / 64 * C::kWideBoxBytes + k * kBoxRow +
                                 (((row % 64 / 8 + lane / 8 % 2) ^ lane % 8) << 4),
                             a[i]);
        }
      }
#pragma unroll
      for (int u = 0; u < C::kVectors; u += 16) {
        unsigned b[4];
        LoadMatrices<false>(thin + box * C::kThinBoxBytes +
                                (u + lane / 16 * 8 + lane % 8) * kBoxRow +
                                (((place + lane / 8 % 2) ^ lane % 8) << 4),
                            b);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            MultiplyHalves<T>(
                a[i], b[2 * h], b[2 * h + 1],
                reinterpret_cast<float(&)[4]>(v[(i * (C::kVectors / 8) + u / 8 + h) * 4]));
      }
    }
  }

  template <int kFirst>
  __device__ void Put(float* cells, int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int j = 0; j < C::kAtOnce / 8; ++j)
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const int row = warp * C::kWarpRows + i * 16 + lane / 4 + s / 2 * 8;
          const int vector = j * 8 + lane % 4 * 2 + s % 2;
          cells[vector * C::kWide + row] = v[(i * (C::kVectors / 8) + kFirst / 8 + j) * 4 + s];
        }
  }
};

// Calls f(std::integral_constant) for 0, kStep, ... below kEnd.
template <int kStep, int kEnd, int kAt = 0, class F>
__device__ void ForEachOf(F&& f) {
  if constexpr (kAt < kEnd) {
    f(std::integral_constant<int, kAt>{});
    ForEachOf<kStep, kEnd, kAt + kStep>(f);
  }
}

// What blocks that share a tile have summed, in the order of k.
template <class C, class Out>
__device__ void AddPartials(const Work<Out>& work, int tile, int first_block, int blocks) {
  constexpr int kPacks = C::kVectors * C::kWide / 4;
  constexpr int kTogether = 4;  // blocks whose sums are on their way
  const auto partial = [&](int b) {
    return reinterpret_cast<const float4*>(work.template Partial<C>(first_block + b, b == 0));
  };
  for (int e = static_cast<int>(threadIdx.x); e < kPacks; e += C::kMultiplying) {
    const int vector = e * 4 / C::kWide;
    if (vector >= work.vectors) break;
    float4 sum = __ldcg(partial(0) + e);
    for (int b = 1; b < blocks; b += kTogether) {
      float4 x[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        if (b + j < blocks) x[j] = __ldcg(partial(b + j) + e);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (b + j >= blocks) break;
        sum.x += x[j].x, sum.y += x[j].y, sum.z += x[j].z, sum.w += x[j].w;
      }
    }
    const std::int64_t row = std::int64_t{tile} * C::kWide + e * 4 % C::kWide;
    work.Store(row, vector, sum.x);
    work.Store(row + 1, vector, sum.y);
    work.Store(row + 2, vector, sum.z);
    work.Store(row + 3, vector, sum.w);
  }
}

template <class C, class Out>
__device__ void Multiply(const Work<Out>& work, float* cells, TensorPipeline<C> pipeline) {
  using Sums = std::conditional_t<C::kHalves, TensorSums<C>, VectorSums<C>>;
  constexpr int kBarrier = 1;  // of the consumers
  __shared__ std::uint32_t ticket;
  const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  // The same in all lanes of a warp, which the compiler learns from the shuffle.
  const int warp = __shfl_sync(kFullMask, thread / kWarpSize, 0), lane = thread % kWarpSize;
  ForEachPiece(work, [&](const Piece& piece) {
    Sums sums;
#pragma unroll
    for (float& sum : sums.v) sum = 0;
#pragma unroll 1
    for (int s = 0; s < piece.slabs; ++s) {
      pipeline.WaitUntilFull();
      sums.Add(pipeline.a(), pipeline.b(), warp, lane);
      __syncwarp();  // all lanes have read the slab
      pipeline.Release(pipeline.stage(), lane);
      pipeline.Next();
    }

    const bool whole = piece.slabs == work.slabs;
    float* const partial = work.template Partial<C>(block, piece.first == 0);
    ForEachOf<C::kAtOnce, C::kVectors>([&](auto first) {
      if (first >= work.vectors) return;
      NamedBarrier(kBarrier, C::kMultiplying);  // what was in the cells is read
      sums.template Put<first>(cells, warp, lane);
      NamedBarrier(kBarrier, C::kMultiplying);  // all warps' sums are there
      for (int e = thread; e < C::kAtOnce * C::kWide; e += C::kMultiplying) {
        float sum = cells[e];
#pragma unroll
        for (int part = 1; part < C::kWarpsK; ++part)
          sum += cells[part * (C::kAtOnce * C::kWide) + e];
        if (whole) {
          work.Store(std::int64_t{piece.tile} * C::kWide + e % C::kWide, first + e / C::kWide, sum);
        } else {
          __stcg(partial + first * C::kWide + e, sum);
        }
      }
    });
    if (whole) return;

    const std::int64_t unit = std::int64_t{piece.tile} * work.slabs;
    const int first_block = work.BlockOf(unit);
    const int blocks = work.BlockOf(unit + work.slabs - 1) - first_block + 1;
    __threadfence();
    NamedBarrier(kBarrier, C::kMultiplying);  // all have stored
    if (thread == 0) ticket = atomicAdd(work.arrived + first_block, 1);
    NamedBarrier(kBarrier, C::kMultiplying);  // the ticket is there
    if (ticket + 1 != static_cast<std::uint32_t>(blocks)) return;
    __threadfence();
    AddPartials<C>(work, piece.tile, first_block, blocks);
    if (thread == 0) work.arrived[first_block] = 0;
  });
}

template <class C, class Out>
__global__ void __launch_bounds__(C::kThreads, 1)
    MatmulSkinnyTma(const __grid_constant__ CUtensorMap wide_map,
                    const __grid_constant__ CUtensorMap thin_map,
                    const __grid_constant__ Work<Out> work) {
  __shared__ alignas(8) std::uint64_t barriers[2 * C::kStages];
  char* const memory = DynamicShared<char>();
  const std::uint32_t begin = SharedAddress(memory);
  const std::uint32_t slabs = (begin + C::kAlignment - 1) / C::kAlignment * C::kAlignment;
  auto* const cells =
      reinterpret_cast<float*>(memory + (slabs - begin) + C::kStages * C::kStageBytes);
  const TensorPipeline<C> pipeline(slabs, SharedAddress(barriers));
  if (threadIdx.x == C::kMultiplying) {
    PrefetchMap(&wide_map);
    PrefetchMap(&thin_map);
    pipeline.Init();
  }
  __syncthreads();  // the barriers are made
  if (threadIdx.x < C::kMultiplying) {
    if constexpr (C::kMovesRegisters) TakeRegisters<232>();
    Multiply<C>(work, cells, pipeline);
  } else {
    if constexpr (C::kMovesRegisters) GiveRegistersBack<40>();
    if (threadIdx.x == C::kMultiplying) Fetch<C>(wide_map, thin_map, work, pipeline);
  }
}

// --- Launch ---

// Blocks for so many tiles. What the last block of a tile has to add, from as many blocks as share
// it, takes longer with more vectors.
std::int64_t Blocks(std::int64_t tiles, std::int64_t units, int vectors, int multiprocessors) {
  const std::int64_t most_shares = std::max(5, 160 / vectors);
  return std::min({std::int64_t{multiprocessors}, units, tiles * most_shares});
}

// The small operand with k along the rows, where the copy engine can read it.
template <class T>
TensorOperand<T> Prepared(const Operand<T>& thin, std::int64_t k, CudaLane& lane) {
  if (thin.k_stride != 1) return Transposed<T>(thin.data, thin.extent, k, thin.k_stride, lane);
  if (!IsBoxAligned(thin.data, thin.extent, thin.stride * std::int64_t{sizeof(T)}))
    return Copied<T>(thin.data, thin.extent, k, thin.stride, false, lane);
  return {thin.data, thin.extent, k, thin.stride, false};
}

template <class C, class Out>
void Run(const MatmulProblem& p, const Operand<typename C::T>& wide,
         const Operand<typename C::T>& thin, CudaLane& lane) {
  using T = typename C::T;
  const auto prepared = Prepared(thin, p.k, lane);
  const std::int64_t tiles = CeilDiv(wide.extent, C::kWide), slabs = CeilDiv(p.k, C::kDepth);
  const std::int64_t blocks =
      Blocks(tiles, tiles * slabs, C::kVectors, lane.device().info().multiprocessors);
  const bool a_is_wide = p.m >= p.n;
  const std::size_t partial_bytes =
      static_cast<std::size_t>(blocks) * 2 * C::kVectors * C::kWide * 4;
  const Work<Out> work{
      .units = tiles * slabs,
      .slabs = static_cast<int>(slabs),
      .wide = static_cast<int>(wide.extent),
      .vectors = static_cast<int>(thin.extent),
      .c = static_cast<Out*>(p.c),
      .wide_stride = a_is_wide ? p.n : 1,
      .thin_stride = a_is_wide ? 1 : p.n,
      .partials = static_cast<float*>(lane.Scratch(partial_bytes)),
      .arrived = lane.Tickets(),
  };
  const bool along_k = C::kAlongK;
  const CUtensorMap wide_map =
      MakeTensorMap<T>(wide.data, 1, along_k ? wide.extent : p.k, along_k ? p.k : wide.extent,
                       along_k ? wide.stride : wide.k_stride, C::kWideBoxRows, C::kWideBoxRowBytes);
  const CUtensorMap thin_map =
      MakeTensorMap<T>(prepared.data, 1, prepared.rows, prepared.columns, prepared.pitch,
                       C::kVectors, kBoxRow, /*permuted=*/C::kHalves);
  const auto kernel = MatmulSkinnyTma<C, Out>;
  CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
  kernel<<<static_cast<unsigned>(blocks), C::kThreads, C::kSharedBytes, lane.stream()>>>(
      wide_map, thin_map, work);
  CUDA_CHECK_LAUNCH(MatmulSkinnyTma);
}

template <class T, class Out, bool kAlongK>
void RunLayout(const MatmulProblem& p, const Operand<T>& wide, const Operand<T>& thin,
               CudaLane& lane) {
  if constexpr (sizeof(T) == 4) {
    if (thin.extent <= 1) return Run<Config<T, 1, kAlongK>, Out>(p, wide, thin, lane);
    if (thin.extent <= 4) return Run<Config<T, 4, kAlongK>, Out>(p, wide, thin, lane);
  }
  if (thin.extent <= 16) return Run<Config<T, 16, kAlongK>, Out>(p, wide, thin, lane);
  return Run<Config<T, 32, kAlongK>, Out>(p, wide, thin, lane);
}

void Enqueue(const MatmulProblem& p, Lane& any_lane) {
  CudaLane& lane = Cuda(any_lane);
  if (TensorIsTrivial(p, lane)) return;
  DispatchMatmul(p, [&](auto t, auto o) {
    using T = decltype(t);
    using Out = decltype(o);
    if constexpr (std::is_same_v<T, float> || sizeof(T) == 2) {
      const bool a_is_wide = p.m >= p.n;
      const Operand<T> wide = a_is_wide ? OperandA<T>(p) : OperandB<T>(p);
      const Operand<T> thin = a_is_wide ? OperandB<T>(p) : OperandA<T>(p);
      const bool along_k = wide.k_stride == 1;
      const std::int64_t rows = along_k ? wide.extent : p.k;
      const std::int64_t pitch = along_k ? wide.stride : wide.k_stride;
      if (!IsBoxAligned(wide.data, rows, pitch * std::int64_t{sizeof(T)})) {
        kMatmulSkinny.launch(p, lane);
      } else if (along_k) {
        RunLayout<T, Out, true>(p, wide, thin, lane);
      } else {
        RunLayout<T, Out, false>(p, wide, thin, lane);
      }
    }
  });
}

double Roundoff(const MatmulProblem& p) { return kMatmulSkinny.roundoff(p); }
Cost CostOf(const MatmulProblem& p) { return kMatmulSkinny.cost(p); }

std::string Refuses(const MatmulProblem& p) {
  return std::min(p.m, p.n) <= kMostVectors ? TensorRefusal(p) : "m or n of at most 32";
}

}  // namespace

extern const Strategy<MatmulProblem> kMatmulSkinnyTma;
constexpr Strategy<MatmulProblem> kMatmulSkinnyTma = {
    .name = "skinny_tma",
    .summary = "skinny, fetched by Hopper's copy engine, all slabs shared out evenly",
    .source = "Stream-K (Osama et al., 2023)",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF16, DType::kBF16),
    .min_compute_capability = 90,
    .deterministic = true,
    .limits = {.block_size = {}, .grid_size = {}, .items_per_thread = {}},
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .missing = TensorMissing,
    .refuses = Refuses,
};

}  // namespace tessera
