// A warp's part of a `tensor_f64` tile. The warp loads fragments from a ring's k-tiles, multiplies
// them and stores the results.
#pragma once

#include <cstdint>

#include "kernels/cuda/matmul/f64_ring.cuh"
#include "kernels/cuda/matmul/mma.cuh"

namespace tessera::f64 {

// Locates the elements of an operand that lane 4 g + t holds: two of every 16 indices, one per
// half, at step t of every 4 steps along k.
template <class S>
struct Fragments {
  // Returns the element's index among the 16.
  static __device__ constexpr int Place(int g, int half) {
    return S::kAlongK ? 2 * g + half : g / 2 % 2 * 8 + g / 4 * 4 + half * 2 + g % 2;
  }

  // Returns the distance from the warp's first square in a k-tile to the lane's first element,
  // which is in half 0 and the first four steps.
  static __device__ std::uint32_t LaneOffset() {
    const int lane = LaneIndex();
    const int i = Place(lane / 4, 0), t = lane % 4;
    return S::kAlongK ? i * kRowBytes + (t / 2 ^ i % 8) * 16 + t % 2 * 8
                      : t * S::kStepBytes + (i / 2 ^ t) * 16 + i % 2 * 8;
  }

  // Loads the lane's element of the given square and half, for steps 4 f to 4 f + 3. `at` is the
  // address of the k-tile plus the lane's offset. The swizzle places each vector at the exclusive
  // or of its index and its row, so f and half also enter the address by an exclusive or.
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

template <class C, class KTileRing>
class WarpTile {
  using A = Fragments<typename KTileRing::KTileA>;
  using B = Fragments<typename KTileRing::KTileB>;
  static constexpr int kSquaresY = C::kWarpRows / kSquare, kSquaresX = C::kWarpColumns / kSquare;

 public:
  // Adds the products of `k_tiles` k-tiles to the sums, starting with the ring's current k-tile.
  // REQUIRES: k_tiles > 0.
  __device__ void Multiply(KTileRing& ring, std::int64_t k_tiles) {
    double as[kSquaresY][4], bs[2][kSquaresX][2][2];
    const std::uint32_t a_lane = Y() / kSquare * KTileRing::KTileA::kSquarePitch + A::LaneOffset();
    const std::uint32_t b_lane =
        C::kBytesA + X() / kSquare * KTileRing::KTileB::kSquarePitch + B::LaneOffset();
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
        const std::uint32_t k_tile = ring.k_tile();  // values loaded after the last one are unused
        load_b(1 - buffer, k_tile, next);
#pragma unroll
        for (int i = 0; i < kSquaresY; ++i) {
#pragma unroll
          for (int j = 0; j < kSquaresX; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
              MultiplyDoubles(as[i], bs[buffer][j][h][0], bs[buffer][j][h][1], sums_[i][j][h]);
          load_a(i, k_tile, next);  // this step has used the old values
        }
      }
    }
  }

  // Writes the part of the tile at [row, column] that is inside c. Rows of c are `pitch` apart.
  __device__ void Store(std::int64_t row, std::int64_t column, std::int64_t m, std::int64_t n,
                        std::int64_t pitch, bool packable, double* c) const {
    const int g = LaneIndex() / 4, t = LaneIndex() % 4;
#pragma unroll
    for (int i = 0; i < kSquaresY; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t r = row + Y() + i * kSquare + A::Place(g, half);
        if (r >= m) continue;
#pragma unroll
        for (int j = 0; j < kSquaresX; ++j) {
          // Columns 2 t and 2 t + 1 of both halves are four adjacent columns of c.
          const std::int64_t e = column + X() + j * kSquare + B::Place(2 * t, 0);
          double values[4];
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int v = 0; v < 2; ++v) values[B::Place(v, h)] = sums_[i][j][h][2 * half + v];
          StoreClipped(values, e, n, packable, c + r * pitch);
          StoreClipped(values + 2, e + 2, n, packable, c + r * pitch);
        }
      }
    }
  }

 private:
  static __device__ int Y() { return WarpIndex() / C::kWarpsX * C::kWarpRows; }
  static __device__ int X() { return WarpIndex() % C::kWarpsX * C::kWarpColumns; }

  double sums_[kSquaresY][kSquaresX][2][4] = {};
};

}  // namespace tessera::f64
