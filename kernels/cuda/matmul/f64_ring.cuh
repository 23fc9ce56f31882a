// The k-tiles of `tensor_f64` in shared memory: a ring of stages that is filled either by TMA or by
// all threads of the block. The code that multiplies (f64_tile.cuh) works with either ring.
#pragma once

#include <cstdint>

#include "kernels/cuda/matmul/hopper/ptx/ptx.cuh"
#include "kernels/cuda/matmul/k_tiles.cuh"

namespace tessera::f64 {

inline constexpr int kDepth = 16;  // steps along k per k-tile, which make rows of 128 bytes
inline constexpr int kStep = 8;    // steps along k per instruction
inline constexpr int kGroup = 16;  // tile rows per group of blocks
inline constexpr int kSquare =
    16;  // rows of a square: one instruction's 16 rows of a, or two instructions' 8 columns of b
inline constexpr int kRowBytes = kDepth * int{sizeof(double)};
inline constexpr int kSquareBytes = kSquare * kRowBytes;
inline constexpr int kAlignment = 1024;  // required by the swizzle pattern
static_assert(kDepth / kStep % 2 == 0, "the first step of a k-tile has to be in buffer 0");

// Adds the sizes of k-tiles in bytes.
template <int... kShape>
struct Config : WarpTiling<kShape...> {
  static constexpr int kBytesA = Config::kRows * kRowBytes;
  static constexpr int kBytesB = Config::kColumns * kRowBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int SharedBytes(int stages) { return kAlignment + stages * kStageBytes; }
};
using Large = Config<128, 128, 64, 32, 1>;
using Small = Config<64, 64, 32, 32, 1>;  // for matrices with few tiles

// Returns the address of the first k-tile in the block's shared memory.
__device__ char* FirstKTile() {
  char* const shared = DynamicShared<char>();
  return shared + (kAlignment - SharedAddress(shared) % kAlignment) % kAlignment;
}

// --- k-tiles by TMA ---

// An operand's k-tile in shared memory, stored square by square for either layout of the operand.
template <bool kAlongK_>
struct PileKTile {
  static constexpr bool kAlongK = kAlongK_;
  static constexpr int kStepBytes = kRowBytes;       // bytes per step along k, if !kAlongK
  static constexpr int kSquarePitch = kSquareBytes;  // bytes between squares
};

// One thread's position in the ring of k-tiles in shared memory. All tiles of the block use the
// same ring, one after another.
template <class C, bool kAAlongK, bool kBAlongK>
class TmaRing {
 public:
  static constexpr int kStages = 6;
  static constexpr int kFetchers = 4;  // warps
  static constexpr int kThreads = C::kThreads + kFetchers * kWarpSize;
  static constexpr int kSharedBytes = C::SharedBytes(kStages);
  using KTileA = PileKTile<kAAlongK>;
  using KTileB = PileKTile<kBAlongK>;

  // `barriers` is the address of kStages "full" barriers, followed by kStages "empty" barriers.
  __device__ TmaRing(std::uint32_t k_tiles, std::uint32_t barriers)
      : k_tiles_(k_tiles), barriers_(barriers) {}

  __device__ void Init() const {
    for (int s = 0; s < kStages; ++s) {
      BarrierInit(barriers_ + s * 8, kFetchers);
      BarrierInit(barriers_ + (kStages + s) * 8, C::kWarps);
    }
    BarrierInitFence();
  }

  // Called by one thread of each fetching warp. Fetches the warp's squares of all k-tiles of the
  // tile at [row, column].
  __device__ void Fetch(const CUtensorMap& a, const CUtensorMap& b, int row, int column, int k,
                        int fetcher) {
    constexpr int kA = C::kRows / kSquare / kFetchers, kB = C::kColumns / kSquare / kFetchers;
    for (int l = 0; l < k; l += kDepth) {
      BarrierWait(empty(), parity_ ^ 1);  // a new barrier is in the phase of parity 0
      BarrierExpect(full(), (kA + kB) * kSquareBytes);
#pragma unroll
      for (int i = 0; i < kA; ++i) FetchSquare<kAAlongK>(a, row, fetcher * kA + i, l, k_tile());
#pragma unroll
      for (int i = 0; i < kB; ++i)
        FetchSquare<kBAlongK>(b, column, fetcher * kB + i, l, k_tile() + C::kBytesA);
      Step();
    }
  }

  // The following functions are called by the warps that multiply.
  __device__ std::uint32_t k_tile() const { return k_tiles_ + stage_ * C::kStageBytes; }
  __device__ void Refill() const {}
  __device__ void WaitUntilFull() const { BarrierWait(full(), parity_); }
  // Moves to the next k-tile and, if `more`, waits for it. The warp has already issued its last
  // loads from the current k-tile. TMA is not ordered after these loads, so a fence ensures that
  // they complete before TMA overwrites the k-tile.
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

  // Fetches the i-th square: 16 indices of the operand starting at first + 16 i, and 16 steps along
  // k starting at l.
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

  // Copies another k-tile into the stage of the previous one, which all threads had finished
  // reading at the last barrier.
  __device__ void Refill() { Copy(stage_ == 0 ? kStages - 1 : stage_ - 1); }

  __device__ std::uint32_t k_tile() const {
    return SharedAddress(k_tiles_ + stage_ * C::kStageBytes);
  }
  __device__ void WaitUntilFull() const {
    WaitForCopies<kStages - 2>();
    __syncthreads();  // the k-tile is complete, and all threads have read the previous one
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
  std::int64_t left_;  // steps along k that have not been copied yet
  KTileLoader<double, KTileA, C::kThreads> a_stream_;
  KTileLoader<double, KTileB, C::kThreads> b_stream_;
  int stage_ = 0;
};

}  // namespace tessera::f64
