// Matmul with nested tiles for block, warp and thread, each tile in the memory of its level.
//
// Compared with `double_buffered`:
// - There is a level between block and thread. A warp computes its own 64 x 32 rectangle, and a
//   thread 8 x 8 elements of it. The 32 lanes form 8 rows of 4. So a load of a warp reads 8
//   different vectors of a or 4 of b, 128 or 64 bytes, and shared memory broadcasts each vector to
//   all lanes that need it:
//
//      block 128 x 128          warp 64 x 32: 2 x 2 spans       span 32 x 16: 8 x 4 lanes,
//      +----+----+----+----+    +---------+---------+           each 4 x 4 elements
//      | w0 | w1 | w2 | w3 |    |         |         |           +----+----+----+----+
//      +----+----+----+----+    +---------+---------+           | t0 | t1 | t2 | t3 |
//      | w4 | w5 | w6 | w7 |    |         |         |           | t4 | ..
//      +----+----+----+----+    +---------+---------+
//
// - The operands of a step are loaded from shared memory into a second set of registers while the
//   previous step is computed, even across the end of a k-tile. So no multiply-add waits for a
//   load.
// - There are three k-tiles instead of two, one in use and two in flight, so that the arithmetic of
//   two k-tiles hides the memory latency.
// - The compiler knows the layouts of the operands, so the copies between the 16 steps of a k-tile
//   are straight-line code. With 64 sums and 32 operands per thread, two blocks per SM leave 32
//   registers for everything else. If the code needs more, sums are spilled, and fewer
//   multiply-adds have their operands in different banks of the register file.
// - Blocks traverse c in groups of kGroup tile rows, column by column, so that the blocks that run
//   at the same time cover a square of c. This minimizes the bytes of the operands that they read
//   from the L2:
//
//      0  3  6  9        blocks in the order in which they start, kGroup = 3
//      1  4  7  10
//      2  5  8  11
//      ...
//
// Cost for 1024 x 1024 x 1024, f32: 2^31 flops, 128 MiB of loads; 256 tiles of 64 x 64, 64 k-tiles,
// 64 barriers per block; a chain of 1024 multiply-adds. For 4096 x 4096 x 4096: 1024 tiles of 128 x
// 128, nearly four for each of the 264 blocks that run at the same time, 4 GiB of loads, most of
// them from the L2, and 2^37 flops. An H200 issues 128 multiply-adds per cycle per SM, so the
// multiply-adds take 2.05 ms at 1.98 GHz.
//
// Lesson: kernels/lessons/product_4_double_buffer.cu
#include <type_traits>

#include "kernels/cuda/matmul/k_tiles.cuh"
#include "kernels/cuda/team/shares.h"

namespace tessera {
namespace {

constexpr int kStages = 3;
constexpr int kDepth = 16;  // steps along k per k-tile
constexpr int kGroup = 16;  // tile rows per group of blocks
constexpr int kWidth = Pack<float>::kSize;
constexpr int kLanesY = 8, kLanesX = 4;
constexpr int kSpanY = kLanesY * kWidth, kSpanX = kLanesX * kWidth;

// The elements of a thread.
template <class C>
constexpr int kEachY = C::kWarpRows / kLanesY;
template <class C>
constexpr int kEachX = C::kWarpColumns / kLanesX;

using Large = WarpTiling<128, 128, 64, 32, 2>;
using Small = WarpTiling<64, 64, 32, 32, 4>;  // for matrices with few tiles

// Copies a thread's share of an operand that is contiguous along k, one element at a time, to
// k-tiles of kTile elements per row; see KTileLoader. A warp copies rectangles of 4 values of i by
// 8 steps along k, so it reads memory in 32-byte pieces. The 4 unused cells between the rows of a
// k-tile put all 32 elements into different banks:
//
//       bank  0   1   2   3   ..                   lane 8 q + l holds step l of i = q
//   k = 0     i0  i1  i2  i3
//   k = 1                     i0  i1  i2  i3
//   ..                                        ..
template <int kTile, int kThreads>
class TransposingLoader {
  static constexpr int kStep = kThreads / kDepth;  // distance in i from one copy to the next
  static_assert(kDepth == 16 && kTile % kStep == 0);

 public:
  static constexpr int kPitch = kTile + 4;

  __device__ TransposingLoader(const Operand<float>& operand, std::int64_t first) {
    const int warp = WarpIndex(), lane = LaneIndex();
    const int i = warp / 2 * 4 + lane / 8;
    l_ = warp % 2 * 8 + lane % 8;
    cell_ = l_ * kPitch + i;
    inside_ = static_cast<int>(min(operand.extent - first, std::int64_t{kTile})) - i;
    next_ = operand.data + min(first + i, operand.extent - 1) * operand.stride + l_;
    step_ = kStep * operand.stride;
  }

  __device__ void Copy(int depth, float* k_tile) {
    const float* from = next_;
    next_ += kDepth;
    const int valid = l_ < depth ? int{sizeof(float)} : 0;
#pragma unroll
    for (int i = 0; i < kTile; i += kStep, from += step_)
      CopyAsync<sizeof(float)>(k_tile + cell_ + i, from, i < inside_ ? valid : 0);
  }

 private:
  const float* next_;  // the source of the thread's first cell
  std::int64_t step_;  // the step to the next one
  int cell_, l_;       // that cell, and its row of the k-tile
  int inside_;         // number of values of i from next_ to the operand's end
};

// Copies a thread's share of an operand that is contiguous along i, kCopied elements at a time: a
// 16-byte vector or, where the operand is not aligned to vectors, one element.
template <int kTile, int kThreads, int kCopied>
class StraightLoader {
  static constexpr int kCopies = kTile / kCopied;  // copies per row of a k-tile
  static constexpr int kStep = kThreads / kCopies;
  static_assert(kThreads % kCopies == 0 && kDepth % kStep == 0);

 public:
  static constexpr int kPitch = kTile + 4;

  __device__ StraightLoader(const Operand<float>& operand, std::int64_t first) {
    const int i = static_cast<int>(threadIdx.x) % kCopies * kCopied;
    l_ = static_cast<int>(threadIdx.x) / kCopies;
    cell_ = l_ * kPitch + i;
    const std::int64_t inside = max(std::int64_t{0}, operand.extent - first - i);
    valid_ = static_cast<int>(min(inside, std::int64_t{kCopied})) * int{sizeof(float)};
    next_ = operand.data + (inside == 0 ? 0 : first + i) + l_ * operand.k_stride;
    step_ = kStep * operand.k_stride;
    k_tile_step_ = kDepth * operand.k_stride;
  }

  __device__ void Copy(int depth, float* k_tile) {
    const float* from = next_;
    next_ += k_tile_step_;
#pragma unroll
    for (int l = 0; l < kDepth; l += kStep, from += step_)
      CopyAsync<kCopied* int{sizeof(float)}>(k_tile + cell_ + l * kPitch, from,
                                             l_ + l < depth ? valid_ : 0);
  }

 private:
  const float* next_;                // the source of the thread's first cell
  std::int64_t step_, k_tile_step_;  // the steps to the next cell and to the next k-tile
  int cell_, l_;                     // the cell, and its row of the k-tile
  int valid_;                        // number of bytes inside the operand
};

template <int kTile, int kThreads, bool kAlongK, bool kPacks>
using Loader = std::conditional_t<kAlongK, TransposingLoader<kTile, kThreads>,
                                  StraightLoader<kTile, kThreads, kPacks ? kWidth : 1>>;

// The elements of both operands that a thread needs for one step.
template <class C>
struct Fragment {
  float a[kEachY<C>], b[kEachX<C>];

  // `a_row` and `b_row` are the step's row of each k-tile, at the thread's first element.
  __device__ void Load(const float* a_row, const float* b_row) {
#pragma unroll
    for (int g = 0; g < kEachY<C> / kWidth; ++g) {
      const Pack<float> pack = LoadPack(a_row + g * kSpanY);
#pragma unroll
      for (int w = 0; w < kWidth; ++w) a[g * kWidth + w] = pack.v[w];
    }
#pragma unroll
    for (int g = 0; g < kEachX<C> / kWidth; ++g) {
      const Pack<float> pack = LoadPack(b_row + g * kSpanX);
#pragma unroll
      for (int w = 0; w < kWidth; ++w) b[g * kWidth + w] = pack.v[w];
    }
  }
};

template <class C, bool kAAlongK, bool kBAlongK, bool kPacks>
struct Loaders {
  using A = Loader<C::kRows, C::kThreads, kAAlongK, kPacks>;
  using B = Loader<C::kColumns, C::kThreads, kBAlongK, kPacks>;
  static constexpr int kStageA = kDepth * A::kPitch, kStageB = kDepth * B::kPitch;
  static constexpr int kSharedBytes = kStages * (kStageA + kStageB) * int{sizeof(float)};
};

template <class C, bool kAAlongK, bool kBAlongK, bool kPacks>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    MatmulWarpTiled(Operand<float> a, Operand<float> b, std::int64_t k, bool c_packable, float* c,
                    StackSteps stack) {
  stack.MoveToProduct(a, b, c);
  using S = Loaders<C, kAAlongK, kBAlongK, kPacks>;
  constexpr int kPitchA = S::A::kPitch, kPitchB = S::B::kPitch;
  float* const a_k_tiles = DynamicShared<float>();
  float* const b_k_tiles = a_k_tiles + kStages * S::kStageA;

  const TilePlace place = GroupedTile<kGroup>(blockIdx.x, (a.extent + C::kRows - 1) / C::kRows,
                                              (b.extent + C::kColumns - 1) / C::kColumns);
  const std::int64_t row = place.row * C::kRows, column = place.column * C::kColumns;

  // The thread's first element in the tile.
  const int warp = WarpIndex(), lane = LaneIndex();
  const int y = warp / C::kWarpsX * C::kWarpRows + lane / kLanesX * kWidth;
  const int x = warp % C::kWarpsX * C::kWarpColumns + lane % kLanesX * kWidth;

  typename S::A a_stream(a, row);
  typename S::B b_stream(b, column);
  int left = static_cast<int>((k + kDepth - 1) / kDepth);   // k-tiles that are not yet copied
  const int tail = static_cast<int>((k - 1) % kDepth) + 1;  // steps along k in the last k-tile
  int k_tiles = left;                                       // k-tiles that are not yet used
  int to = 0;
  // Copies the next k-tile, if there is one. Every call closes a group of copies, so that the
  // number of groups in flight shows which k-tiles have arrived.
  const auto copy = [&] {
    if (left > 0) {
      const int depth = left == 1 ? tail : kDepth;
      a_stream.Copy(depth, a_k_tiles + to * S::kStageA);
      b_stream.Copy(depth, b_k_tiles + to * S::kStageB);
      --left;
    }
    CommitCopies();
    to = to + 1 == kStages ? 0 : to + 1;
  };

  float sums[kEachY<C>][kEachX<C>] = {};
  for (int s = 0; s < kStages - 1; ++s) copy();
  WaitForCopies<kStages - 2>();
  __syncthreads();  // the first k-tile is complete
  Fragment<C> fragments[2];
  const float* const a_first = a_k_tiles + y;
  const float* const b_first = b_k_tiles + x;
  const float *a_k_tile = a_first, *b_k_tile = b_first;
  fragments[0].Load(a_k_tile, b_k_tile);
  int stage = 0;
  copy();
  for (; k_tiles > 0; --k_tiles) {
#pragma unroll
    for (int l = 0; l < kDepth; ++l) {
      if (l + 1 < kDepth) {
        fragments[(l + 1) % 2].Load(a_k_tile + (l + 1) * kPitchA, b_k_tile + (l + 1) * kPitchB);
      } else {
        WaitForCopies<kStages - 2>();
        __syncthreads();  // the next k-tile is complete, and all threads have loaded this one
        stage = stage + 1 == kStages ? 0 : stage + 1;
        a_k_tile = a_first + stage * S::kStageA;
        b_k_tile = b_first + stage * S::kStageB;
        copy();  // replaces the old k-tile
        fragments[0].Load(a_k_tile, b_k_tile);
      }
      const Fragment<C>& now = fragments[l % 2];
#pragma unroll
      for (int i = 0; i < kEachY<C>; ++i)
#pragma unroll
        for (int j = 0; j < kEachX<C>; ++j) sums[i][j] = fma(now.a[i], now.b[j], sums[i][j]);
    }
  }
  static_assert(kDepth % 2 == 0, "the first fragment of a k-tile has to be fragments[0]");

#pragma unroll
  for (int i = 0; i < kEachY<C>; ++i) {
    const std::int64_t r = row + y + i / kWidth * kSpanY + i % kWidth;
    if (r >= a.extent) continue;
#pragma unroll
    for (int j = 0; j < kEachX<C>; j += kWidth)
      StoreClipped(sums[i] + j, column + x + j / kWidth * kSpanX, b.extent, c_packable,
                   c + r * b.extent);
  }
}

template <class C>
void Run(const MatmulProblem& p, CudaStream& stream) {
  const Packable packable = PackableOf<float>(LeastAlignedProduct(p));
  const auto run = [&](auto a_along_k, auto b_along_k, auto packs) {
    const auto kernel = MatmulWarpTiled<C, a_along_k, b_along_k, packs>;
    constexpr int kSharedBytes = Loaders<C, a_along_k, b_along_k, packs>::kSharedBytes;
    AllowSharedBytes(kernel, kSharedBytes);
    ForEachStackPart(p, kMostGridRows, [&](const MatmulProblem& first, const StackSteps& stack) {
      const dim3 grid(static_cast<unsigned>(TilesOf<C>(p)), static_cast<unsigned>(stack.products));
      kernel<<<grid, C::kThreads, kSharedBytes, stream.handle()>>>(
          OperandA<float>(first), OperandB<float>(first), p.k, packable.c,
          static_cast<float*>(first.c), stack);
      CUDA_CHECK_LAUNCH(MatmulWarpTiled);
    });
  };
  // Operands that are contiguous along k are copied one element at a time, aligned or not.
  const bool packs = (!p.transpose_a || packable.a) && (p.transpose_b || packable.b);
  DispatchLayouts(!p.transpose_a, p.transpose_b, [&](auto a_along_k, auto b_along_k) {
    packs ? run(a_along_k, b_along_k, std::true_type{})
          : run(a_along_k, b_along_k, std::false_type{});
  });
}

// Returns the work of the busiest SM, in elements of c times `factor`. The factor is the relative
// time per element, which is larger for smaller tiles.
template <class C>
double Time(const MatmulProblem& p, int multiprocessors, double factor) {
  return static_cast<double>(CeilDiv(TilesOf<C>(p) * p.stack, multiprocessors) * C::kRows *
                             C::kColumns) *
         factor;
}

void Enqueue(const MatmulProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  const int multiprocessors = cuda.device().info().multiprocessors;
  if (Time<Large>(p, multiprocessors, 1.0) <= Time<Small>(p, multiprocessors, 1.4)) {
    Run<Large>(p, cuda);
  } else {
    Run<Small>(p, cuda);
  }
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulWarpTiled = CudaMatmul({
    .name = "warp_tiled",
    .summary = "tiles for block, warp and thread; three k-tiles; operands loaded one step ahead",
    .source = "the SIMT kernels of CUTLASS, and S. Boehm's series of SGEMM kernels (2022)",
    .dtypes = DTypesOf(DType::kF32),
    .min_compute_capability = 80,
    .cost = TilesCost<Small>,
    .launch = Enqueue,
    .shared = {.launch = LaunchGathered<kMatmulWarpTiled>},
    .stacks = true,
});
template void LaunchGathered<kMatmulWarpTiled>(const MatmulProblem&, std::span<const TeamShare>,
                                               Stream&);

}  // namespace tessera
