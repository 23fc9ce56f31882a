// Reads elements of a view on the host, in row-major order, starting at any position.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Returns a view of the same elements in the same order. Extents of 1 are dropped, and adjacent
// axes are merged if a single stride covers both, so that rows are as long as possible. Empty views
// are returned unchanged.
inline View Merged(const View& view) {
  View merged{.data = view.data, .dtype = view.dtype, .shape = {}, .strides = {}};
  if (view.elements() == 0) return view;
  for (int i = 0; i < view.shape.rank; ++i) {
    const std::int64_t extent = view.shape[i];
    const std::int64_t stride = view.strides[static_cast<std::size_t>(i)];
    if (extent == 1) continue;
    const int last = merged.shape.rank - 1;
    if (last >= 0 && merged.strides[static_cast<std::size_t>(last)] == extent * stride) {
      merged.shape[last] *= extent;
      merged.strides[static_cast<std::size_t>(last)] = stride;
    } else {
      merged.shape[last + 1] = extent;
      merged.strides[static_cast<std::size_t>(merged.shape.rank)] = stride;
      ++merged.shape.rank;
    }
  }
  return merged;
}

// Calls f(offset) for elements [first, first + count) of a Merged view, in order, with the distance
// in elements from the beginning of the view.
template <class F>
void ForOffsets(const View& view, std::int64_t first, std::int64_t count, const F& f) {
  if (count == 0) return;
  const int rank = view.shape.rank;
  const std::int64_t row = rank == 0 ? 1 : view.shape[rank - 1];
  const std::int64_t stride = rank == 0 ? 1 : view.strides[static_cast<std::size_t>(rank - 1)];
  // `index` counts through the outer axes like an odometer. `offset` is the offset of that index in
  // the view's memory.
  std::array<std::int64_t, kMaxRank> index{};
  std::int64_t offset = 0;
  std::int64_t rest = first / row;
  for (int axis = rank - 2; axis >= 0; --axis) {
    const auto a = static_cast<std::size_t>(axis);
    index[a] = rest % view.shape[axis];
    rest /= view.shape[axis];
    offset += index[a] * view.strides[a];
  }
  std::int64_t begin = first % row;
  while (true) {
    const std::int64_t end = std::min(row, begin + count);
    for (std::int64_t i = begin; i < end; ++i) f(offset + i * stride);
    count -= end - begin;
    if (count == 0) return;
    begin = 0;
    for (int axis = rank - 2; axis >= 0; --axis) {
      const auto a = static_cast<std::size_t>(axis);
      offset += view.strides[a];
      if (++index[a] < view.shape[axis]) break;
      offset -= view.strides[a] * view.shape[axis];
      index[a] = 0;
    }
  }
}

// Writes elements [first, first + count) of a Merged view to out. T has the size of the view's
// elements.
template <class T>
void GatherRange(const View& view, std::int64_t first, std::int64_t count, T* out) {
  const auto* base = static_cast<const T*>(view.data);
  ForOffsets(view, first, count, [&](std::int64_t offset) { *out++ = base[offset]; });
}

}  // namespace tessera
