// A strided view as a kernel reads it.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

// The view after merging. No extent is 1, and no two adjacent dimensions can be walked with a
// single stride.
struct Layout {
  int rank = 0;
  std::array<std::int64_t, kMaxRank> extents{};
  std::array<std::int64_t, kMaxRank> strides{};

  explicit Layout(const View& view) {
    for (int i = 0; i < view.shape.rank; ++i) {
      const std::int64_t extent = view.shape[i];
      const std::int64_t stride = view.strides[static_cast<std::size_t>(i)];
      if (extent == 1) continue;
      const auto next = static_cast<std::size_t>(rank);
      if (next > 0 && strides[next - 1] == extent * stride) {
        extents[next - 1] *= extent;
        strides[next - 1] = stride;
      } else {
        extents[next] = extent;
        strides[next] = stride;
        ++rank;
      }
    }
  }

  // Whether the elements are adjacent and in order.
  bool dense() const { return rank == 0 || (rank == 1 && strides[0] == 1); }
};

// The layout as a kernel argument. Index is std::uint32_t if the number of elements fits in it,
// because a 64-bit division costs four times as much as a 32-bit one.
template <class Index>
struct KernelLayout {
  int rank;
  Index extents[kMaxRank];
  std::int64_t strides[kMaxRank];

  explicit KernelLayout(const Layout& layout) : rank(layout.rank) {
    for (std::size_t i = 0; i < kMaxRank; ++i) {
      extents[i] = static_cast<Index>(layout.extents[i]);
      strides[i] = layout.strides[i];
    }
  }

  // Returns the offset of the element that has index `rest` in row-major order.
  __device__ std::int64_t Offset(Index rest) const {
    std::int64_t offset = 0;
#pragma unroll
    for (int i = kMaxRank - 1; i > 0;
         --i) {  // unrolled for the largest rank, so that no parameter is indexed at run time
      if (i < rank) {
        const Index quotient = rest / extents[i];
        offset += static_cast<std::int64_t>(rest - quotient * extents[i]) * strides[i];
        rest = quotient;
      }
    }
    return offset + static_cast<std::int64_t>(rest) * strides[0];
  }
};

}  // namespace tessera
