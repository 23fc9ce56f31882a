// Matmul in f64 on the tensor cores. Their f64 arithmetic is that of IEEE 754 and twice as fast as
// the fused multiply-adds of the other units.
//
// Unlike in `tensor_mma`, an instruction multiplies 16 x 8 by 8 x 8 elements. It requires a lane's
// four elements of a in consecutive registers, and likewise its two elements of b. ldmatrix does
// not support f64. A 16-byte load returns elements that are adjacent in memory but, for half of the
// layouts, not adjacent in the instruction, so they would have to be moved while the tensor cores
// wait. So every element is loaded separately, 8 bytes per lane, directly into its register, and
// neither layout needs moves. The choice of the row, one of 16, avoids bank conflicts: the 16 lanes
// that load together, g = 0 to 3 or 4 to 7 and t = 0 to 3, must use all 16 pairs of banks. The
// 16-byte vectors in a k-tile are swizzled: vector v of row r is at position v ^ (r mod 8):
//
//   contiguous along k: row i, steps t          along i: row t, element i
//   i = 2 g + half: every other row, so that    i = 8 (g / 2 % 2) + 4 (g / 4) + 2 half + g % 2:
//   the two vectors of four such rows have      two adjacent ones, and two more four vectors away;
//   eight different positions                   in four rows, these vectors have eight positions
//
// On Hopper, warps have different roles, as gemm.cuh explains. Four warps fetch: one thread of each
// warp requests the warp's share of a k-tile from TMA, in 16 x 16 squares with 128 bytes per row,
// whose vectors TMA swizzles itself. Eight warps only load and multiply, with the registers that
// the others have released. No warp waits for the whole block; each continues as soon as a k-tile
// is full. Blocks are persistent and compute one tile after another. While the results of a tile
// are stored, the k-tiles of the next tile are already in flight.
//
// On other GPUs, for small matrices, and where TMA cannot read an operand because addresses or
// pitches are not multiples of 16 bytes, threads copy the k-tiles, as in `tensor_mma`.
//
// With 64 sums of 64 bits per thread, there are not enough registers for two sets of all operands,
// so only b has two sets. The registers of a are reloaded as soon as the last of their four
// instructions has read them, three groups of instructions (384 cycles) before they are needed
// again.
//
// Cost for 1024 x 1024 x 1024: 2^31 flops, 256 MiB of loads; 256 tiles of 64 x 64, 64 k-tiles of 16
// steps; a chain of 1024 multiply-adds. For 4096 x 4096 x 4096: 1024 tiles of 128 x 128, nearly
// eight for each of 132 SMs; 2^37 flops, 2.05 ms at 67 TFLOP/s.
//
// Each sum has k terms, which are added in some order with one rounding per addition.
//
// Lesson: kernels/lessons/product_5_tensor_cores.cu
#include <algorithm>
#include <limits>

#include "kernels/cuda/matmul/f64_product.h"
#include "kernels/cuda/matmul/f64_tile.cuh"
#include "kernels/cuda/matmul/hopper/ptx/tensor_map.cuh"
#include "kernels/cuda/team/shares.cuh"

namespace tessera {
namespace {

using namespace f64;

// The parameters of a launch.
struct TmaWork {
  int m, n, k;
  bool packable;  // c can be written in vectors
  double* c;
  std::int64_t c_pitch;
  const unsigned* wanted;  // see MultiplyF64IfWanted
};

__device__ bool IsUnwanted(const unsigned* wanted) { return wanted != nullptr && *wanted == 0; }

// --- Kernels ---

template <class C, bool kAAlongK, bool kBAlongK>
__global__ void __launch_bounds__(TmaRing<C, kAAlongK, kBAlongK>::kThreads, 1)
    MatmulTensorF64Tma(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                       const __grid_constant__ TmaWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // compiled for sm_90a
  if (IsUnwanted(work.wanted)) return;
  using Ring = TmaRing<C, kAAlongK, kBAlongK>;
  __shared__ alignas(8) std::uint64_t barriers[2 * Ring::kStages];
  Ring ring(SharedAddress(FirstKTile()), SharedAddress(barriers));
  if (threadIdx.x == 0) {
    ring.Init();
    PrefetchMap(&a);
    PrefetchMap(&b);
  }
  __syncthreads();  // the barriers are initialized

  const std::int64_t row_tiles = CeilDiv(work.m, C::kRows);
  const std::int64_t column_tiles = CeilDiv(work.n, C::kColumns);
  const auto place = [&](std::int64_t tile) {
    return GroupedTile<kGroup>(tile, row_tiles, column_tiles);
  };
  // The shuffle tells the compiler that the value is the same in all lanes of a warp.
  const int warp = __shfl_sync(kFullMask, WarpIndex(), 0);
  if (warp >= C::kWarps) {
    GiveRegistersBack<24>();
    if (threadIdx.x % kWarpSize == 0) {
      for (std::int64_t tile = blockIdx.x; tile < row_tiles * column_tiles; tile += gridDim.x) {
        const TilePlace at = place(tile);
        ring.Fetch(a, b, static_cast<int>(at.row) * C::kRows,
                   static_cast<int>(at.column) * C::kColumns, work.k, warp - C::kWarps);
      }
    }
  } else {
    TakeRegisters<240>();
    for (std::int64_t tile = blockIdx.x; tile < row_tiles * column_tiles; tile += gridDim.x) {
      WarpTile<C, Ring> result;
      result.Multiply(ring, CeilDiv(work.k, kDepth));
      const TilePlace at = place(tile);
      result.Store(at.row * C::kRows, at.column * C::kColumns, work.m, work.n, work.c_pitch,
                   work.packable, work.c);
    }
  }
#endif
}

template <class C, bool kAAlongK, bool kBAlongK>
__global__ void __launch_bounds__(C::kThreads, 1)
    MatmulTensorF64(Operand<double> a, Operand<double> b, Packable packable, std::int64_t k,
                    double* c, std::int64_t c_pitch, const unsigned* wanted, StackSteps stack) {
  if (IsUnwanted(wanted)) return;
  stack.MoveToProduct(a, b, c);
  using Ring = ThreadRing<C, kAAlongK, kBAlongK>;
  const TilePlace place =
      GroupedTile<kGroup>(blockIdx.x, CeilDiv(a.extent, C::kRows), CeilDiv(b.extent, C::kColumns));
  const std::int64_t row = place.row * C::kRows, column = place.column * C::kColumns;
  Ring ring(a, b, packable, k, row, column, FirstKTile());
  WarpTile<C, Ring> result;
  result.Multiply(ring, CeilDiv(k, kDepth));
  result.Store(row, column, a.extent, b.extent, c_pitch, packable.c, c);
}

// --- Launch ---

// Returns whether TMA, which takes signed 32-bit coordinates, can read the operands. Stacks are
// read by threads.
bool UsesTma(const MatmulProblem& p, const CudaStream& stream) {
  return stream.device().info().compute_capability == 90 && p.stack == 1 &&
         std::max({p.m, p.n, p.k}) < std::numeric_limits<int>::max() - Large::kRows &&
         IsBoxAligned(p.a, p.transpose_a ? p.k : p.m, p.lda * std::int64_t{sizeof(double)}) &&
         IsBoxAligned(p.b, p.transpose_b ? p.n : p.k, p.ldb * std::int64_t{sizeof(double)});
}

template <bool kAAlongK, bool kBAlongK>
void RunTma(const MatmulProblem& p, std::int64_t c_pitch, const unsigned* wanted,
            CudaStream& stream) {
  using Ring = TmaRing<Large, kAAlongK, kBAlongK>;
  const auto map = [&](const void* data, std::int64_t extent, std::int64_t pitch, bool along_k) {
    return MakeTensorMap<double>(data, 1, along_k ? extent : p.k, along_k ? p.k : extent, pitch,
                                 kSquare, kRowBytes);
  };
  const TmaWork work{.m = static_cast<int>(p.m),
                     .n = static_cast<int>(p.n),
                     .k = static_cast<int>(p.k),
                     .packable = IsPackable<double>(p.c, c_pitch),
                     .c = static_cast<double*>(p.c),
                     .c_pitch = c_pitch,
                     .wanted = wanted};
  const auto kernel = MatmulTensorF64Tma<Large, kAAlongK, kBAlongK>;
  AllowSharedBytes(kernel, Ring::kSharedBytes);
  const std::int64_t blocks =
      std::min<std::int64_t>(TilesOf<Large>(p), stream.device().info().multiprocessors);
  kernel<<<static_cast<unsigned>(blocks), Ring::kThreads, Ring::kSharedBytes, stream.handle()>>>(
      map(p.a, p.m, p.lda, kAAlongK), map(p.b, p.n, p.ldb, kBAlongK), work);
  CUDA_CHECK_LAUNCH(MatmulTensorF64Tma);
}

template <class C, bool kAAlongK, bool kBAlongK>
void RunThreads(const MatmulProblem& p, std::int64_t c_pitch, const unsigned* wanted,
                CudaStream& stream) {
  constexpr int kShared = ThreadRing<C, kAAlongK, kBAlongK>::kSharedBytes;
  const auto kernel = MatmulTensorF64<C, kAAlongK, kBAlongK>;
  AllowSharedBytes(kernel, kShared);
  const MatmulProblem worst = LeastAlignedProduct(p);
  const Packable packable{IsPackable<double>(worst.a, p.lda), IsPackable<double>(worst.b, p.ldb),
                          IsPackable<double>(worst.c, c_pitch)};
  ForEachStackPart(p, kMostGridRows, [&](const MatmulProblem& first, const StackSteps& stack) {
    const dim3 grid(static_cast<unsigned>(TilesOf<C>(p)), static_cast<unsigned>(stack.products));
    kernel<<<grid, C::kThreads, kShared, stream.handle()>>>(
        OperandA<double>(first), OperandB<double>(first), packable, p.k,
        static_cast<double*>(first.c), c_pitch, wanted, stack);
    CUDA_CHECK_LAUNCH(MatmulTensorF64);
  });
}

// Returns whether large tiles are faster. On an H200, a round of large tiles on all SMs takes as
// long as three and a quarter rounds of small ones.
bool UsesLarge(const MatmulProblem& p, const CudaStream& stream) {
  const int multiprocessors = stream.device().info().multiprocessors;
  return 13 * CeilDiv(TilesOf<Large>(p) * p.stack, multiprocessors) <=
         4 * CeilDiv(TilesOf<Small>(p) * p.stack, multiprocessors);
}

// Enqueues the product. The rows of c are c_pitch elements apart.
void EnqueuePitched(const MatmulProblem& p, std::int64_t c_pitch, const unsigned* wanted,
                    CudaStream& stream) {
  DispatchLayouts(!p.transpose_a, p.transpose_b, [&](auto a_along_k, auto b_along_k) {
    if (!UsesLarge(p, stream)) {
      RunThreads<Small, a_along_k, b_along_k>(p, c_pitch, wanted, stream);
    } else if (UsesTma(p, stream)) {
      RunTma<a_along_k, b_along_k>(p, c_pitch, wanted, stream);
    } else {
      RunThreads<Large, a_along_k, b_along_k>(p, c_pitch, wanted, stream);
    }
  });
}

void Enqueue(const MatmulProblem& p, Stream& stream) {
  EnqueuePitched(p, p.n, nullptr, Cuda(stream));
}

// The Work type for LaunchProductShares. The order in which the terms of an element are added
// depends neither on the tiles nor on how k-tiles are fetched.
class PiecesWork {
 public:
  explicit PiecesWork(const ProductShare& share) : share_(share) {}
  static constexpr double kRate = 31e12;
  static std::int64_t Round(const MatmulProblem&, int multiprocessors) {
    return std::int64_t{multiprocessors} * Large::kRows * Large::kColumns;
  }
  void Multiply(const ProductPiece& piece) {
    EnqueuePitched(ColumnsOf(share_.problem(), piece), share_.problem().n, nullptr,
                   share_.stream());
  }
  void Finish() {}

 private:
  const ProductShare& share_;
};

}  // namespace

void MultiplyF64IfWanted(const MatmulProblem& p, const unsigned* wanted, CudaStream& stream) {
  EnqueuePitched(p, p.n, wanted, stream);
}

extern constexpr Strategy<MatmulProblem> kMatmulTensorF64 = CudaMatmul({
    .name = "tensor_f64",
    .summary = "f64 on the tensor cores of Ampere and newer GPUs (mma.sync)",
    .source = "the f64 tensor cores of compute capability 8.0 and 9.0; NVIDIA PTX ISA, mma.m16n8k8",
    .dtypes = DTypesOf(DType::kF64),
    .min_compute_capability = 80,
    .cost = TilesCost<Small>,
    .launch = Enqueue,
    .shared = {.launch = LaunchProductShares<PiecesWork>},
    .stacks = true,
});

}  // namespace tessera
