// The kernel of `skinny` for two operands with few vectors and a long k: a few dot products in one
// launch.
//
// At most four of the 64 or 128 rows of a tile would exist. So here each block has a part of k
// instead, and its threads are interleaved along that part. Each thread loads one step of all
// vectors, multiplies all pairs of them, and keeps the sums until the end of the part.
//
//        k ->
//      +-----------+-----------+--         thread t of block 0: steps t, 256 + t, ..
//    i |  block 0  |  block 1  | ..  wide: up to 4 vectors
//      +-----------+-----------+--
//    j |           |           | ..  thin: up to 4 vectors
//      +-----------+-----------+--
//
// A step is a 16-byte vector if both operands are contiguous along k and aligned, and one element
// otherwise.
#pragma once

#include <cstdint>

#include "kernels/cuda/matmul/skinny.cuh"

namespace tessera::skinny {

inline constexpr int kMostNarrow = 4;
// Products with a shorter k use tiles, because this kernel has not been tried for them.
inline constexpr std::int64_t kLeastNarrowK = std::int64_t{1} << 15;

// kMost: the larger of the two operands' numbers of vectors, rounded up to 2 or 4.
template <class T, int kMost, bool kPacks>
struct Narrow {
  static constexpr int kWidth = kPacks ? Pack<T>::kSize : 1;  // elements per step
  // The number of steps that each thread has in flight. Registers limit this number.
  static constexpr int kAhead = (kMost > 2 ? 2 : 4) / (kWidth > 4 ? 2 : 1);

  // Loads one step of one vector, with zeros beyond the operand and beyond k_end.
  static __device__ void Load(const Operand<T>& operand, int vector, std::int64_t l,
                              std::int64_t k_end, T (&step)[kWidth]) {
    const T* const from = operand.data + vector * operand.stride + l * operand.k_stride;
    const bool is_there = vector < operand.extent;
    if constexpr (kPacks) {
      if (is_there && l + kWidth <= k_end) {
        const Pack<T> pack = LoadPack(from);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) step[e] = pack.v[e];
        return;
      }
    }
#pragma unroll
    for (int e = 0; e < kWidth; ++e) step[e] = is_there && l + e < k_end ? from[e] : T{};
  }
};

// Computes the sums of each part of k, with one block per part. A part is `part` elements long.
// `out` is the destination of part 0.
template <class T, int kMost, bool kPacks, class Out>
__global__ void __launch_bounds__(kThreads, 2)
    MatmulNarrow(Operand<T> wide, Operand<T> thin, std::int64_t k, std::int64_t part, Out out) {
  using N = Narrow<T, kMost, kPacks>;
  using Acc = ValueOf<T>;
  constexpr int kWidth = N::kWidth, kAhead = N::kAhead;
  const std::int64_t k_first = blockIdx.x * part, k_end = min(k, k_first + part);
  Acc sums[kMost][kMost] = {};
  for (std::int64_t l = k_first + threadIdx.x * kWidth; l < k_end;
       l += std::int64_t{kThreads} * kWidth * kAhead) {
    T w[kAhead][kMost][kWidth], t[kAhead][kMost][kWidth];
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      const std::int64_t at = l + s * kThreads * kWidth;
#pragma unroll
      for (int v = 0; v < kMost; ++v) {
        N::Load(wide, v, at, k_end, w[s][v]);
        N::Load(thin, v, at, k_end, t[s][v]);
      }
    }
#pragma unroll
    for (int s = 0; s < kAhead; ++s)
#pragma unroll
      for (int e = 0; e < kWidth; ++e)
#pragma unroll
        for (int i = 0; i < kMost; ++i)
#pragma unroll
          for (int j = 0; j < kMost; ++j)
            sums[i][j] =
                fma(static_cast<Acc>(w[s][i][e]), static_cast<Acc>(t[s][j][e]), sums[i][j]);
  }

  __shared__ Acc warp_sums[kWarps][kMost * kMost];
  const int warp = WarpIndex(), lane = LaneIndex();
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      Acc sum = sums[i][j];
#pragma unroll
      for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
        sum += __shfl_down_sync(kFullMask, sum, offset);
      if (lane == 0) warp_sums[warp][i * kMost + j] = sum;
    }
  }
  __syncthreads();  // all warps' sums are in shared memory
  const int cell = static_cast<int>(threadIdx.x);
  if (cell >= kMost * kMost) return;
  Acc sum = warp_sums[0][cell];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += warp_sums[w][cell];
  out.c += blockIdx.x * out.wide * out.thin;
  out.Store(cell / kMost, cell % kMost, sum);
}

// Returns the number of elements along k per block. There are at most two blocks per SM, each with
// one part, and every part but the last consists of whole steps of all threads.
template <class N>
std::int64_t NarrowPart(std::int64_t k, std::int64_t multiprocessors) {
  constexpr std::int64_t kRound = std::int64_t{kThreads} * N::kWidth * N::kAhead;
  return CeilDiv(CeilDiv(k, kRound), 2 * multiprocessors) * kRound;
}

}  // namespace tessera::skinny
