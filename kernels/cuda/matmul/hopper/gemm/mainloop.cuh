// The main loops of the tensor kernel, in which consumers multiply the k-tiles of a tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/matmul/hopper/gemm/pipeline.cuh"
#include "kernels/cuda/matmul/hopper/ptx/wgmma.cuh"

namespace tessera {

// A consumer's operands in a k-tile: their descriptors for wgmma, and the distances between steps
// along k and between parts.
template <class C, bool kMnA, bool kMnB>
struct TensorKTile {
  static constexpr int kSteps = C::kRowBytes / C::kStepBytes;
  static constexpr int kStepA = kMnA ? C::kMnBytes / kSteps : C::kStepBytes;
  static constexpr int kStepB = kMnB ? C::kMnBytes / kSteps : C::kStepBytes;
  // The size in bytes of a consumer's 64 rows of a.
  static constexpr int kGroupA = kMnA ? C::kMnBytes : C::kGroupRows * C::kRowBytes;
  static constexpr std::uint64_t Descriptor(bool mn_major) {
    return mn_major ? MatrixDescriptor(128, C::kMnBytes, 8 * 128)
                    : MatrixDescriptor(C::kRowBytes, 0, 8 * C::kRowBytes);
  }

  std::uint64_t a, b;

  __device__ TensorKTile(const TensorPipeline<C>& pipeline, int consumer)
      : a(MatrixAt(Descriptor(kMnA), pipeline.a() + consumer * kGroupA)),
        b(MatrixAt(Descriptor(kMnB), pipeline.b())) {}

  // Computes the product of part part_a of a and part part_b of b over the k-tile. Adds the product
  // to d if `add` is set, and otherwise sets d to it. Addresses in descriptors are in units of 16
  // bytes.
  template <class D, int kCount>
  __device__ void Multiply(int part_a, int part_b, bool add, D (&d)[kCount]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Product<typename C::T, kMnA, kMnB>(d, a + (part_a * C::kPartA + step * kStepA) / 16,
                                         b + (part_b * C::kPartB + step * kStepB) / 16,
                                         add || step != 0);
  }
};

// Called by a consumer. Sets d to the product of one piece of work. Each k-tile is released while
// the next one is being multiplied.
template <class C, bool kMnA, bool kMnB, int kCount>
__device__ void MultiplyKTiles(int k_tiles, int consumer, int thread, TensorPipeline<C>& pipeline,
                               typename C::Sum (&d)[kCount]) {
  int last = 0;
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile, pipeline.Next()) {
    pipeline.WaitUntilFull();
    ProductsFence();
    TensorKTile<C, kMnA, kMnB>(pipeline, consumer).Multiply(0, 0, k_tile != 0, d);
    CommitProducts();
    WaitForProducts<1>();
    if (k_tile != 0) pipeline.Release(last, thread);
    last = pipeline.stage();
  }
  WaitForProducts<0>();
  SumsAreComplete(d);
  pipeline.Release(last, thread);
}

// Like MultiplyKTiles, but for f32 with k across the rows of a. wgmma cannot read that layout from
// shared memory, so the fragments of a come through registers. The fragments of the next k-tile are
// loaded while the current one is being multiplied. The rows of a may be multiplied in any order.
// In the following order, each load of a warp covers all banks. In warp w, row 16 w + r of the
// consumer's 64 rows is index
//
//      32 (w / 2) + 16 (r / 4 % 2) + 8 (w % 2) + 4 (r / 8) + r % 4
//
// Elements of a are rounded to the nearest TF32 value.
template <class C, int kCount>
__device__ void MultiplyTurned(int k_tiles, int consumer, int thread, TensorPipeline<C>& pipeline,
                               float (&d)[kCount]) {
  constexpr int kSteps = C::kDepth / 8;
  const int warp = thread / kWarpSize, row = thread % kWarpSize / 4, step_k = thread % 4;
  const int offset = (2 * consumer + warp / 2) * C::kMnBytes + row % 4 * 4;
  const auto load = [&](std::uint32_t(&fragment)[4 * kSteps]) {
    const std::uint32_t a = pipeline.a() + offset;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = step_k + i / 2 * 4;
      const std::uint32_t at = a + k * 128 + ((row / 4 * 4 + warp % 2 * 2 + i % 2) ^ k) * 16;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        asm("cvt.rna.tf32.f32 %0, %1;"
            : "=r"(fragment[4 * step + i])
            : "f"(LoadShared(at + step * 8 * 128)));
    }
  };
  std::uint32_t even[4 * kSteps], odd[4 * kSteps];
  int last = 0;
  const auto multiply = [&](int k_tile, std::uint32_t(&now)[4 * kSteps],
                            std::uint32_t(&next)[4 * kSteps]) {
    ProductsFence();
    const std::uint64_t b = TensorKTile<C, false, false>(pipeline, 0).b;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      ProductOfRegisters(d, now + 4 * step, b + step * C::kStepBytes / 16, k_tile + step != 0);
    CommitProducts();
    WaitForProducts<1>();
    if (k_tile != 0) {
      OperandsAreRead(next);
      pipeline.Release(last, thread);
    }
    last = pipeline.stage();
    pipeline.Next();
    if (k_tile + 1 == k_tiles) return;
    pipeline.WaitUntilFull();
    load(next);
  };
  pipeline.WaitUntilFull();
  load(even);
  for (int k_tile = 0; k_tile < k_tiles; k_tile += 2) {
    multiply(k_tile, even, odd);
    if (k_tile + 1 < k_tiles) multiply(k_tile + 1, odd, even);
  }
  WaitForProducts<0>();
  SumsAreComplete(d);
  OperandsAreRead(even);
  OperandsAreRead(odd);
  pipeline.Release(last, thread);
}

// Like MultiplyKTiles, but for operands in several parts, the coarsest one first. The tensor cores
// truncate sums where f32 arithmetic would round, so the sums in d are kept short. After every
// k-tile, d is added to `sums` in f32, and is then set to the rounding error of that addition
// (Dekker's fast two-sum, 1971). In each k-tile the products of the finest parts come first, while
// d is small. The consumers alternate, so that one adds while the other's k-tile is being
// multiplied. Otherwise they would run in lockstep, and the tensor cores would be idle while both
// consumers add.
template <class C, bool kMnA, bool kMnB, int kCount>
__device__ void MultiplyParts(int k_tiles, int consumer, int thread, TensorPipeline<C>& pipeline,
                              float (&d)[kCount]) {
  static_assert(C::kConsumers == 2);
  const auto turn = [](int whose) { return BarrierOf<C>(Meeting::kTurn, whose); };
  constexpr int kBoth = C::kConsumers * C::kWarpgroup;
  if (consumer == 1) NamedBarrierArrive(turn(0), kBoth);
  float sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = d[i] = 0;
  for (int k_tile = 0; k_tile < k_tiles; ++k_tile, pipeline.Next()) {
    pipeline.WaitUntilFull();
    NamedBarrier(turn(consumer), kBoth);
    ProductsFence();
    const TensorKTile<C, kMnA, kMnB> operands(pipeline, consumer);
#pragma unroll
    for (int order = C::kParts - 1; order >= 0; --order)
#pragma unroll
      for (int part = 0; part <= order; ++part) operands.Multiply(order - part, part, true, d);
    CommitProducts();
    if (consumer == 0 || k_tile + 1 < k_tiles) NamedBarrierArrive(turn(1 - consumer), kBoth);
    WaitForProducts<0>();
    SumsAreComplete(d);
    pipeline.Release(pipeline.stage(), thread);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float sum = sums[i] + d[i];
      d[i] += sums[i] - sum;
      sums[i] = sum;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = (sums[i] + d[i]) * (1 / (kPartsScale * kPartsScale));
}

}  // namespace tessera
