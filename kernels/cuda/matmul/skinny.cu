// Matmul with few rows or few columns: a matrix times one vector, or up to 32 of them. What scores
// a batch of queries against a table does.
//
// Each element of the large operand serves as many multiply-adds as there are vectors, at most 32:
// memory sets the pace, and all that counts is that it never waits. Against `warp_tiled`, the tile
// of a block is narrow, 64 or 128 elements of the large operand by all vectors, and the k-tiles are
// many: up to eight of 8 or 16 KiB, all but one on their way:
//
//         k ->
//      +----------+----------+----------+--
//    i | k-tile 0 | k-tile 1 | k-tile 2 | ..   wide: 64 or 128 values of i; 128 bytes along k
//      +----------+----------+----------+--
//      +--------+--------+--------+--
//      | k-tile 0 | k-tile 1 | k-tile 2 | ..     thin: 1 to 32 vectors
//      +--------+--------+--------+--
//        in use   on their way
//
// An H200 reads about 18 bytes a cycle and SM, and answers after 1000 cycles and more: some 20 KiB
// have to be on their way to each, twice that to be safe.
//
// - Which operand is the large one, and how it lies in memory, makes no difference: see
// k-tiles.cuh.
// - 16 bits, and f64 from nine vectors on, are multiplied by the tensor cores (see `tensor_mma` and
//   `tensor_f64`), a warp 16 elements by all vectors. f32 has none that compute in f32: there every
//   warp takes a part of the k-tile's steps for the whole tile, so that a vector of the large
//   operand is loaded from shared memory once, and the warps' sums meet at the end.
// - When there are fewer tiles than SMs, blocks share a tile: k is cut into parts, the
//   sums of the parts are written down, and a second kernel adds them in order.
//
// Cost for 8192 x 1 x 8192, f32: 2^27 flops, 256 MiB read once, 58 us at 4.6 TB/s; 64 tiles, k in
// two parts. f32 multiply-adds take as long from about 20 vectors on.
//
// Right for any m, n and k of which m or n is at most 32: copies beyond the edges and beyond a part
// of k write zeros, which add 0 * 0, and results beyond the edges are not stored. For any pitch and
// alignment: where vectors are not aligned, elements travel one by one. The sums of an element are
// added in an order that the shape and the device decide.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/matmul/mma.cuh"
#include "kernels/cuda/matmul/skinny.cuh"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

using namespace skinny;

// Where results go: c itself, or this part of k's sums of the same shape.
template <class Out>
struct Destination {
  Out* c;
  std::int64_t wide_stride, thin_stride;
  std::int64_t wide, thin;

  template <class A>
  __device__ void Store(std::int64_t e, int v, A sum) const {
    if (e < wide && v < thin) c[e * wide_stride + v * thin_stride] = static_cast<Out>(sum);
  }
};

// What a warp adds of one k-tile. Each kind has its own share of the tile for a thread: see
// Element.

// 16 bits: warps 0 to 3 have 16 rows of the tile each and the first half of the k-tile's steps,
// warps 4 to 7 the same rows and the second half.
template <class C, bool kAlongK>
__device__ void AddHalves(const typename C::T* wide, const typename C::T* thin,
                          float (&sums)[C::kSums]) {
  using T = typename C::T;
  using Wide = typename C::template WideKTile<kAlongK>;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  constexpr int kSteps = C::kDepth / 16 / 2;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int l = warp / 4 * kSteps + step;
    unsigned a[4];
    if constexpr (kAlongK) {
      LoadMatrices<false>(wide + Wide::At(warp % 4 * 16 + lane % 16, 2 * l + lane / 16), a);
    } else {
      LoadMatrices<true>(
          wide + Wide::At(16 * l + lane / 16 * 8 + lane % 8, warp % 4 * 2 + lane / 8 % 2), a);
    }
#pragma unroll
    for (int v = 0; v < C::kVectors; v += 16) {
      // The columns of two instructions, or of one twice.
      unsigned b[4];
      const int column = v + (C::kVectors > 8 ? lane / 16 * 8 : 0) + lane % 8;
      LoadMatrices<false>(thin + C::ThinKTile::At(column, 2 * l + lane / 8 % 2), b);
      MultiplyHalves<T>(a, b[0], b[1], reinterpret_cast<float(&)[4]>(sums[v / 2]));
      if constexpr (C::kVectors > 8)
        MultiplyHalves<T>(a, b[2], b[3], reinterpret_cast<float(&)[4]>(sums[v / 2 + 4]));
    }
  }
}

// f64 on the tensor cores: each warp has 16 rows of the tile.
template <class C, bool kAlongK>
__device__ void AddSquares(const double* wide, const double* thin, double (&sums)[C::kSums]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int l = 0; l < C::kDepth; l += 8) {
    double a[4];
    LoadSquare<typename C::template WideKTile<kAlongK>>(wide, warp * 16 + lane / 4 * 2,
                                                        l + lane % 4 * 2, a);
#pragma unroll
    for (int v = 0; v < C::kVectors; v += 16) {
      double b[4];
      LoadSquare<typename C::ThinKTile>(thin, v + lane / 4 * 2, l + lane % 4 * 2, b);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        MultiplyDoubles(a, b[h], b[h + 2], reinterpret_cast<double(&)[4]>(sums[v / 2 + 4 * h]));
    }
  }
}

// Without tensor cores: every warp has the whole tile, and one vector of the k-tile's depth.
template <class C, bool kAlongK>
__device__ void AddVectors(const typename C::T* wide, const typename C::T* thin,
                           typename C::T (&sums)[C::kSums]) {
  using T = typename C::T;
  using Wide = typename C::template WideKTile<kAlongK>;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  constexpr int kEach = C::kTile / kWarpSize;  // elements of the wide operand a lane
  T w[kEach][C::kWidth];
  if constexpr (kAlongK) {
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const Pack<T> pack = LoadPack(wide + Wide::At(r * kWarpSize + lane, warp));
#pragma unroll
      for (int l = 0; l < C::kWidth; ++l) w[r][l] = pack.v[l];
    }
  } else {
#pragma unroll
    for (int l = 0; l < C::kWidth; ++l) {
#pragma unroll
      for (int r = 0; r < kEach; r += C::kWidth) {
        const Pack<T> pack =
            LoadPack(wide + Wide::At(warp * C::kWidth + l, r / C::kWidth * kWarpSize + lane));
#pragma unroll
        for (int i = 0; i < C::kWidth; ++i) w[r + i][l] = pack.v[i];
      }
    }
  }
#pragma unroll
  for (int v = 0; v < C::kVectors; ++v) {
    const Pack<T> pack = LoadPack(thin + C::ThinKTile::At(v, warp));
#pragma unroll
    for (int l = 0; l < C::kWidth; ++l)
#pragma unroll
      for (int r = 0; r < kEach; ++r)
        sums[r * C::kVectors + v] = fma(w[r][l], pack.v[l], sums[r * C::kVectors + v]);
  }
}

template <class C, bool kAlongK, class Out>
__global__ void __launch_bounds__(kThreads, C::kBlocks)
    MatmulSkinny(Operand<typename C::T> wide, bool wide_packable, Operand<typename C::T> thin,
                 bool thin_packs, std::int64_t k, std::int64_t part, Destination<Out> out) {
  using T = typename C::T;
  using Acc = typename C::Acc;
  T* const wide_k_tiles = DynamicShared<T>();
  T* const thin_k_tiles = wide_k_tiles + C::kStages * C::kWide;
  const std::int64_t first = std::int64_t{blockIdx.x} * C::kTile;
  const std::int64_t k_first = blockIdx.y * part, k_end = min(k, k_first + part);
  out.c += blockIdx.y * out.wide * out.thin;  // 0 when c is the result itself

  KTileLoader<T, typename C::template WideKTile<kAlongK>, kThreads> wide_stream(wide, first,
                                                                                k_first);
  ThinLoader<C> thin_stream(thin, thin_packs, k_first, k_end);
  std::int64_t left = k_end - k_first;  // steps along k from the next k-tile to be copied on
  const auto copy = [&](int stage) {
    if (left > 0) {
      wide_stream.Copy(wide, wide_packable, static_cast<int>(min(left, std::int64_t{C::kDepth})),
                       wide_k_tiles + stage * C::kWide);
      thin_stream.Copy(thin, thin_packs, k_end, thin_k_tiles + stage * C::kThin);
      left -= C::kDepth;
    }
    CommitCopies();
  };
  for (int s = 0; s < C::kStages - 1; ++s) copy(s);

  Acc sums[C::kSums] = {};
  int stage = 0;
  for (std::int64_t l = k_first; l < k_end; l += C::kDepth) {
    WaitForCopies<C::kStages - 2>();
    __syncthreads();  // the k-tile is complete, and nobody uses the one before any more
    copy(stage == 0 ? C::kStages - 1 : stage - 1);
    const T* const wide_k_tile = wide_k_tiles + stage * C::kWide;
    const T* const thin_k_tile = thin_k_tiles + stage * C::kThin;
    if constexpr (C::kHalves) {
      AddHalves<C, kAlongK>(wide_k_tile, thin_k_tile, sums);
    } else if constexpr (C::kSquares) {
      AddSquares<C, kAlongK>(wide_k_tile, thin_k_tile, sums);
    } else {
      AddVectors<C, kAlongK>(wide_k_tile, thin_k_tile, sums);
    }
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }

  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  Acc* const cells = DynamicShared<Acc>();
  if constexpr (C::kHalves) {
    // The second half of the warps hands its sums to the first.
    constexpr int kHalf = kThreads / 2;
    __syncthreads();  // the last k-tile is read
    if (thread >= kHalf) {
#pragma unroll
      for (int s = 0; s < C::kSums; ++s) cells[s * kHalf + thread - kHalf] = sums[s];
    }
    __syncthreads();  // the second half's sums are there
    if (thread >= kHalf) return;
#pragma unroll
    for (int s = 0; s < C::kSums; ++s)
      out.Store(first + warp * 16 + lane / 4 + s / 2 % 2 * 8, s / 4 * 8 + lane % 4 * 2 + s % 2,
                sums[s] + cells[s * kHalf + thread]);
  } else if constexpr (C::kSquares) {
#pragma unroll
    for (int s = 0; s < C::kSums; ++s)
      out.Store(first + warp * 16 + lane / 4 * 2 + s / 2 % 2,
                s / 8 * 16 + (lane % 4 * 2 + s % 2) * 2 + s / 4 % 2, sums[s]);
  } else {
    // Every warp has a part of all sums: they meet in shared memory, a few columns at a time.
    constexpr int kAtOnce = C::kVectors < 4 ? C::kVectors : 4, kEach = C::kTile / kWarpSize;
#pragma unroll
    for (int v = 0; v < C::kVectors; v += kAtOnce) {
      __syncthreads();  // the last k-tile, or the columns before, are read
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int r = 0; r < kEach; ++r)
          cells[(warp * kAtOnce + j) * C::kTile + r * kWarpSize + lane] =
              sums[r * C::kVectors + v + j];
      __syncthreads();  // all warps' sums are there
      for (int e = thread; e < kAtOnce * C::kTile; e += kThreads) {
        Acc sum = cells[e];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) sum += cells[w * kAtOnce * C::kTile + e];
        const int cell = e % C::kTile, r = cell / kWarpSize, l = cell % kWarpSize;
        const int i = kAlongK ? cell : (r / C::kWidth * kWarpSize + l) * C::kWidth + r % C::kWidth;
        out.Store(first + i, v + e / C::kTile, sum);
      }
    }
  }
}

// The sums of all parts, in order.
template <class Acc, class O>
__global__ void MatmulSkinnyFinish(const Acc* parts, int count, std::int64_t n, O* c) {
  const std::int64_t e = GridThread();
  if (e >= n) return;
  Acc sum = parts[e];
  for (int p = 1; p < count; ++p) sum += parts[p * n + e];
  c[e] = static_cast<O>(sum);
}

// Into how many parts k is cut, so that there is a block for every SM, and no SM has much more to
// do than the others.
int Parts(std::int64_t tiles, std::int64_t k_tiles, std::int64_t multiprocessors) {
  constexpr double kEnds = 4;  // what a block's beginning and end cost, in k-tiles
  constexpr int kLeastKTiles = 8;
  int best = 1;
  double least = std::numeric_limits<double>::infinity();
  const std::int64_t most = std::min(multiprocessors, CeilDiv(k_tiles, kLeastKTiles));
  for (int parts = 1; parts <= most; ++parts) {
    const auto blocks = static_cast<double>(CeilDiv(tiles * parts, multiprocessors));
    // Adding up the parts takes another kernel.
    const double time =
        blocks * static_cast<double>(CeilDiv(k_tiles, parts)) + kEnds + (parts > 1 ? kEnds : 0);
    if (time < least) {
      least = time;
      best = parts;
    }
  }
  return best;
}

template <class C, bool kAlongK, class O>
void RunLayout(const MatmulProblem& p, const Operand<typename C::T>& wide, bool wide_packable,
               const Operand<typename C::T>& thin, bool thin_packs, CudaStream& stream) {
  using Acc = typename C::Acc;
  const bool a_is_wide = p.m >= p.n;
  const std::int64_t tiles = CeilDiv(wide.extent, C::kTile), k_tiles = CeilDiv(p.k, C::kDepth);
  const std::int64_t part_k_tiles =
      CeilDiv(k_tiles, Parts(tiles, k_tiles, stream.device().info().multiprocessors));
  const std::int64_t part = part_k_tiles * C::kDepth;
  const auto parts = static_cast<int>(CeilDiv(k_tiles, part_k_tiles));
  const std::int64_t wide_stride = a_is_wide ? p.n : 1, thin_stride = a_is_wide ? 1 : p.n;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(parts));
  const auto launch = [&](auto* c) {
    using Out = std::remove_pointer_t<decltype(c)>;
    const auto kernel = MatmulSkinny<C, kAlongK, Out>;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
    kernel<<<grid, kThreads, C::kSharedBytes, stream.handle()>>>(
        wide, wide_packable, thin, thin_packs, p.k, part,
        Destination<Out>{c, wide_stride, thin_stride, wide.extent, thin.extent});
    CUDA_CHECK_LAUNCH(MatmulSkinny);
  };
  if (parts == 1) return launch(static_cast<O*>(p.c));
  const std::int64_t n = p.m * p.n;
  auto* sums = static_cast<Acc*>(stream.Scratch(static_cast<std::size_t>(parts * n) * sizeof(Acc)));
  launch(sums);
  MatmulSkinnyFinish<<<static_cast<unsigned>(CeilDiv(n, 256)), 256, 0, stream.handle()>>>(
      sums, parts, n, static_cast<O*>(p.c));
  CUDA_CHECK_LAUNCH(MatmulSkinnyFinish);
}

template <class T, class O, int kVectors>
void Run(const MatmulProblem& p, CudaStream& stream) {
  using C = Config<T, kVectors>;
  const Packable packable = PackableOf<T>(p);
  const bool a_is_wide = p.m >= p.n;
  const Operand<T> wide = a_is_wide ? OperandA<T>(p) : OperandB<T>(p);
  const Operand<T> thin = a_is_wide ? OperandB<T>(p) : OperandA<T>(p);
  // The pitch of a single vector does not matter.
  const bool thin_packs = thin.k_stride == 1 &&
                          IsPackable<T>(thin.data, thin.extent == 1 ? Pack<T>::kSize : thin.stride);
  const bool wide_packable = a_is_wide ? packable.a : packable.b;
  if (wide.k_stride == 1) {
    RunLayout<C, true, O>(p, wide, wide_packable, thin, thin_packs, stream);
  } else {
    RunLayout<C, false, O>(p, wide, wide_packable, thin, thin_packs, stream);
  }
}

template <class T, class O>
void RunTypes(const MatmulProblem& p, CudaStream& stream) {
  const std::int64_t vectors = std::min(p.m, p.n);
  if constexpr (sizeof(T) != 2) {
    if (vectors <= 1) return Run<T, O, 1>(p, stream);
    if (vectors <= 2) return Run<T, O, 2>(p, stream);
    if (vectors <= 4) return Run<T, O, 4>(p, stream);
  }
  if (vectors <= 8) return Run<T, O, 8>(p, stream);
  if (vectors <= 16) return Run<T, O, 16>(p, stream);
  return Run<T, O, 32>(p, stream);
}

void Enqueue(const MatmulProblem& p, Stream& any_lane) {
  CudaStream& stream = Cuda(any_lane);
  DispatchMatmul(p, [&](auto t, auto o) {
    using T = decltype(t);
    if constexpr (!std::is_integral_v<T>) RunTypes<T, decltype(o)>(p, stream);
  });
}

double Roundoff(const MatmulProblem& p) {
  return SizeOf(p.dtype) == 2 ? TensorRoundoff(p.k) : MatmulChainRoundoff(p);
}

// The whole result is one tile.
Cost CostOf(const MatmulProblem& p) {
  const auto rows = std::max<std::int64_t>(1, p.m), columns = std::max<std::int64_t>(1, p.n);
  Cost cost = MatmulCost(p, MatmulTileLoads(p, rows, columns));
  // k is cut into parts until every SM has one, and walked along in k-tiles.
  constexpr std::int64_t kUsualMultiprocessors = 132, kUsualTile = 128, kUsualKTile = 16;
  const std::int64_t parts =
      std::max<std::int64_t>(1, kUsualMultiprocessors * kUsualTile / std::max(rows, columns));
  cost.depth = static_cast<std::uint64_t>(p.k / (parts * kUsualKTile) + 1);
  return cost;
}

std::string Refuses(const MatmulProblem& p) {
  return std::min(p.m, p.n) <= kMostVectors ? "" : "m or n of at most 32";
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulSkinny = {
    .name = "skinny",
    .summary = "few rows or columns: the large operand streams through once at memory's pace",
    .source = "multi-stage copies as in CUTLASS, one operand a few vectors wide",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64, DType::kF16, DType::kBF16),
    .min_compute_capability = 80,
    .deterministic = true,
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .refuses = Refuses,
};

}  // namespace tessera
