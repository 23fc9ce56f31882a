// Code that the strategies of Select share: the arrays of a problem, and a tile of them.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/scan/scan.cuh"
#include "kernels/problem/select.h"
#include "kernels/problem/take.h"

namespace tessera {

inline constexpr int kSelectThreads = 256;
inline constexpr int kSelectWarps = kSelectThreads / kWarpSize;
inline constexpr int kSelectEach = 16;                            // elements of a thread
inline constexpr int kSelectPart = kSelectEach * kWarpSize;       // elements of a warp
inline constexpr int kSelectTile = kSelectEach * kSelectThreads;  // elements of a block

inline std::int64_t SelectTiles(const SelectProblem& p) { return CeilDiv(p.n, kSelectTile); }

template <class E>
struct SelectArrays {
  const E* x;
  const std::uint8_t* mask;
  E* values;              // null if they are not wanted
  std::int64_t* indices;  // null if they are not wanted
  std::int64_t n;

  explicit SelectArrays(const SelectProblem& p)
      : x(static_cast<const E*>(p.x)),
        mask(static_cast<const std::uint8_t*>(p.mask)),
        values(p.wants_values ? static_cast<E*>(p.values) : nullptr),
        indices(p.wants_indices ? p.indices : nullptr),
        n(p.n) {}
};

// A tile, which is read by a block of kSelectThreads threads. Each warp takes kSelectPart adjacent
// elements. Lane l looks at the elements l, l + 32, ... of the part, so the loads of a warp
// coalesce, and a ballot for every 32 elements gives the rank of the lane's element among the
// selected ones. The warp lists the places of selected elements in shared memory. Then lane l takes
// entries l, l + 32, ... of the list, so its loads are in flight together, few of them are wasted,
// and the stores of a warp are adjacent.
template <class E>
class SelectTile {
 public:
  struct Shared {
    std::uint16_t places[kSelectWarps][kSelectPart];
    int counts[kSelectWarps];
  };

  // Reads the mask. Elements beyond the end are not selected. REQUIRES: the whole block calls it.
  __device__ SelectTile(const SelectArrays<E>& arrays, std::int64_t tile, Shared& shared)
      : arrays_(arrays),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        places_(shared.places[threadIdx.x / kWarpSize]) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    first_ = tile * kSelectTile + warp * kSelectPart;
    bool selected[kSelectEach];
#pragma unroll
    for (int j = 0; j < kSelectEach; ++j) {
      const std::int64_t i = first_ + j * kWarpSize + lane_;
      selected[j] = i < arrays.n && __ldg(arrays.mask + i) != 0;
    }
#pragma unroll
    for (int j = 0; j < kSelectEach; ++j) {
      const unsigned ballot = __ballot_sync(kFullMask, selected[j]);
      const int below = __popc(ballot & ((1u << lane_) - 1));
      if (selected[j]) places_[own_ + below] = static_cast<std::uint16_t>(j * kWarpSize + lane_);
      own_ += __popc(ballot);
    }
    if (lane_ == 0) shared.counts[warp] = own_;
    __syncthreads();  // every warp's list and count have been stored
    for (int w = 0; w < kSelectWarps; ++w) {
      if (w == warp) before_ = count_;
      count_ += shared.counts[w];
    }
  }

  // The number of selected elements.
  __device__ int count() const { return count_; }

  // Loads the values, if they are wanted.
  __device__ void Load() {
    if (arrays_.values == nullptr) return;
#pragma unroll
    for (int j = 0; j < kSelectEach; ++j) {
      const int at = j * kWarpSize + lane_;
      if (at < own_) loaded_[j] = __ldg(arrays_.x + first_ + places_[at]);
    }
  }

  // Stores the results. base: the number of selected elements before the tile.
  __device__ void Store(std::int64_t base) const {
#pragma unroll
    for (int j = 0; j < kSelectEach; ++j) {
      const int at = j * kWarpSize + lane_;
      if (at >= own_) continue;
      const std::int64_t to = base + before_ + at;
      if (arrays_.values != nullptr) arrays_.values[to] = loaded_[j];
      if (arrays_.indices != nullptr) arrays_.indices[to] = first_ + places_[at];
    }
  }

 private:
  const SelectArrays<E>& arrays_;
  const int lane_;
  std::uint16_t* const places_;  // places of the warp's selected elements in its part, in order
  std::int64_t first_;           // the index of the first element of the warp's part
  int own_ = 0;                  // the number of the warp's selected elements
  int before_ = 0;               // the number of elements selected by the warps before it
  int count_ = 0;
  E loaded_[kSelectEach];
};

// Returns the cost of a strategy that reads the mask `masks` times.
inline Cost CudaSelectCost(const SelectProblem& p, std::uint64_t masks, std::uint64_t depth) {
  constexpr std::uint64_t kSector = 32;
  return SelectCost(p, masks, kSector, depth);
}

inline std::string SelectRefuses(const SelectProblem& p) {
  return RefusesBlocks(static_cast<double>(SelectTiles(p)));
}

}  // namespace tessera
