// Copies a strided n-dimensional view to a contiguous array, for elements of 1, 2, 4 or 8 bytes.
// Each thread copies one output element, so stores coalesce, and loads coalesce as far as the view
// allows. The host first merges adjacent dimensions that can be walked with a single stride. Most
// views then have two or three dimensions.
//
// Transposed matrices have a separate kernel, because otherwise each load would touch a different
// cache line. Tiles go through shared memory: they are read along one dimension and written along
// the other.
#include <cstdint>
#include <limits>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/copy/layout.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/shards.h"

namespace tessera {
namespace {

constexpr int kTile = 32;
constexpr int kTileRows = 8;  // threads along the slow dimension of a tile
constexpr int kBlock = 256;

template <class E, class Index>
__global__ void GatherElements(const E* in, KernelLayout<Index> layout, Index first, Index n,
                               E* out) {
  const std::int64_t thread = GridThread();
  if (thread >= static_cast<std::int64_t>(n)) return;
  out[thread] = in[layout.Offset(first + static_cast<Index>(thread))];
}

// Copies `in`, whose element [r, c] is at r + c * pitch, to out[rows, columns].
template <class E>
__global__ void TransposeTiles(const E* in, std::int64_t rows, std::int64_t columns,
                               std::int64_t pitch, E* out) {
  // One unused column puts the cells of a column into different banks.
  __shared__ E tile[kTile][kTile + 1];
  const std::int64_t column_tiles = (columns + kTile - 1) / kTile;
  const std::int64_t row = blockIdx.x / column_tiles * kTile;
  const std::int64_t column = blockIdx.x % column_tiles * kTile;
  const int x = static_cast<int>(threadIdx.x);
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    if (row + x < rows && column + y < columns) tile[y][x] = in[row + x + (column + y) * pitch];
  }
  __syncthreads();  // the tile is complete before it is read along the other dimension
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    if (row + y < rows && column + x < columns) out[(row + y) * columns + column + x] = tile[x][y];
  }
}

template <class E, class Index>
void GatherIndexed(const E* in, const Layout& layout, std::int64_t first, std::int64_t n, E* out,
                   cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(CeilDiv(n, kBlock));
  GatherElements<E, Index><<<blocks, kBlock, 0, stream>>>(
      in, KernelLayout<Index>(layout), static_cast<Index>(first), static_cast<Index>(n), out);
  CUDA_CHECK_LAUNCH(GatherElements);
}

// Copies elements [first, first + n) of the view.
template <class E>
void GatherAnyIndexed(const E* in, const Layout& layout, std::int64_t first, std::int64_t n, E* out,
                      cudaStream_t stream) {
  if (first + n <= std::numeric_limits<std::uint32_t>::max()) {
    GatherIndexed<E, std::uint32_t>(in, layout, first, n, out, stream);
  } else {
    GatherIndexed<E, std::uint64_t>(in, layout, first, n, out, stream);
  }
}

template <class E>
void GatherElementsOf(const View& view, E* out, cudaStream_t stream) {
  const auto* in = static_cast<const E*>(view.data);
  const std::int64_t n = view.elements();
  if (n == 0) return;
  const Layout layout(view);
  if (layout.dense()) {
    CopyByShards(out, in, static_cast<std::size_t>(n) * sizeof(E), cudaMemcpyDeviceToDevice,
                 stream);
  } else if (layout.rank == 2 && layout.strides[0] == 1 && layout.extents[0] >= kTile &&
             layout.extents[1] >= kTile) {
    const std::int64_t tiles =
        CeilDiv(layout.extents[0], kTile) * CeilDiv(layout.extents[1], kTile);
    TransposeTiles<E><<<static_cast<unsigned>(tiles), dim3(kTile, kTileRows), 0, stream>>>(
        in, layout.extents[0], layout.extents[1], layout.strides[1], out);
    CUDA_CHECK_LAUNCH(TransposeTiles);
  } else {
    GatherAnyIndexed(in, layout, 0, n, out, stream);
  }
}

template <class E>
void GatherRangeOf(const View& view, std::int64_t first, std::int64_t count, E* out,
                   cudaStream_t stream) {
  if (count > 0)
    GatherAnyIndexed(static_cast<const E*>(view.data), Layout(view), first, count, out, stream);
}

}  // namespace

void GatherAsync(const View& view, void* out, cudaStream_t stream) {
  switch (SizeOf(view.dtype)) {
    case 1:
      return GatherElementsOf(view, static_cast<std::uint8_t*>(out), stream);
    case 2:
      return GatherElementsOf(view, static_cast<std::uint16_t*>(out), stream);
    case 4:
      return GatherElementsOf(view, static_cast<std::uint32_t*>(out), stream);
    default:
      return GatherElementsOf(view, static_cast<std::uint64_t*>(out), stream);
  }
}

void GatherRangeAsync(const View& view, std::int64_t first, std::int64_t count, void* out,
                      cudaStream_t stream) {
  switch (SizeOf(view.dtype)) {
    case 1:
      return GatherRangeOf(view, first, count, static_cast<std::uint8_t*>(out), stream);
    case 2:
      return GatherRangeOf(view, first, count, static_cast<std::uint16_t*>(out), stream);
    case 4:
      return GatherRangeOf(view, first, count, static_cast<std::uint32_t*>(out), stream);
    default:
      return GatherRangeOf(view, first, count, static_cast<std::uint64_t*>(out), stream);
  }
}

}  // namespace tessera
