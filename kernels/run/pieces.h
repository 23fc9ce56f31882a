// Cuts arrays into pieces of bounded size, in row-major order.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Returns how many elements of `size` bytes a piece has when a strided array is copied in pieces.
// On a GPU, copying a piece takes longer than launching the copy; on the CPU, a piece fits in
// `caches` caches. `copies` pieces together fit in a quarter of the budget and, on the CPU, in the
// scratch memory that the stream keeps.
inline std::int64_t PieceElements(const Stream& stream, std::size_t size, int copies,
                                  int caches = 1) {
  std::uint64_t bytes = stream.device().info().backend == Backend::kCuda ? std::uint64_t{32} << 20
                                                                         : std::uint64_t{512} << 10;
  bytes *= static_cast<std::uint64_t>(caches);
  if (const Budget* budget = stream.scratch_budget(); budget != nullptr)
    bytes = std::min(bytes, budget->limit() / 4);
  return std::max<std::int64_t>(
      1, static_cast<std::int64_t>(bytes) / (copies * static_cast<std::int64_t>(size)));
}

// A part of an array whose elements are adjacent in row-major order.
struct Piece {
  std::int64_t first = 0;  // index of its first element
  std::array<std::int64_t, kMaxRank> begin{};
  Shape shape;

  // Returns this part of an array.
  View Of(const View& view) const {
    std::int64_t offset = 0;
    for (int i = 0; i < shape.rank; ++i)
      offset += begin[static_cast<std::size_t>(i)] * view.strides[static_cast<std::size_t>(i)];
    View part = view;
    part.shape = shape;
    part.data = static_cast<const char*>(view.data) +
                offset * static_cast<std::int64_t>(SizeOf(view.dtype));
    return part;
  }
};

// Calls f(piece) for pieces of at most `most` elements, from first to last, until it returns false.
template <class F>
void ForPieces(const Shape& shape, std::int64_t most, const F& f) {
  const std::int64_t n = shape.elements();
  if (n == 0) return;
  // The outermost axis along which one step is within the limit; the axes before it are walked one
  // index at a time.
  std::int64_t step = n;  // elements of a step along the axis
  int axis = -1;
  do {
    if (++axis == shape.rank) break;
    step /= shape[axis];
  } while (step > most);
  Piece piece;
  piece.shape = shape;
  if (axis == shape.rank) {
    f(piece);  // a scalar
    return;
  }
  for (int i = 0; i < axis; ++i) piece.shape[i] = 1;
  const std::int64_t steps = most / step;
  while (piece.first < n) {
    std::int64_t& at = piece.begin[static_cast<std::size_t>(axis)];
    piece.shape[axis] = std::min(steps, shape[axis] - at);
    if (!f(piece)) return;
    piece.first += piece.shape[axis] * step;
    at += piece.shape[axis];
    for (int i = axis; i > 0 && piece.begin[static_cast<std::size_t>(i)] == shape[i]; --i) {
      piece.begin[static_cast<std::size_t>(i)] = 0;
      ++piece.begin[static_cast<std::size_t>(i - 1)];
    }
  }
}

inline void* At(void* data, std::int64_t index, DType dtype) {
  return static_cast<char*>(data) + index * static_cast<std::int64_t>(SizeOf(dtype));
}

}  // namespace tessera
