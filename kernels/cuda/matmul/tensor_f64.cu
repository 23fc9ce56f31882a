// Matmul in f64 on the tensor cores, whose f64 is IEEE arithmetic: twice the speed of the same
// sums by fused multiply-adds.
//
// Against `tensor_mma`: an instruction multiplies 16 x 8 by 8 x 8 elements. A lane's four elements
// of a have to stand in consecutive registers, as do its two of b, and ldmatrix does not know f64.
// A load of 16 bytes brings neighbours in memory, which for half of the layouts are not neighbours
// in the instruction; they would have to be moved, while the tensor cores wait. So every element is
// loaded for itself, 8 bytes per lane, straight into its register, and both layouts can be had
// without moves. Which of 16 rows a lane calls its own is chosen for the banks of shared memory:
// the 16 lanes that load together, g = 0 to 3 or 4 to 7 and t = 0 to 3, must meet all 16 pairs of
// banks. In a k-tile the vectors of 16 bytes are swizzled, v of row r at place v ^ (r mod 8):
//
//   contiguous along k: row i, steps t          along i: row t, element i
//   i = 2 g + half: every other row, so that    i = 8 (g / 2 % 2) + 4 (g / 4) + 2 half + g % 2:
//   four of them have their two vectors in      two neighbours, and two more four vectors away,
//   four pairs of places                        which four rows have in eight places
//
// On Hopper, warps have different work, as tensor.cuh tells. Four fetch: one thread of each orders
// its share of a k-tile from TMA, squares of 16 x 16 elements, 128 bytes a row, whose vectors TMA
// permutes itself. Eight do nothing but load and multiply, with the registers that the others have
// given away, and no worker waits for the whole block: a warp goes on as soon as a k-tile is full.
// Blocks are persistent and compute tile after tile, the k-tiles of the next already under way
// while the results of this one are stored.
//
// On other GPUs, for small matrices, and where TMA cannot read an operand because addresses or
// pitches are not multiples of 16 bytes, threads copy the k-tiles, as in `tensor_mma`.
//
// 64 sums of 64 bits a thread leave no registers for two sets of operands. Those of b have two; a's
// are loaded anew as soon as the last of their four instructions has read them, three groups, 384
// cycles, before they are needed again.
//
// Cost for 1024 x 1024 x 1024: 2^31 flops, 256 MiB of loads; 256 tiles of 64 x 64, 64 k-tiles of 16
// steps; a chain of 1024. For 4096 x 4096 x 4096: 1024 tiles of 128 x 128, nearly eight for each of
// 132 multiprocessors; 2^37 flops, 2.05 ms at 67 TFLOP/s.
//
// Right for any m, n and k: copies beyond the edges write zeros, which add 0 * 0, and results
// beyond the edges are not stored. For any pitch and alignment: where vectors are not aligned,
// elements travel one by one. Each sum has k terms, added in some order with one rounding each.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/matmul/hopper/ptx.cuh"
#include "kernels/cuda/matmul/hopper/tensor_map.cuh"
#include "kernels/cuda/matmul/k_tiles.cuh"
#include "kernels/cuda/matmul/mma.cuh"
#include "kernels/cuda/primitives.cuh"

namespace tessera {
namespace {

constexpr int kDepth = 16;   // steps along k a k-tile: rows of 128 bytes
constexpr int kStep = 8;     // of one instruction
constexpr int kGroup = 16;   // tile rows a group of blocks
constexpr int kSquare = 16;  // rows of a square, of what an instruction takes of a, of two of b
constexpr int kRowBytes = kDepth * int{sizeof(double)};
constexpr int kSquareBytes = kSquare * kRowBytes;
constexpr int kAlignment = 1024;  // of the pattern in which vectors are swizzled
static_assert(kDepth / kStep % 2 == 0, "the first step of a k_tile has to be in buffer 0");

// The tile of a block and the tile of a warp.
template <int kRows_, int kColumns_, int kWarpRows_, int kWarpColumns_>
struct Config {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;
  static constexpr int kWarpsX = kColumns / kWarpColumns;
  static constexpr int kWarps = kWarpsX * (kRows / kWarpRows);
  static constexpr int kThreads = kWarpSize * kWarps;
  static constexpr int kBytesA = kRows * kRowBytes, kBytesB = kColumns * kRowBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int SharedBytes(int stages) { return kAlignment + stages * kStageBytes; }
};
using Large = Config<128, 128, 64, 32>;
using Small = Config<64, 64, 32, 32>;  // for matrices with few tiles

// The first k-tile in the block's shared memory.
__device__ char* FirstKTile() {
  char* const shared = DynamicShared<char>();
  return shared + (kAlignment - SharedAddress(shared) % kAlignment) % kAlignment;
}

// --- k-tiles by the copy engine ---

// What the blocks of a launch are told.
struct EngineWork {
  int m, n, k;
  bool packable;  // c can be written in vectors
  double* c;
};

// A k-tile of an operand is a pile of squares, whichever way it lies in memory.
template <bool kAlongK_>
struct PileKTile {
  static constexpr bool kAlongK = kAlongK_;
  static constexpr int kStepBytes = kRowBytes;       // from a step along k to the next, if !kAlongK
  static constexpr int kSquarePitch = kSquareBytes;  // from 16 indices to the next
};

// The k-tiles in shared memory as a thread goes through them: a ring in which those of all tiles of
// the block follow each other.
template <class C, bool kAAlongK, bool kBAlongK>
class EngineRing {
 public:
  static constexpr int kStages = 6;
  static constexpr int kFetchers = 4;  // warps
  static constexpr int kThreads = C::kThreads + kFetchers * kWarpSize;
  static constexpr int kSharedBytes = C::SharedBytes(kStages);
  using KTileA = PileKTile<kAAlongK>;
  using KTileB = PileKTile<kBAlongK>;

  // barriers: addresses of kStages "full" ones and as many "empty" ones.
  __device__ EngineRing(std::uint32_t k_tiles, std::uint32_t barriers)
      : k_tiles_(k_tiles), barriers_(barriers) {}

  __device__ void Init() const {
    for (int s = 0; s < kStages; ++s) {
      BarrierInit(barriers_ + s * 8, kFetchers);
      BarrierInit(barriers_ + (kStages + s) * 8, C::kWarps);
    }
    BarrierInitFence();
  }

  // Of a fetching warp, one thread: its squares of the k-tiles of a tile at [row, column].
  __device__ void Fetch(const CUtensorMap& a, const CUtensorMap& b, int row, int column, int k,
                        int fetcher) {
    constexpr int kA = C::kRows / kSquare / kFetchers, kB = C::kColumns / kSquare / kFetchers;
    for (int l = 0; l < k; l += kDepth) {
      BarrierWait(empty(), parity_ ^ 1);  // new barriers are in the phase of parity 0
      BarrierExpect(full(), (kA + kB) * kSquareBytes);
#pragma unroll
      for (int i = 0; i < kA; ++i) FetchSquare<kAAlongK>(a, row, fetcher * kA + i, l, k_tile());
#pragma unroll
      for (int i = 0; i < kB; ++i)
        FetchSquare<kBAlongK>(b, column, fetcher * kB + i, l, k_tile() + C::kBytesA);
      Step();
    }
  }

  // Of the others.
  __device__ std::uint32_t k_tile() const { return k_tiles_ + stage_ * C::kStageBytes; }
  __device__ void Refill() const {}
  __device__ void WaitUntilFull() const { BarrierWait(full(), parity_); }
  // On to the next k-tile, waiting for it if there is one in this tile. The warp has asked for its
  // last elements of this one; the fence sees to it that they are read before TMA, which does not
  // queue behind loads, writes others there.
  __device__ void Next(bool more) {
    FenceForCopyEngine();
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) BarrierArrive(empty());
    Step();
    if (more) WaitUntilFull();
  }

 private:
  __device__ std::uint32_t full() const { return barriers_ + stage_ * 8; }
  __device__ std::uint32_t empty() const { return full() + kStages * 8; }
  __device__ void Step() {
    if (++stage_ == kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  // The 16 indices of the operand from first + 16 i on, and as many steps from l on.
  template <bool kAlongK>
  __device__ void FetchSquare(const CUtensorMap& map, int first, int i, int l,
                              std::uint32_t k_tile) const {
    first += i * kSquare;
    LoadBox(k_tile + i * kSquareBytes, &map, kAlongK ? l : first, kAlongK ? first : l, 0, full());
  }

  const std::uint32_t k_tiles_, barriers_;
  int stage_ = 0;
  unsigned parity_ = 0;
};

// --- k-tiles by threads ---

template <int kTile, bool kAlongK>
struct ThreadKTile : KTile<double, kTile, kDepth, kAlongK> {
  static constexpr int kStepBytes = kTile * int{sizeof(double)};
  static constexpr int kSquarePitch = kAlongK ? kSquareBytes : kSquare * int{sizeof(double)};
};

// The k-tiles of one tile, copied by all threads of the block.
template <class C, bool kAAlongK, bool kBAlongK>
class ThreadRing {
 public:
  static constexpr int kStages = 3;
  static constexpr int kSharedBytes = C::SharedBytes(kStages);
  using KTileA = ThreadKTile<C::kRows, kAAlongK>;
  using KTileB = ThreadKTile<C::kColumns, kBAlongK>;

  __device__ ThreadRing(const Operand<double>& a, const Operand<double>& b,
                        const Packable& packable, std::int64_t k, std::int64_t row,
                        std::int64_t column, char* k_tiles)
      : a_(a),
        b_(b),
        packable_(packable),
        k_tiles_(k_tiles),
        left_(k),
        a_stream_(a, row, 0),
        b_stream_(b, column, 0) {
    for (int s = 0; s < kStages - 1; ++s) Copy(s);
  }

  // Into the place of the k-tile before this one, with which everybody was done at the barrier.
  __device__ void Refill() { Copy(stage_ == 0 ? kStages - 1 : stage_ - 1); }

  __device__ std::uint32_t k_tile() const {
    return SharedAddress(k_tiles_ + stage_ * C::kStageBytes);
  }
  __device__ void WaitUntilFull() const {
    WaitForCopies<kStages - 2>();
    __syncthreads();  // the k-tile is complete, and everybody has loaded the last of the one before
  }
  __device__ void Next(bool /*more*/) {
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    WaitUntilFull();
  }

 private:
  __device__ void Copy(int stage) {
    if (left_ > 0) {
      const int depth = static_cast<int>(min(left_, std::int64_t{kDepth}));
      auto* const to = reinterpret_cast<double*>(k_tiles_ + stage * C::kStageBytes);
      a_stream_.Copy(a_, packable_.a, depth, to);
      b_stream_.Copy(b_, packable_.b, depth, to + C::kRows * kDepth);
      left_ -= kDepth;
    }
    CommitCopies();
  }

  const Operand<double>&a_, &b_;
  const Packable& packable_;
  char* const k_tiles_;
  std::int64_t left_;  // steps along k from the next k-tile to be copied on
  KTileLoader<double, KTileA, C::kThreads> a_stream_;
  KTileLoader<double, KTileB, C::kThreads> b_stream_;
  int stage_ = 0;
};

// --- Multiplication ---

// Where lane 4 g + t finds its elements of an operand: of each 16 indices its two, one a half, and
// of each 4 steps along k step t.
template <class S>
struct Fragments {
  // The index among the 16.
  static __device__ constexpr int Place(int g, int half) {
    return S::kAlongK ? 2 * g + half : g / 2 % 2 * 8 + g / 4 * 4 + half * 2 + g % 2;
  }

  // From the warp's first square in a k-tile to the lane's element of half 0 and the first steps.
  static __device__ std::uint32_t LaneOffset() {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int i = Place(lane / 4, 0), t = lane % 4;
    return S::kAlongK ? i * kRowBytes + (t / 2 ^ i % 8) * 16 + t % 2 * 8
                      : t * S::kStepBytes + (i / 2 ^ t) * 16 + i % 2 * 8;
  }

  // at: the lane's offset, in a k-tile. The element of the square and half, and of steps 4 f to 4 f
  // +
  // 3. Their bits in a vector's place are others than the lane's, and all of an address.
  static __device__ double Load(std::uint32_t at, int square, int half, int f) {
    const std::uint32_t address = S::kAlongK
                                      ? (at ^ (f << 5 | half << 4)) + half * kRowBytes
                                      : (at ^ (f % 2 << 6 | half << 4)) + f * 4 * S::kStepBytes;
    double x;
    asm volatile("ld.shared.f64 %0, [%1];"
                 : "=d"(x)
                 : "r"(address + square * S::kSquarePitch)
                 : "memory");
    return x;
  }
};

// A warp's part of a tile of c.
template <class C, class Ring>
class WarpTile {
  using A = Fragments<typename Ring::KTileA>;
  using B = Fragments<typename Ring::KTileB>;
  static constexpr int kSquaresY = C::kWarpRows / kSquare, kSquaresX = C::kWarpColumns / kSquare;

 public:
  // Sums over `k-tiles` k-tiles, at least one, from the one at which the ring stands on.
  __device__ void Multiply(Ring& ring, std::int64_t k_tiles) {
    double as[kSquaresY][4], bs[2][kSquaresX][2][2];
    const std::uint32_t a_lane = Y() / kSquare * Ring::KTileA::kSquarePitch + A::LaneOffset();
    const std::uint32_t b_lane =
        C::kBytesA + X() / kSquare * Ring::KTileB::kSquarePitch + B::LaneOffset();
    const auto load_a = [&](int i, std::uint32_t k_tile, int l) {
#pragma unroll
      for (int e = 0; e < 4; ++e) as[i][e] = A::Load(k_tile + a_lane, i, e % 2, l / 4 + e / 2);
    };
    const auto load_b = [&](int buffer, std::uint32_t k_tile, int l) {
#pragma unroll
      for (int j = 0; j < kSquaresX; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          bs[buffer][j][e % 2][e / 2] = B::Load(k_tile + b_lane, j, e % 2, l / 4 + e / 2);
    };

    ring.WaitUntilFull();
#pragma unroll
    for (int i = 0; i < kSquaresY; ++i) load_a(i, ring.k_tile(), 0);
    load_b(0, ring.k_tile(), 0);
    for (; k_tiles > 0; --k_tiles) {
      ring.Refill();
#pragma unroll
      for (int l = 0; l < kDepth; l += kStep) {
        const int buffer = l / kStep % 2, next = (l + kStep) % kDepth;
        if (next == 0) ring.Next(k_tiles > 1);
        const std::uint32_t k_tile = ring.k_tile();  // behind the last, what is loaded is not used
        load_b(1 - buffer, k_tile, next);
#pragma unroll
        for (int i = 0; i < kSquaresY; ++i) {
#pragma unroll
          for (int j = 0; j < kSquaresX; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
              MultiplyDoubles(as[i], bs[buffer][j][h][0], bs[buffer][j][h][1], sums_[i][j][h]);
          load_a(i, k_tile, next);  // these are not needed any more in this step
        }
      }
    }
  }

  // Writes what of the tile at [row, column] lies inside c.
  __device__ void Store(std::int64_t row, std::int64_t column, std::int64_t m, std::int64_t n,
                        bool packable, double* c) const {
    const int g = static_cast<int>(threadIdx.x) % kWarpSize / 4;
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < kSquaresY; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t r = row + Y() + i * kSquare + A::Place(g, half);
        if (r >= m) continue;
#pragma unroll
        for (int j = 0; j < kSquaresX; ++j) {
          // The instruction's columns 2 t and 2 t + 1, of both halves, are four neighbours.
          const std::int64_t e = column + X() + j * kSquare + B::Place(2 * t, 0);
          double values[4];
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int v = 0; v < 2; ++v) values[B::Place(v, h)] = sums_[i][j][h][2 * half + v];
          StoreClipped(values, e, n, packable, c + r * n);
          StoreClipped(values + 2, e + 2, n, packable, c + r * n);
        }
      }
    }
  }

 private:
  static __device__ int Warp() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  static __device__ int Y() { return Warp() / C::kWarpsX * C::kWarpRows; }
  static __device__ int X() { return Warp() % C::kWarpsX * C::kWarpColumns; }

  double sums_[kSquaresY][kSquaresX][2][4] = {};
};

// --- Kernels ---

template <class C, bool kAAlongK, bool kBAlongK>
__global__ void __launch_bounds__(EngineRing<C, kAAlongK, kBAlongK>::kThreads, 1)
    MatmulEngineF64(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                    const __grid_constant__ EngineWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // compiled for sm_90a
  using Ring = EngineRing<C, kAAlongK, kBAlongK>;
  __shared__ alignas(8) std::uint64_t barriers[2 * Ring::kStages];
  Ring ring(SharedAddress(FirstKTile()), SharedAddress(barriers));
  if (threadIdx.x == 0) {
    ring.Init();
    PrefetchMap(&a);
    PrefetchMap(&b);
  }
  __syncthreads();  // the barriers are made

  const std::int64_t row_tiles = CeilDiv(work.m, C::kRows);
  const std::int64_t column_tiles = CeilDiv(work.n, C::kColumns);
  const auto place = [&](std::int64_t tile) {
    return GroupedTile<kGroup>(tile, row_tiles, column_tiles);
  };
  // The same in all lanes of a warp, which the compiler learns from the shuffle.
  const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpSize, 0);
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
      result.Store(at.row * C::kRows, at.column * C::kColumns, work.m, work.n, work.packable,
                   work.c);
    }
  }
#endif
}

template <class C, bool kAAlongK, bool kBAlongK>
__global__ void __launch_bounds__(C::kThreads, 1)
    MatmulTensorF64(Operand<double> a, Operand<double> b, Packable packable, std::int64_t k,
                    double* c) {
  using Ring = ThreadRing<C, kAAlongK, kBAlongK>;
  const TilePlace place =
      GroupedTile<kGroup>(blockIdx.x, CeilDiv(a.extent, C::kRows), CeilDiv(b.extent, C::kColumns));
  const std::int64_t row = place.row * C::kRows, column = place.column * C::kColumns;
  Ring ring(a, b, packable, k, row, column, FirstKTile());
  WarpTile<C, Ring> result;
  if (k > 0) result.Multiply(ring, CeilDiv(k, kDepth));
  result.Store(row, column, a.extent, b.extent, packable.c, c);
}

// --- Launch ---

template <class C>
std::int64_t Tiles(const MatmulProblem& p) {
  return CeilDiv(p.m, C::kRows) * CeilDiv(p.n, C::kColumns);
}

// Whether TMA can read the operands; it counts in 32 bits.
bool UsesEngine(const MatmulProblem& p, const CudaStream& stream) {
  return stream.device().info().compute_capability == 90 && p.k > 0 &&
         std::max({p.m, p.n, p.k}) < std::numeric_limits<int>::max() - Large::kRows &&
         IsBoxAligned(p.a, p.transpose_a ? p.k : p.m, p.lda * std::int64_t{sizeof(double)}) &&
         IsBoxAligned(p.b, p.transpose_b ? p.n : p.k, p.ldb * std::int64_t{sizeof(double)});
}

template <bool kAAlongK, bool kBAlongK>
void RunEngine(const MatmulProblem& p, CudaStream& stream) {
  using Ring = EngineRing<Large, kAAlongK, kBAlongK>;
  const auto map = [&](const void* data, std::int64_t extent, std::int64_t pitch, bool along_k) {
    return MakeTensorMap<double>(data, 1, along_k ? extent : p.k, along_k ? p.k : extent, pitch,
                                 kSquare, kRowBytes);
  };
  const EngineWork work{.m = static_cast<int>(p.m),
                        .n = static_cast<int>(p.n),
                        .k = static_cast<int>(p.k),
                        .packable = IsPackable<double>(p.c, p.n),
                        .c = static_cast<double*>(p.c)};
  const auto kernel = MatmulEngineF64<Large, kAAlongK, kBAlongK>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Ring::kSharedBytes));
  const std::int64_t blocks =
      std::min<std::int64_t>(Tiles<Large>(p), stream.device().info().multiprocessors);
  kernel<<<static_cast<unsigned>(blocks), Ring::kThreads, Ring::kSharedBytes, stream.handle()>>>(
      map(p.a, p.m, p.lda, kAAlongK), map(p.b, p.n, p.ldb, kBAlongK), work);
  CUDA_CHECK_LAUNCH(MatmulEngineF64);
}

template <class C, bool kAAlongK, bool kBAlongK>
void RunThreads(const MatmulProblem& p, CudaStream& stream) {
  constexpr int kShared = ThreadRing<C, kAAlongK, kBAlongK>::kSharedBytes;
  const auto kernel = MatmulTensorF64<C, kAAlongK, kBAlongK>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  kernel<<<static_cast<unsigned>(Tiles<C>(p)), C::kThreads, kShared, stream.handle()>>>(
      OperandA<double>(p), OperandB<double>(p), PackableOf<double>(p), p.k,
      static_cast<double*>(p.c));
  CUDA_CHECK_LAUNCH(MatmulTensorF64);
}

// Whether large tiles are worth it: a round of them on all SMs takes as long as three and a quarter
// of small ones, as measured on an H200.
bool UsesLarge(const MatmulProblem& p, const CudaStream& stream) {
  const int multiprocessors = stream.device().info().multiprocessors;
  return 13 * CeilDiv(Tiles<Large>(p), multiprocessors) <=
         4 * CeilDiv(Tiles<Small>(p), multiprocessors);
}

// The small tiles, since which are used depends on the device.
Cost CostOf(const MatmulProblem& p) {
  return MatmulCost(p, MatmulTileLoads(p, Small::kRows, Small::kColumns));
}

void Enqueue(const MatmulProblem& p, Stream& any_lane) {
  CudaStream& stream = Cuda(any_lane);
  DispatchLayouts(!p.transpose_a, p.transpose_b, [&](auto a_along_k, auto b_along_k) {
    if (!UsesLarge(p, stream)) {
      RunThreads<Small, a_along_k, b_along_k>(p, stream);
    } else if (UsesEngine(p, stream)) {
      RunEngine<a_along_k, b_along_k>(p, stream);
    } else {
      RunThreads<Large, a_along_k, b_along_k>(p, stream);
    }
  });
}

}  // namespace

extern constexpr Strategy<MatmulProblem> kMatmulTensorF64 = {
    .name = "tensor_f64",
    .summary = "f64 on the tensor cores, from Ampere on (mma.sync)",
    .source = "the f64 tensor cores of compute capability 8.0 and 9.0; NVIDIA PTX ISA, mma.m16n8k8",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF64),
    .min_compute_capability = 80,
    .deterministic = true,
    .roundoff = MatmulChainRoundoff,
    .cost = CostOf,
    .launch = Enqueue,
};

}  // namespace tessera
