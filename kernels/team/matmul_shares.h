// The rows of a product as shares of several devices: each multiplies its rows of a by all of b,
// and writes its rows of c. k is never cut, so that a strategy that can be shared out has the same
// bits for any division. Standard library only.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Rows of a part of the product (TeamShare). On a GPU those of a tile: tensor_f32x3 computes whole
// tiles again where an element has left the range of its parts.
constexpr std::int64_t MatmulPartRows(Backend backend) {
  return backend == Backend::kCuda ? 128 : 1;
}

// REQUIRES: !p.transpose_a.
inline MatmulProblem RowsOf(const MatmulProblem& p, const TeamShare& share) {
  const std::int64_t rows = MatmulPartRows(share.stream->device().info().backend);
  const std::int64_t first = share.first * rows;
  const std::int64_t end = share.end * rows < p.m ? share.end * rows : p.m;
  MatmulProblem part = p;
  part.m = end - first;
  part.a =
      static_cast<const char*>(p.a) + first * p.lda * static_cast<std::int64_t>(SizeOf(p.dtype));
  part.c = static_cast<char*>(p.c) + first * p.n * static_cast<std::int64_t>(SizeOf(p.out_dtype));
  return part;
}

// Columns [first, first + columns) of a product.
struct ProductPiece {
  std::int64_t first = 0;
  std::int64_t columns = 0;
};

// In which pieces a device multiplies the columns of its share, while those of the next piece come.
struct PieceSizes {
  std::int64_t round;  // columns that it computes at a time, when all of it is at work
  std::int64_t most;   // of a piece, in whole rounds
  double growth;       // columns that come while one is multiplied

  // Of the next piece: the first one is a round, since the device waits for it; each other one
  // comes while the one before it is multiplied. In whole rounds, and what would be less than one
  // is not left. last: columns of the piece before, 0 of the first; left: those that have been in
  // none.
  std::int64_t Next(std::int64_t last, std::int64_t left) const {
    const auto grown = static_cast<std::int64_t>(growth * static_cast<double>(last));
    const std::int64_t rounds = grown / round > 1 ? grown / round : 1;
    const std::int64_t columns = rounds * round < most ? rounds * round : most;
    return left - columns < round && left <= most ? left : columns < left ? columns : left;
  }
};

// The piece as a problem, but for the pitch of c, which is p.n.
inline MatmulProblem ColumnsOf(const MatmulProblem& p, const ProductPiece& piece) {
  MatmulProblem part = p;
  part.n = piece.columns;
  part.b = static_cast<const char*>(p.b) +
           piece.first * (p.transpose_b ? p.ldb : 1) * static_cast<std::int64_t>(SizeOf(p.dtype));
  part.c = static_cast<char*>(p.c) + piece.first * static_cast<std::int64_t>(SizeOf(p.out_dtype));
  return part;
}

// Strategy::launch_shared of a strategy of the CPU, whose devices all reach b as it is.
template <const Strategy<MatmulProblem>& kStrategy>
void LaunchRows(const MatmulProblem& p, std::span<const TeamShare> shares, Stream&) {
  for (const TeamShare& share : shares)
    OnDeviceOf(*share.stream, [&] { kStrategy.launch(RowsOf(p, share), *share.stream); });
}

}  // namespace tessera
