// Matmul on the tensor cores of Ampere and newer GPUs, with mma.sync, ldmatrix and cp.async.
//
// The levels of tiling are the same as in `warp_tiled`: block, warp and registers, with k-tiles
// copied in the background. But the innermost level is one instruction, with which a warp
// multiplies 16 x 16 by 16 x 8 16-bit elements (2048 multiply-adds) and adds the products in
// f32:
//
//     block 128 x 128         warp 64 x 32: 4 x 4 tiles       tile 16 x 8: one instruction
//     +----+----+----+----+   +---+---+---+---+               for 16 steps along k
//     | w0 | w1 | w2 | w3 |   |   |   |   |   |
//     +----+----+----+----+   +---+---+---+---+
//     | w4 | w5 | w6 | w7 |   |   |   |   |   |
//     +----+----+----+----+   ..
//
// The instruction needs scattered pairs of elements from each lane. ldmatrix gathers them, 8 x 8
// elements from 8 rows of 16 bytes at a time, either unchanged or transposed. So k-tiles can have
// the layout of the operands in memory, transposed or not (see k_tiles.cuh), and rows of shared
// memory are read without bank conflicts.
//
// An operand whose address or pitch is not a multiple of 16 bytes is first copied to aligned rows,
// because 2-byte elements are too small for copies in the background. The products of a stack are
// then computed one after another; otherwise the grid has a row of blocks for each product.
//
// Cost for 1024 x 1024 x 1024, bf16: 2^31 flops, 64 MiB of loads; 256 tiles of 64 x 64, 16 k-tiles
// of 64 steps, 16 barriers per block; a chain of 64 tensor core instructions.
//
// On Hopper, `tensor_bf16` and `tensor_f16` are faster, because they use Hopper's own instructions.
//
// Lesson: kernels/lessons/product_5_tensor_cores.cu
#include "kernels/cuda/matmul/k_tiles.cuh"
#include "kernels/cuda/matmul/mma.cuh"
#include "kernels/cuda/team/shares.h"

namespace tessera {
namespace {

constexpr int kStages = 3;
constexpr int kDepth = 64;  // steps along k per k-tile: rows of 128 bytes
constexpr int kGroup = 16;  // tile rows per group of blocks
constexpr std::uint32_t kCopyBlock = 256;

// Adds the sizes of k-tiles, in elements, and of their stages, in bytes.
template <int... kShape>
struct Config : WarpTiling<kShape...> {
  static constexpr int kA = Config::kRows * kDepth, kB = Config::kColumns * kDepth;
  static constexpr int kSharedBytes = kStages * (kA + kB) * 2;
};
using Large = Config<128, 128, 64, 32, 2>;
using Small = Config<64, 64, 32, 32, 4>;  // for matrices with few tiles

// Loads the elements of 16 values of i and 16 steps along k, beginning at [i, l], as the 8 x 8
// matrices at [i, l], [i + 8, l], [i, l + 8] and [i + 8, l + 8].
template <class S, class T>
__device__ void LoadTile(const T* k_tile, int i, int l, unsigned (&tile)[4]) {
  const int lane = LaneIndex();
  if constexpr (S::kAlongK) {
    LoadMatrices<false>(k_tile + S::At(i + lane % 16, l / 8 + lane / 16), tile);
  } else {
    LoadMatrices<true>(k_tile + S::At(l + lane / 16 * 8 + lane % 8, i / 8 + lane / 8 % 2), tile);
  }
}

// Stores two adjacent elements of a row of c. pairs: whether one instruction may store both.
template <class O>
__device__ void StorePair(float first, float second, std::int64_t column, std::int64_t columns,
                          bool pairs, O* row) {
  struct alignas(2 * sizeof(O)) Pair {
    O v[2];
  };
  const Pair pair = {{static_cast<O>(first), static_cast<O>(second)}};
  if (pairs && column + 1 < columns) {
    *reinterpret_cast<Pair*>(row + column) = pair;
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (column + i < columns) row[column + i] = pair.v[i];
}

template <class C, class T, class O, bool kAAlongK, bool kBAlongK>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    MatmulTensorMma(Operand<T> a, Operand<T> b, bool pairs, std::int64_t k, O* c,
                    StackSteps stack) {
  stack.MoveToProduct(a, b, c);
  using KTileA = KTile<T, C::kRows, kDepth, kAAlongK>;
  using KTileB = KTile<T, C::kColumns, kDepth, kBAlongK>;
  T* const a_k_tiles = DynamicShared<T>();
  T* const b_k_tiles = a_k_tiles + kStages * C::kA;
  const TilePlace place = GroupedTile<kGroup>(blockIdx.x, (a.extent + C::kRows - 1) / C::kRows,
                                              (b.extent + C::kColumns - 1) / C::kColumns);
  const std::int64_t row = place.row * C::kRows, column = place.column * C::kColumns;
  const int warp = WarpIndex(), lane = LaneIndex();
  const int y = warp / C::kWarpsX * C::kWarpRows, x = warp % C::kWarpsX * C::kWarpColumns;

  KTileLoader<T, KTileA, C::kThreads> a_stream(a, row, 0);
  KTileLoader<T, KTileB, C::kThreads> b_stream(b, column, 0);
  std::int64_t left = k;  // steps along k that are not yet copied
  const auto copy = [&](int stage) {
    if (left > 0) {
      const int depth = static_cast<int>(min(left, std::int64_t{kDepth}));
      a_stream.Copy(a, true, depth, a_k_tiles + stage * C::kA);
      b_stream.Copy(b, true, depth, b_k_tiles + stage * C::kB);
      left -= kDepth;
    }
    CommitCopies();
  };

  constexpr int kTilesY = C::kWarpRows / 16, kTilesX = C::kWarpColumns / 8;
  float sums[kTilesY][kTilesX][4] = {};
  for (int s = 0; s < kStages - 1; ++s) copy(s);
  int stage = 0;
  for (std::int64_t k_first = 0; k_first < k; k_first += kDepth) {
    WaitForCopies<kStages - 2>();
    __syncthreads();  // the k-tile is complete, and the previous one is free
    copy(stage == 0 ? kStages - 1 : stage - 1);
    const T* const a_k_tile = a_k_tiles + stage * C::kA;
    const T* const b_k_tile = b_k_tiles + stage * C::kB;
#pragma unroll
    for (int l = 0; l < kDepth; l += 16) {
      unsigned as[kTilesY][4], bs[kTilesX / 2][4];
#pragma unroll
      for (int i = 0; i < kTilesY; ++i) LoadTile<KTileA>(a_k_tile, y + i * 16, l, as[i]);
#pragma unroll
      for (int j = 0; j < kTilesX / 2; ++j) LoadTile<KTileB>(b_k_tile, x + j * 16, l, bs[j]);
#pragma unroll
      for (int i = 0; i < kTilesY; ++i)
#pragma unroll
        for (int j = 0; j < kTilesX; ++j)
          MultiplyHalves<T>(as[i], bs[j / 2][j % 2], bs[j / 2][j % 2 + 2], sums[i][j]);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

#pragma unroll
  for (int i = 0; i < kTilesY; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t r = row + y + i * 16 + half * 8 + lane / 4;
      if (r >= a.extent) continue;
#pragma unroll
      for (int j = 0; j < kTilesX; ++j)
        StorePair(sums[i][j][2 * half], sums[i][j][2 * half + 1], column + x + j * 8 + lane % 4 * 2,
                  b.extent, pairs, c + r * b.extent);
    }
  }
}

// Copies a matrix to rows of `packs` vectors, padded with zeros. Each thread copies one vector at a
// time.
template <class T>
__global__ void __launch_bounds__(kCopyBlock)
    PackRows(const T* from, std::int64_t rows, std::int64_t columns, std::int64_t pitch, T* to,
             std::int64_t packs) {
  for (std::int64_t e = GridThread(); e < rows * packs; e += GridThreads()) {
    const T* const row = from + e / packs * pitch;
    const std::int64_t column = e % packs * Pack<T>::kSize;
    Pack<T> pack;
#pragma unroll
    for (int w = 0; w < Pack<T>::kSize; ++w)
      pack.v[w] = column + w < columns ? row[column + w] : T{};
    StorePack(to + e * Pack<T>::kSize, pack);
  }
}

// Returns the operand in aligned 16-byte vectors: the operand itself, or a copy in the stream's
// scratch memory.
template <class T>
Operand<T> Packed(const Operand<T>& operand, std::int64_t k, CudaStream& stream) {
  const bool along_k = operand.k_stride == 1;
  const std::int64_t pitch = along_k ? operand.stride : operand.k_stride;
  if (IsPackable<T>(operand.data, pitch)) return operand;
  const std::int64_t rows = along_k ? operand.extent : k, columns = along_k ? k : operand.extent;
  const std::int64_t packs = CeilDiv(columns, Pack<T>::kSize), packed = packs * Pack<T>::kSize;
  auto* copy = static_cast<T*>(stream.Scratch(static_cast<std::size_t>(rows * packed) * sizeof(T)));
  const Grid grid = MakeGrid(rows * packs, Launch{}, kCopyBlock, 1);
  PackRows<<<grid.blocks, grid.block_size, 0, stream.handle()>>>(operand.data, rows, columns, pitch,
                                                                 copy, packs);
  CUDA_CHECK_LAUNCH(PackRows);
  return {copy, operand.extent, along_k ? packed : 1, along_k ? 1 : packed};
}

template <class C, class T, class O>
void Run(const MatmulProblem& p, CudaStream& stream) {
  const MatmulProblem worst = LeastAlignedProduct(p);
  const Packable packable = PackableOf<T>(worst);
  const bool pairs =
      p.n % 2 == 0 && reinterpret_cast<std::uintptr_t>(worst.c) % (2 * sizeof(O)) == 0;
  // The strides of the operands decide, not the transposes, because an operand with a pitch of 1 is
  // contiguous along both dimensions.
  const auto run = [&](const MatmulProblem& first, const StackSteps& stack) {
    const Operand<T> a = Packed(OperandA<T>(first), p.k, stream);
    const Operand<T> b = Packed(OperandB<T>(first), p.k, stream);
    DispatchLayouts(a.k_stride == 1, b.k_stride == 1, [&](auto a_along_k, auto b_along_k) {
      const auto kernel = MatmulTensorMma<C, T, O, a_along_k, b_along_k>;
      const dim3 grid(static_cast<unsigned>(TilesOf<C>(p)), static_cast<unsigned>(stack.products));
      AllowSharedBytes(kernel, C::kSharedBytes);
      kernel<<<grid, C::kThreads, C::kSharedBytes, stream.handle()>>>(
          a, b, pairs, p.k, static_cast<O*>(first.c), stack);
      CUDA_CHECK_LAUNCH(MatmulTensorMma);
    });
  };
  if (packable.a && packable.b) return ForEachStackPart(p, kMostGridRows, run);
  for (std::int64_t i = 0; i < p.stack && !stream.stopped(); ++i) {
    const ScratchMark mark = stream.MarkScratch();
    run(ProductOf(p, i), StackSteps{});
    stream.RewindScratch(mark);
  }
}

void Enqueue(const MatmulProblem& p, Stream& any_stream) {
  CudaStream& stream = Cuda(any_stream);
  const bool large = TilesOf<Large>(p) * p.stack >= stream.device().info().multiprocessors;
  DispatchMatmul(p, [&](auto t, auto o) {
    using T = decltype(t);
    using O = decltype(o);
    if constexpr (sizeof(T) == 2) {
      large ? Run<Large, T, O>(p, stream) : Run<Small, T, O>(p, stream);
    }
  });
}

// Returns the number of bytes for copies of operands that are not aligned to 16-byte vectors.
std::uint64_t ScratchOf(const MatmulProblem& stack) {
  const MatmulProblem p = LeastAlignedProduct(stack);
  constexpr std::int64_t kPack = Pack<Half>::kSize;  // for both types
  const auto copy = [](const void* data, std::int64_t pitch, std::int64_t rows,
                       std::int64_t columns) {
    return IsPackable<Half>(static_cast<const Half*>(data), pitch)
               ? 0
               : static_cast<std::uint64_t>(rows * CeilDiv(columns, kPack) * kPack) * sizeof(Half);
  };
  return (p.transpose_a ? copy(p.a, p.lda, p.k, p.m) : copy(p.a, p.lda, p.m, p.k)) +
         (p.transpose_b ? copy(p.b, p.ldb, p.n, p.k) : copy(p.b, p.ldb, p.k, p.n));
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulTensorMma = CudaMatmul({
    .name = "tensor_mma",
    .summary = "16-bit operands on the tensor cores of Ampere and newer GPUs (mma.sync, ldmatrix)",
    .source = "NVIDIA PTX ISA, mma.m16n8k16 and ldmatrix; the multi-stage kernels of CUTLASS",
    .dtypes = DTypesOf(DType::kF16, DType::kBF16),
    .min_compute_capability = 80,
    .roundoff = TensorRoundoff,
    .cost = TilesCost<Small>,
    .launch = Enqueue,
    .shared = {.launch = LaunchGathered<kMatmulTensorMma>},
    .scratch = ScratchOf,
    .stacks = true,
});
template void LaunchGathered<kMatmulTensorMma>(const MatmulProblem&, std::span<const TeamShare>,
                                               Stream&);

}  // namespace tessera
