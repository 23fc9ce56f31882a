// Functions with which a warp of `skinny` adds the products of one k-tile to its sums. A thread's
// share of the tile depends on the units that multiply; the kernel takes this into account when it
// stores the sums.
#pragma once

#include "kernels/cuda/matmul/mma.cuh"
#include "kernels/cuda/matmul/skinny.cuh"

namespace tessera::skinny {

// Adds products of 16-bit elements. Warps 0 to 3 each have 16 rows of the tile and the first half
// of the k-tile's steps, and warps 4 to 7 have the same rows and the second half.
template <class C, bool kAlongK>
__device__ void AddHalves(const typename C::T* wide, const typename C::T* thin,
                          float (&sums)[C::kSums]) {
  using T = typename C::T;
  using Wide = typename C::template WideKTile<kAlongK>;
  const int warp = WarpIndex(), lane = LaneIndex();
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
      // b holds the columns of two instructions, or the columns of one instruction twice.
      unsigned b[4];
      const int column = v + (C::kVectors > 8 ? lane / 16 * 8 : 0) + lane % 8;
      LoadMatrices<false>(thin + C::ThinKTile::At(column, 2 * l + lane / 8 % 2), b);
      MultiplyHalves<T>(a, b[0], b[1], reinterpret_cast<float(&)[4]>(sums[v / 2]));
      if constexpr (C::kVectors > 8)
        MultiplyHalves<T>(a, b[2], b[3], reinterpret_cast<float(&)[4]>(sums[v / 2 + 4]));
    }
  }
}

// Adds products of f64 on the tensor cores. Each warp has 16 rows of the tile.
template <class C, bool kAlongK>
__device__ void AddSquares(const double* wide, const double* thin, double (&sums)[C::kSums]) {
  const int warp = WarpIndex(), lane = LaneIndex();
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

// Adds products without tensor cores. Every warp has the whole tile and one vector along the
// k-tile's depth.
template <class C, bool kAlongK>
__device__ void AddVectors(const typename C::T* wide, const typename C::T* thin,
                           typename C::T (&sums)[C::kSums]) {
  using T = typename C::T;
  using Wide = typename C::template WideKTile<kAlongK>;
  const int warp = WarpIndex(), lane = LaneIndex();
  constexpr int kEach = C::kTile / kWarpSize;  // elements of the wide operand per lane
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

}  // namespace tessera::skinny
