// Code that the Matmul strategies on the GPU share: operands without transposes, 16-byte vectors, a
// thread's share of a tile, and copies of k-tiles in the background.
//
// The following holds for every strategy of Matmul, unless its file says otherwise, and is not
// repeated there. The strategy is correct for any m, n and k: elements beyond an edge of an operand
// are fetched as zeros, which add 0 * 0, and results beyond the edges of c are not stored. It is
// correct for any transpose, pitch and alignment: where 16-byte vectors are not aligned, elements
// are loaded, copied or stored one by one. Strategies without tensor cores compute each element of
// c as one chain of k fused multiply-adds, in the same order as `naive`, in f32 for 16-bit
// operands; integers wrap.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/problem/matmul.h"

namespace tessera {

// An operand as the kernels see it: element [i, l], with i along m or n and l along k, is at i *
// stride + l * k_stride. One stride is 1 and the other is the pitch. Whether the operand is
// transposed only determines which is which.
template <class T>
struct Operand {
  const T* data;
  std::int64_t extent;  // number of values of i
  std::int64_t stride;
  std::int64_t k_stride;
};

template <class T>
Operand<T> OperandA(const MatmulProblem& p) {
  return {static_cast<const T*>(p.a), p.m, p.transpose_a ? 1 : p.lda, p.transpose_a ? p.lda : 1};
}

template <class T>
Operand<T> OperandB(const MatmulProblem& p) {
  return {static_cast<const T*>(p.b), p.n, p.transpose_b ? p.ldb : 1, p.transpose_b ? 1 : p.ldb};
}

// --- Stacks ---

// The products that one launch computes, and the distances from each to the next in elements. In a
// launch whose grid has a row of blocks for each product, blockIdx.y is the product.
struct StackSteps {
  std::int64_t products = 1;
  std::int64_t a = 0, b = 0, c = 0;

  template <class T, class O>
  __device__ void MoveToProduct(Operand<T>& left, Operand<T>& right, O*& result) const {
    left.data += blockIdx.y * a;
    right.data += blockIdx.y * b;
    result += blockIdx.y * c;
  }
};

constexpr std::int64_t kMostGridRows = 65535;

// Calls f(first, steps) for parts of a stack along its longest axis, each of at most `most`
// products. `first` is the first product of the part.
template <class F>
void ForEachStackPart(const MatmulProblem& p, std::int64_t most, F f) {
  int longest = 0;
  for (int i = 1; i < p.stack_rank; ++i)
    if (p.stack_axes[i].extent > p.stack_axes[longest].extent) longest = i;
  const StackAxis axis = p.stack_rank == 0 ? StackAxis{} : p.stack_axes[longest];
  std::int64_t inner = 1;
  for (int i = longest + 1; i < p.stack_rank; ++i) inner *= p.stack_axes[i].extent;
  for (std::int64_t other = 0; other < p.stack / axis.extent; ++other) {
    for (std::int64_t at = 0; at < axis.extent; at += most) {
      const std::int64_t first = (other / inner * axis.extent + at) * inner + other % inner;
      f(ProductOf(p, first), StackSteps{std::min(most, axis.extent - at), axis.stride_a,
                                        axis.stride_b, inner * p.m * p.n});
    }
  }
}

// --- Vectors ---

// An aligned 16-byte vector, the largest unit that one instruction loads or stores.
template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T v[kSize];
};

template <class T>
__device__ Pack<T> LoadPack(const T* from) {
  return *reinterpret_cast<const Pack<T>*>(from);
}
template <class T>
__device__ void StorePack(T* to, const Pack<T>& pack) {
  *reinterpret_cast<Pack<T>*>(to) = pack;
}

// Stores a vector's elements starting at row[column], except for those at or after row[columns].
template <class T>
__device__ void StoreClipped(const T* values, std::int64_t column, std::int64_t columns,
                             bool packable, T* row) {
  Pack<T> pack;
#pragma unroll
  for (int w = 0; w < Pack<T>::kSize; ++w) pack.v[w] = values[w];
  if (packable && column + Pack<T>::kSize <= columns) {
    StorePack(row + column, pack);
    return;
  }
#pragma unroll
  for (int w = 0; w < Pack<T>::kSize; ++w)
    if (column + w < columns) row[column + w] = pack.v[w];
}

// Returns whether every Pack<T>::kSize-th element of every row is aligned to a vector.
template <class T>
bool IsPackable(const void* data, std::int64_t pitch) {
  return reinterpret_cast<std::uintptr_t>(data) % sizeof(Pack<T>) == 0 &&
         pitch % Pack<T>::kSize == 0;
}

// Whether each operand of a problem can be loaded, and its result stored, in 16-byte vectors.
struct Packable {
  bool a, b, c;
};

template <class T>
Packable PackableOf(const MatmulProblem& p) {
  return {IsPackable<T>(p.a, p.lda), IsPackable<T>(p.b, p.ldb), IsPackable<T>(p.c, p.n)};
}

// --- A thread's share of a tile ---

// A thread's kEach x kEach elements of a kTile x kTile tile of c, which (kTile / kEach)^2 threads
// compute together. They are not one square but vectors that are a span apart. So adjacent threads
// read adjacent vectors of a k-tile, which are in different banks of shared memory:
//
//              span            span
//        | t0 | t1 | ..  | t0 | t1 | ..  |   columns of the tile, one vector each; rows likewise
//
template <class T, int kTile, int kEach>
class ThreadTile {
  static constexpr int kWidth = Pack<T>::kSize;
  static constexpr int kSpan = kTile * kWidth / kEach;
  static constexpr int kSide = kTile / kEach;

 public:
  static constexpr int kThreads = kSide * kSide;

  __device__ ThreadTile()
      : y_(static_cast<int>(threadIdx.x) / kSide * kWidth),
        x_(static_cast<int>(threadIdx.x) % kSide * kWidth) {}

  // Adds the products of one step along k. `a` and `b` are one row of each k-tile, aligned to
  // vectors.
  __device__ void Multiply(const T* a, const T* b) {
    T a_each[kEach], b_each[kEach];
    Read(a + y_, a_each);
    Read(b + x_, b_each);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) sums_[i][j] = fma(a_each[i], b_each[j], sums_[i][j]);
  }

  // Writes the part of the tile at [row, column] that is inside c[rows, columns].
  __device__ void Store(std::int64_t row, std::int64_t column, std::int64_t rows,
                        std::int64_t columns, bool packable, T* c) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const std::int64_t r = row + y_ + i / kWidth * kSpan + i % kWidth;
      if (r >= rows) continue;
#pragma unroll
      for (int j = 0; j < kEach; j += kWidth)
        StoreClipped(sums_[i] + j, column + x_ + j / kWidth * kSpan, columns, packable,
                     c + r * columns);
    }
  }

 private:
  __device__ static void Read(const T* from, T (&each)[kEach]) {
#pragma unroll
    for (int g = 0; g < kEach / kWidth; ++g) {
      const Pack<T> pack = LoadPack(from + g * kSpan);
#pragma unroll
      for (int w = 0; w < kWidth; ++w) each[g * kWidth + w] = pack.v[w];
    }
  }

  int y_, x_;
  T sums_[kEach][kEach] = {};
};

// --- Copies in the background ---

// Starts copying kBytes bytes (4, 8 or 16) from global to shared memory, bypassing registers. Only
// the first `valid` bytes are read, and the rest is filled with zeros, so `from` may be outside the
// array if `valid` is 0. Both addresses must be aligned to kBytes.
template <int kBytes>
__device__ void CopyAsync(void* to, const void* from, int valid) {
#if __CUDA_ARCH__ >= 800
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    // .cg bypasses the L1 cache, where nothing would read the data.
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
                 "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from),
                 "n"(kBytes), "r"(valid)
                 : "memory");
  }
#else
  // For older GPUs this only has to compile, because strategies that use it require compute
  // capability 8.0.
  for (int i = 0; i < kBytes; ++i)
    static_cast<char*>(to)[i] = i < valid ? static_cast<const char*>(from)[i] : 0;
#endif
}

// Closes the group of copies that the thread has started since the last call. A group may be empty.
__device__ inline void CommitCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the last kPending of the thread's groups are in flight. To wait for copies by
// other threads, a barrier is needed as well.
template <int kPending>
__device__ void WaitForCopies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Copies a thread's share of one operand's k-tiles in the background: k-tile[l][i] = operand[first
// + i, k_first + l] for i < kTile and l < kDepth, or 0 beyond the edges. The rows of a k-tile are
// kPitch elements apart. All kThreads threads of the block copy together, and consecutive threads
// copy consecutive elements along the dimension in which memory is contiguous. Each thread then
// advances along the other dimension.
//
//   memory contiguous along i               along k
//
//        i ->                                    i ->
//     l  0 0 1 1 2 2 3 3   vectors of         l  0   2   4   6    one element at a time, since
//     |  4 4 5 5 6 6 7 7   16 bytes, if       |  1   3   5   7    adjacent ones in memory end up in
//     v  0 0 1 1 2 2 3 3   aligned            v                   different rows of the k-tile
//        4 4 5 5 6 6 7 7
template <class T, int kTile, int kDepth, int kPitch, int kThreads>
class KTileCopier {
  using Vector = Pack<T>;
  static constexpr int kPacks = kTile / Vector::kSize;  // vectors in a row of the k-tile
  static_assert(kThreads % kDepth == 0 && kThreads % kPacks == 0 && kPitch % Vector::kSize == 0);
  static_assert(kTile * kDepth % (kThreads * Vector::kSize) == 0);
  static_assert(kThreads % kTile == 0);

 public:
  __device__ KTileCopier(const Operand<T>& operand, bool packable, std::int64_t first)
      : packs_(packable && operand.stride == 1) {
    const int thread = static_cast<int>(threadIdx.x);
    int i = 0;
    if (packs_) {
      i = thread % kPacks * Vector::kSize;
      l_ = thread / kPacks;
      i_step_ = 0;
      l_step_ = kThreads / kPacks;
    } else if (operand.k_stride == 1) {
      i = thread / kDepth;
      l_ = thread % kDepth;
      i_step_ = kThreads / kDepth;
      l_step_ = 0;
    } else {
      i = thread % kTile;
      l_ = thread / kTile;
      i_step_ = 0;
      l_step_ = kThreads / kTile;
    }
    cell_ = l_ * kPitch + i;
    rows_ = static_cast<int>(min(operand.extent - first, std::int64_t{kTile})) - i;
    next_ = operand.data + (first + i) * operand.stride + l_ * operand.k_stride;
    step_ = i_step_ * operand.stride + l_step_ * operand.k_stride;
    k_tile_step_ = kDepth * operand.k_stride;
  }

  // Starts copying the next k-tile. Its first `depth` rows are within k.
  __device__ void Copy(int depth, T* k_tile) {
    T* to = k_tile + cell_;
    const int to_step = l_step_ * kPitch + i_step_;
    const T* from = next_;
    next_ += k_tile_step_;
    if (packs_) {
      const int valid = max(0, min(rows_, Vector::kSize)) * static_cast<int>(sizeof(T));
#pragma unroll
      for (int c = 0; c < kPacks * kDepth / kThreads; ++c, from += step_, to += to_step)
        CopyAsync<16>(to, from, l_ + c * l_step_ < depth ? valid : 0);
    } else {
#pragma unroll
      for (int c = 0; c < kTile * kDepth / kThreads; ++c, from += step_, to += to_step) {
        const bool inside = c * i_step_ < rows_ && l_ + c * l_step_ < depth;
        CopyAsync<sizeof(T)>(to, from, inside ? static_cast<int>(sizeof(T)) : 0);
      }
    }
  }

 private:
  bool packs_;
  int cell_;             // the thread's first cell of a k-tile
  int l_;                // the row of that cell
  int rows_;             // number of values of i from that cell to the operand's end
  int i_step_, l_step_;  // the step to the next cell
  const T* next_;        // the source of the first cell
  std::int64_t step_, k_tile_step_;
};

// --- Tiles and strategies ---

// The number of tiles of C::kRows x C::kColumns elements in c.
template <class C>
std::int64_t TilesOf(const MatmulProblem& p) {
  return CeilDiv(p.m, C::kRows) * CeilDiv(p.n, C::kColumns);
}

// Assumes small tiles, because the actual choice depends on the device.
template <class Small>
Cost TilesCost(const MatmulProblem& p) {
  return MatmulCost(p, MatmulTileLoads(p, Small::kRows, Small::kColumns));
}

// Sets the fields that the strategies of Matmul on the GPU share. The roundoff is that of a chain
// of fused multiply-adds, unless it is already set.
constexpr Strategy<MatmulProblem> CudaMatmul(Strategy<MatmulProblem> strategy) {
  strategy.backend = Backend::kCuda;
  strategy.deterministic = true;
  if (strategy.roundoff == nullptr) strategy.roundoff = MatmulChainRoundoff;
  return strategy;
}

// A block computes kTile x kTile elements of c in k-tiles of kDepth steps, and a thread kEach x
// kEach of them (the L, S and V of `shared_tiled`).
template <int kTile_, int kDepth_, int kEach_>
struct SquareTile {
  static constexpr int kTile = kTile_, kRows = kTile_, kColumns = kTile_;
  static constexpr int kDepth = kDepth_, kEach = kEach_;
  static constexpr int kSide = kTile / kEach;  // threads along one side of a tile
  // The pitch is four more than needed, so that rows stay aligned to vectors and threads that fetch
  // along k store to different banks.
  static constexpr int kPitch = kTile + 4;
};

// Calls run(C{}, blocks) with C = Large or Small, where `blocks` is the number of blocks of one
// product. Large tiles load less in total, but pay off only if every SM has two of them to overlap.
template <class Large, class Small, class Run>
void RunTiles(const MatmulProblem& p, CudaStream& stream, Run run) {
  if (TilesOf<Large>(p) * p.stack >= 2 * stream.device().info().multiprocessors) {
    run(Large{}, static_cast<unsigned>(TilesOf<Large>(p)));
  } else {
    run(Small{}, static_cast<unsigned>(TilesOf<Small>(p)));
  }
}

}  // namespace tessera
