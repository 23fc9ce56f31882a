// Matmul with few rows or few columns: a matrix times one to 32 vectors, such as scoring a batch of
// queries against a table.
//
// Each element of the large operand is used in as many multiply-adds as there are vectors, at most
// 32. So memory is the bottleneck, and the only goal is to keep it busy. Compared with
// `warp_tiled`, the tile of a block is narrow: 64 or 128 rows (or columns) of the large operand by
// all vectors. There are also more k-tiles, up to eight of 8 or 16 KiB each, and all but one of
// them are in flight:
//
//         k ->
//      +----------+----------+----------+--
//    i | k-tile 0 | k-tile 1 | k-tile 2 | ..   wide: 64 or 128 values of i; 128 bytes along k
//      +----------+----------+----------+--
//      +--------+--------+--------+--
//      | k-tile 0 | k-tile 1 | k-tile 2 | ..     thin: 1 to 32 vectors
//      +--------+--------+--------+--
//        in use   in flight
//
// The memory of an H200 delivers about 18 bytes per cycle per SM, after a latency of 1000 cycles or
// more. So about 20 KiB must be in flight for each SM, and twice as much to be safe.
//
// - Either operand may be the large one, and it may have either layout (see k_tiles.cuh).
// - The tensor cores multiply 16-bit elements, and f64 for nine vectors or more (see `tensor_mma`
//   and `tensor_f64`); each warp computes 16 rows of the tile by all vectors. Tensor cores have no
//   f32. So for f32, every warp processes some of the k-tile's steps for the whole tile. Each
//   vector of the large operand is then loaded from shared memory only once, and the warps' sums
//   are added at the end.
// - If there are fewer tiles than SMs, blocks share a tile: k is cut into parts, the sums of the
//   parts are written to memory, and a second kernel adds them in order.
// - Where both operands have at most four vectors and k is long, a kernel without tiles is used
//   (see skinny_narrow.cuh).
//
// Cost for 8192 x 1 x 8192, f32: 2^27 flops, 256 MiB read once, 58 us at 4.6 TB/s; 64 tiles, k in
// two parts. For about 20 vectors or more, the f32 multiply-adds take as long as the reads.
//
// The shape and the device determine the order in which the sums of an element are added.
//
// Lesson: kernels/lessons/product_4_double_buffer.cu
#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "kernels/cuda/matmul/skinny_narrow.cuh"
#include "kernels/cuda/matmul/skinny_sums.cuh"
#include "kernels/cuda/runtime/overlap.cuh"

namespace tessera {
namespace {

using namespace skinny;

// The destination of results: c itself, or memory of the same shape for the sums of a part of k.
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
  out.c += blockIdx.y * out.wide * out.thin;  // adds 0 if c is the result itself

  KTileLoader<T, typename C::template WideKTile<kAlongK>, kThreads> wide_stream(wide, first,
                                                                                k_first);
  ThinLoader<C> thin_stream(thin, thin_packs, k_first, k_end);
  std::int64_t left = k_end - k_first;  // steps along k that are not yet copied
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
    __syncthreads();  // the k-tile is complete, and the previous one is free
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
  const int warp = WarpIndex(), lane = LaneIndex();
  Acc* const cells = DynamicShared<Acc>();
  if constexpr (C::kHalves) {
    // The warps of the second half pass their sums to the warps of the first half.
    constexpr int kHalf = kThreads / 2;
    __syncthreads();  // the last k-tile has been read
    if (thread >= kHalf) {
#pragma unroll
      for (int s = 0; s < C::kSums; ++s) cells[s * kHalf + thread - kHalf] = sums[s];
    }
    __syncthreads();  // the second half's sums are in shared memory
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
    // Every warp has a part of each sum. The parts are added in shared memory, a few columns at a
    // time.
    constexpr int kAtOnce = C::kVectors < 4 ? C::kVectors : 4, kEach = C::kTile / kWarpSize;
#pragma unroll
    for (int v = 0; v < C::kVectors; v += kAtOnce) {
      __syncthreads();  // the last k-tile or the previous columns have been read
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int r = 0; r < kEach; ++r)
          cells[(warp * kAtOnce + j) * C::kTile + r * kWarpSize + lane] =
              sums[r * C::kVectors + v + j];
      __syncthreads();  // all warps' sums are in shared memory
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

// Adds the sums of all parts. Each lane has one element, and each warp has a group of parts, so a
// thread makes only a few loads in sequence even if there are many parts.
constexpr int kFinishThreads = 256;
constexpr int kFinishGroups = kFinishThreads / kWarpSize;

template <class Acc, class O>
__global__ void __launch_bounds__(kFinishThreads)
    MatmulSkinnyFinish(const Acc* parts, int count, std::int64_t n, O* c) {
  WaitForKernelBefore();
  __shared__ Acc sums[kFinishGroups][kWarpSize];
  const int group = WarpIndex();
  const int lane = LaneIndex();
  const std::int64_t e = std::int64_t{blockIdx.x} * kWarpSize + lane;
  const int first = group * count / kFinishGroups, end = (group + 1) * count / kFinishGroups;
  Acc sum = 0;
  if (e < n) {
#pragma unroll 4
    for (int p = first; p < end; ++p) sum += parts[p * n + e];
  }
  sums[group][lane] = sum;
  __syncthreads();  // all groups' sums are in shared memory
  if (group > 0 || e >= n) return;
#pragma unroll
  for (int g = 1; g < kFinishGroups; ++g) sum += sums[g][lane];
  c[e] = static_cast<O>(sum);
}

// The maximum number of bytes for the sums of all parts of k.
constexpr std::int64_t kMostSums = std::int64_t{32} << 20;

// Returns the number of parts into which k is cut, so that there is a block for every SM and no SM
// has much more work than the others. `sums` is the size of one part's sums in bytes. waits:
// whether threads wait for the full memory latency of each k-tile because k-tiles are not copied in
// the background (see KTileLoader).
int Parts(std::int64_t tiles, std::int64_t k_tiles, std::int64_t sums, bool waits,
          std::int64_t multiprocessors) {
  const int ends = waits ? 2 : 4;  // the cost of a block's prologue and epilogue, in k-tiles
  const int least_k_tiles = waits ? 2 : 8;
  int best = 1;
  double least = std::numeric_limits<double>::infinity();
  const std::int64_t most =
      std::min({multiprocessors, CeilDiv(k_tiles, least_k_tiles), kMostSums / sums});
  for (int parts = 1; parts <= most; ++parts) {
    const auto blocks = static_cast<double>(CeilDiv(tiles * parts, multiprocessors));
    // Adding up the parts takes another kernel.
    const double time =
        blocks * static_cast<double>(CeilDiv(k_tiles, parts)) + ends + (parts > 1 ? ends : 0);
    if (time < least) {
      least = time;
      best = parts;
    }
  }
  return best;
}

// Calls launch(sums), which writes the sums of `parts` parts of k (m n results for each part), and
// launches a second kernel that adds these sums.
template <class Acc, class O, class Launch>
void RunInParts(const MatmulProblem& p, int parts, CudaStream& stream, const Launch& launch) {
  const std::int64_t n = p.m * p.n;
  auto* sums = static_cast<Acc*>(stream.Scratch(static_cast<std::size_t>(parts * n) * sizeof(Acc)));
  launch(sums);
  LaunchOverlapping(MatmulSkinnyFinish<Acc, O>,
                    {static_cast<unsigned>(CeilDiv(n, kWarpSize)), kFinishThreads, 0}, stream,
                    static_cast<const Acc*>(sums), parts, n, static_cast<O*>(p.c));
}

template <class C, bool kAlongK, class O>
void RunLayout(const MatmulProblem& p, const Operand<typename C::T>& wide, bool wide_packable,
               const Operand<typename C::T>& thin, bool thin_packs, CudaStream& stream) {
  using Acc = typename C::Acc;
  const bool a_is_wide = p.m >= p.n;
  const std::int64_t tiles = CeilDiv(wide.extent, C::kTile), k_tiles = CeilDiv(p.k, C::kDepth);
  const bool waits = C::kHalves && !(wide_packable && thin_packs);
  const std::int64_t part_k_tiles =
      CeilDiv(k_tiles, Parts(tiles, k_tiles, p.m * p.n * std::int64_t{sizeof(Acc)}, waits,
                             stream.device().info().multiprocessors));
  const std::int64_t part = part_k_tiles * C::kDepth;
  const auto parts = static_cast<int>(CeilDiv(k_tiles, part_k_tiles));
  const std::int64_t wide_stride = a_is_wide ? p.n : 1, thin_stride = a_is_wide ? 1 : p.n;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(parts));
  const auto launch = [&](auto* c) {
    using Out = std::remove_pointer_t<decltype(c)>;
    const auto kernel = MatmulSkinny<C, kAlongK, Out>;
    AllowSharedBytes(kernel, C::kSharedBytes);
    kernel<<<grid, kThreads, C::kSharedBytes, stream.handle()>>>(
        wide, wide_packable, thin, thin_packs, p.k, part,
        Destination<Out>{c, wide_stride, thin_stride, wide.extent, thin.extent});
    CUDA_CHECK_LAUNCH(MatmulSkinny);
  };
  if (parts == 1) return launch(static_cast<O*>(p.c));
  RunInParts<Acc, O>(p, parts, stream, launch);
}

template <class T, class O, int kMost, bool kPacks>
void RunNarrow(const MatmulProblem& p, const Operand<T>& wide, const Operand<T>& thin,
               CudaStream& stream) {
  using Acc = ValueOf<T>;
  const std::int64_t part =
      NarrowPart<Narrow<T, kMost, kPacks>>(p.k, stream.device().info().multiprocessors);
  const auto parts = static_cast<int>(CeilDiv(p.k, part));
  const std::int64_t wide_stride = p.m >= p.n ? p.n : 1, thin_stride = p.m >= p.n ? 1 : p.n;
  RunInParts<Acc, O>(p, parts, stream, [&](Acc* sums) {
    MatmulNarrow<T, kMost, kPacks><<<static_cast<unsigned>(parts), kThreads, 0, stream.handle()>>>(
        wide, thin, p.k, part,
        Destination<Acc>{sums, wide_stride, thin_stride, wide.extent, thin.extent});
    CUDA_CHECK_LAUNCH(MatmulNarrow);
  });
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
  // For so few vectors, Enqueue never chooses a larger kVectors.
  if constexpr (kVectors <= (sizeof(T) == 2 ? 8 : kMostNarrow)) {
    if (wide.extent <= kMostNarrow && p.k >= kLeastNarrowK) {
      const bool packs = wide.k_stride == 1 && wide_packable && thin_packs;
      return DispatchAtLeast<2, kMostNarrow>(wide.extent, [&](auto most) {
        packs ? RunNarrow<T, O, most, true>(p, wide, thin, stream)
              : RunNarrow<T, O, most, false>(p, wide, thin, stream);
      });
    }
  }
  if (wide.k_stride == 1) {
    RunLayout<C, true, O>(p, wide, wide_packable, thin, thin_packs, stream);
  } else {
    RunLayout<C, false, O>(p, wide, wide_packable, thin, thin_packs, stream);
  }
}

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  const std::int64_t vectors = std::min(p.m, p.n);
  DispatchMatmul(p, [&](auto t, auto o) {
    using T = decltype(t);
    if constexpr (!std::is_integral_v<T>) {
      const auto run = [&](auto most) { Run<T, decltype(o), most>(p, stream); };
      if constexpr (sizeof(T) == 2) {
        DispatchAtLeast<8, 16, 32>(vectors, run);
      } else {
        DispatchAtLeast<1, 2, 4, 8, 16, 32>(vectors, run);
      }
    }
  });
}

double Roundoff(const MatmulProblem& p) {
  return SizeOf(p.dtype) == 2 ? TensorRoundoff(p) : MatmulChainRoundoff(p);
}

// Returns the cost of a product whose whole result is one tile.
Cost CostOf(const MatmulProblem& p) {
  const auto rows = std::max<std::int64_t>(1, p.m), columns = std::max<std::int64_t>(1, p.n);
  Cost cost = MatmulCost(p, MatmulTileLoads(p, rows, columns));
  // k is cut into parts until every SM has one, and a block processes its part k-tile by k-tile.
  constexpr std::int64_t kUsualMultiprocessors = 132, kUsualTile = 128, kUsualKTile = 16;
  const std::int64_t parts =
      std::max<std::int64_t>(1, kUsualMultiprocessors * kUsualTile / std::max(rows, columns));
  cost.depth = static_cast<std::uint64_t>(p.k / (parts * kUsualKTile) + 1);
  return cost;
}

std::string Refuses(const MatmulProblem& p) {
  return std::min(p.m, p.n) <= kMostVectors ? "" : "m or n of at most 32";
}

// Returns the maximum number of bytes for the sums of all parts. There are at most as many parts as
// k-tiles, which are at least 128 bytes deep along k.
std::uint64_t ScratchOf(const MatmulProblem& p) {
  const auto sums =
      static_cast<std::uint64_t>(p.m * p.n) * std::max<std::size_t>(4, SizeOf(p.dtype));
  const auto k_tiles = CeilDiv(p.k, kRowBytes / static_cast<std::int64_t>(SizeOf(p.dtype)));
  if (k_tiles <= 1) return 0;
  return std::min<std::uint64_t>(kMostSums, sums * static_cast<std::uint64_t>(k_tiles));
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulSkinny = CudaMatmul({
    .name = "skinny",
    .summary = "few rows or columns: the large operand is read once, at memory speed",
    .source = "multi-stage copies as in CUTLASS, with one operand only a few vectors wide",
    .dtypes = DTypesOf(DType::kF32, DType::kF64, DType::kF16, DType::kBF16),
    .min_compute_capability = 80,
    .roundoff = Roundoff,
    .cost = CostOf,
    .launch = Enqueue,
    .refuses = Refuses,
    .scratch = ScratchOf,
});

}  // namespace tessera
