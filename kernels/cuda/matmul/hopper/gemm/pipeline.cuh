// The pipeline of the tensor kernel: a ring of stages with full and empty barriers, and the
// producer that fills it.
#pragma once

#include <cstdint>

#include "kernels/cuda/matmul/hopper/gemm/abreast.cuh"
#include "kernels/cuda/matmul/hopper/gemm/tile.cuh"

namespace tessera {

// One thread's position in the ring of k-tiles in shared memory.
template <class C>
class TensorPipeline {
 public:
  // `k_tiles` is the address of kStages k-tiles. `barriers` is the address of kStages "full"
  // barriers, followed by kStages "empty" barriers.
  __device__ TensorPipeline(std::uint32_t k_tiles, std::uint32_t barriers)
      : k_tiles_(k_tiles), barriers_(barriers) {}

  __device__ int stage() const { return stage_; }
  __device__ std::uint32_t a() const { return k_tiles_ + stage_ * C::kStageBytes; }
  __device__ std::uint32_t b() const { return a() + C::kBytesA; }
  __device__ std::uint32_t full() const { return barriers_ + stage_ * 8; }
  __device__ std::uint32_t empty(int stage) const { return barriers_ + (C::kStages + stage) * 8; }

  __device__ void Init() const {
    for (int s = 0; s < C::kStages; ++s) {
      BarrierInit(barriers_ + s * 8, 1);
      BarrierInit(empty(s), C::kConsumers * C::kCluster);
    }
    BarrierInitFence();
  }
  // A new barrier is in the phase of parity 0, so in the first round threads wait until stages are
  // full, but not until they are empty.
  __device__ void WaitUntilFull() const { BarrierWait(full(), parity_); }
  __device__ void WaitUntilEmpty() const { BarrierWait(empty(stage_), parity_ ^ 1); }
  // Called by a consumer that is done with the k-tile. It arrives at the "empty" barrier in every
  // block of the cluster, because the producer of each block copies part of the k-tile to all of
  // them. `thread` is the calling thread's index in its warpgroup.
  __device__ void Release(int stage, int thread) const {
    if constexpr (C::kCluster == 1) {
      if (thread == 0) BarrierArrive(empty(stage));
    } else {
      if (thread < C::kCluster) BarrierArriveAt(empty(stage), static_cast<unsigned>(thread));
    }
  }
  __device__ void Next() {
    if (++stage_ == C::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  std::uint32_t k_tiles_, barriers_;
  int stage_ = 0;
  unsigned parity_ = 0;
};

// Called by the fetching thread. Fetches the k-tiles of one piece of work. `rank` is the block's
// rank in its cluster.
template <class C, bool kMnA, bool kMnB>
__device__ void FetchKTiles(const CUtensorMap& a_map, const CUtensorMap& b_map,
                            const TensorWork& work, const TensorPlace& place, int rank,
                            Abreast& abreast, TensorPipeline<C>& pipeline) {
  constexpr int kWidthA = C::BoxWidth(kMnA), kWidthB = C::BoxWidth(kMnB);
  constexpr int kBytesA = C::BoxBytes(kMnA), kBytesB = C::BoxBytes(kMnB);
  constexpr int kBoxesA = C::kRows / kWidthA, kBoxesB = C::kColumns / kWidthB;
  constexpr int kShare = kBoxesB / C::kCluster;  // boxes of b that a block fetches for its cluster
  static_assert(!C::kBatch || C::kParts == 1);
  const int first_part = C::kBatch ? place.split : 0;
  const int row = (place.row_tile * C::kCluster + rank) * C::kRows;
  const int column = place.column_tile * C::kColumns;
  // Boxes outside a matrix are not fetched, because TMA takes longer to write zeros than to fetch
  // elements. Results computed from the stale elements are not stored. With several parts all boxes
  // are fetched, since all results are checked for infinities.
  const auto inside = [](int boxes, int width, int first, int extent) {
    return max(0, min(boxes, (extent - first + width - 1) / width));
  };
  const int boxes_a = inside(kBoxesA, kWidthA, row, work.rows);
  const int boxes_b = inside(kBoxesB, kWidthB, column, work.columns);
  // all: whether to fetch every box without a check.
  const auto fetch = [&](auto all) {
    const int bytes = all ? C::kStageBytes : C::kParts * (boxes_a * kBytesA + boxes_b * kBytesB);
    for (int k_tile = 0; k_tile < place.k_tiles; ++k_tile, pipeline.Next()) {
      if (k_tile % kStepKTiles == 0) abreast.Step();
      const int k = ((C::kBatch ? 0 : place.first_k_tile) + k_tile) * C::kDepth;
      pipeline.WaitUntilEmpty();
      BarrierExpect(pipeline.full(), bytes);
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
        for (int box = 0; box < kBoxesA; ++box) {
          if (!all && box >= boxes_a) break;
          const int y = row + box * kWidthA;
          LoadBox(pipeline.a() + part * C::kPartA + box * kBytesA, &a_map, kMnA ? y : k,
                  kMnA ? k : y, first_part + part, pipeline.full());
        }
      }
#pragma unroll
      for (int part = 0; part < C::kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const int box = rank * kShare + i;
          if (!all && box >= boxes_b) break;
          const std::uint32_t to = pipeline.b() + part * C::kPartB + box * kBytesB;
          const int x = column + box * kWidthB;
          if constexpr (C::kCluster == 1) {
            LoadBox(to, &b_map, kMnB ? x : k, kMnB ? k : x, first_part + part, pipeline.full());
          } else {
            LoadBoxMulticast(to, &b_map, kMnB ? x : k, kMnB ? k : x, first_part + part,
                             pipeline.full(), (1u << C::kCluster) - 1);
          }
        }
      }
    }
  };
  // Checks whether the last boxes begin inside the matrices. The counts of boxes cannot be compared
  // instead, because nvcc 13.0 miscompiles max(0, min(x, 4)) == 4 into a minimum and a test of x <=
  // 4.
  if (C::kParts > 1 ||
      (row + C::kRows - kWidthA < work.rows && column + C::kColumns - kWidthB < work.columns)) {
    fetch(std::true_type());
  } else {
    fetch(std::false_type());
  }
}

}  // namespace tessera
