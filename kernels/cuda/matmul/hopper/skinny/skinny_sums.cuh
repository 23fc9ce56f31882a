// The sums that a thread of `skinny_tma` computes from k-tiles, with fused multiply-adds or with
// tensor cores.
#pragma once

#include <cstdint>

#include "kernels/cuda/matmul/hopper/skinny/skinny_tile.cuh"
#include "kernels/cuda/matmul/mma.cuh"

namespace tessera::skinny_tma {

inline __device__ float4 LoadShared4(std::uint32_t from) {
  float4 pack;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(pack.x), "=f"(pack.y), "=f"(pack.z), "=f"(pack.w)
               : "r"(from));
  return pack;
}

// A thread's sums without tensor cores, [kSteps][kVectors]. Lane l has rows l, l + 32, ... of the
// warp's 128 if the large operand is contiguous along k, and rows 4 l to 4 l + 3 otherwise.
template <class C>
struct VectorSums {
  static constexpr int kPacks = C::kDepth / kSteps / C::kWarpsK;  // along k, per k-tile and warp
  static constexpr int kRowPacks = kBoxRow / 16;
  float v[C::kSums];

  __device__ void Add(std::uint32_t wide, std::uint32_t thin, int warp, int lane) {
    const int warp_row = warp % C::kWarpsWide * C::kWarpRows;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int pack = warp / C::kWarpsWide * kPacks + p;
      const int box = pack / kRowPacks, place = pack % kRowPacks;
      float w[kSteps][kSteps];  // [step][row]
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if constexpr (C::kAlongK) {
          const float4 x =
              LoadShared4(wide + box * C::kWideBoxBytes +
                          (warp_row + i * kWarpSize + lane) * kBoxRow + ((place ^ lane % 8) << 4));
          w[0][i] = x.x, w[1][i] = x.y, w[2][i] = x.z, w[3][i] = x.w;
        } else {
          const float4 x = LoadShared4(wide + (pack * kSteps + i) * C::kWideBoxRowBytes +
                                       (warp_row + lane * kSteps) * 4);
          w[i][0] = x.x, w[i][1] = x.y, w[i][2] = x.z, w[i][3] = x.w;
        }
      }
      const auto add = [&](int l, int u, float x) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
          v[i * C::kVectors + u] = fma(w[l][i], x, v[i * C::kVectors + u]);
      };
      if constexpr (C::kThinAlongK) {
#pragma unroll
        for (int u = 0; u < C::kVectors; ++u) {
          const float4 x = LoadShared4(thin + box * C::kThinBoxBytes + u * kBoxRow + place * 16);
          add(0, u, x.x), add(1, u, x.y), add(2, u, x.z), add(3, u, x.w);
        }
      } else {
#pragma unroll
        for (int u = 0; u < C::kVectors; u += 4) {
#pragma unroll
          for (int l = 0; l < kSteps; ++l) {
            const float4 x = LoadShared4(thin + (pack * kSteps + l) * C::kThinBoxRowBytes + u * 4);
            add(l, u, x.x), add(l, u + 1, x.y), add(l, u + 2, x.z), add(l, u + 3, x.w);
          }
        }
      }
    }
  }

  // Writes the sums of vectors [kFirst, kFirst + kAtOnce) to cells[part of k][vector][row of the
  // tile].
  template <int kFirst>
  __device__ void Put(float* cells, int warp, int lane) const {
    float* const part = cells + warp / C::kWarpsWide * (C::kAtOnce * C::kWide) +
                        warp % C::kWarpsWide * C::kWarpRows;
#pragma unroll
    for (int j = 0; j < C::kAtOnce; ++j) {
      const float* const sums = v + kFirst + j;
      if constexpr (C::kAlongK) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
          part[j * C::kWide + i * kWarpSize + lane] = sums[i * C::kVectors];
      } else {
        reinterpret_cast<float4*>(part + j * C::kWide)[lane] = {
            sums[0], sums[C::kVectors], sums[2 * C::kVectors], sums[3 * C::kVectors]};
      }
    }
  }
};

// A thread's sums with tensor cores, in the layout of mma.cuh: [16 rows][8 vectors][4].
template <class C>
struct TensorSums {
  static constexpr int kTiles = C::kWarpRows / 16;
  float v[C::kSums];

  __device__ void Add(std::uint32_t wide, std::uint32_t thin, int warp, int lane) {
    using T = typename C::T;
    const int warp_row = warp * C::kWarpRows;
#pragma unroll
    for (int l = 0; l < C::kDepth / 16; ++l) {
      // Two 16-byte vectors hold 16 steps along k, and a row of a box holds 64 steps.
      const int box = l / 4, place = l % 4 * 2;
      unsigned a[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int row = warp_row + i * 16;
        if constexpr (C::kAlongK) {
          LoadMatrices<false>(wide + box * C::kWideBoxBytes + (row + lane % 16) * kBoxRow +
                                  (((place + lane / 16) ^ lane % 8) << 4),
                              a[i]);
        } else {
          const int k = l * 16 + lane / 16 * 8 + lane % 8;
          LoadMatrices<true>(wide + row / 64 * C::kWideBoxBytes + k * kBoxRow +
                                 (((row % 64 / 8 + lane / 8 % 2) ^ lane % 8) << 4),
                             a[i]);
        }
      }
#pragma unroll
      for (int u = 0; u < C::kVectors; u += 16) {
        unsigned b[4];
        if constexpr (C::kThinAlongK) {
          LoadMatrices<false>(thin + box * C::kThinBoxBytes +
                                  (u + lane / 16 * 8 + lane % 8) * kBoxRow +
                                  (((place + lane / 8 % 2) ^ lane % 8) << 4),
                              b);
        } else {
          // Every 128 bytes hold several rows, whose vectors TMA swizzles in the same way.
          constexpr int kRow = C::kThinBoxRowBytes;
          const int k = l * 16 + lane / 8 % 2 * 8 + lane % 8;
          LoadMatrices<true>(
              thin + k * kRow + (((u / 8 + lane / 16) ^ k * kRow / 128 % (kRow / 16)) << 4), b);
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            MultiplyHalves<T>(
                a[i], b[2 * h], b[2 * h + 1],
                reinterpret_cast<float(&)[4]>(v[(i * (C::kVectors / 8) + u / 8 + h) * 4]));
      }
    }
  }

  // Calls f(row of the tile, vector, sum) for each sum.
  template <class F>
  __device__ void ForEach(int warp, int lane, F&& f) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int j = 0; j < C::kVectors / 8; ++j)
#pragma unroll
        for (int s = 0; s < 4; ++s)
          f(warp * C::kWarpRows + i * 16 + lane / 4 + s / 2 * 8, j * 8 + lane % 4 * 2 + s % 2,
            v[(i * (C::kVectors / 8) + j) * 4 + s]);
  }
};

}  // namespace tessera::skinny_tma
