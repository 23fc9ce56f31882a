// Divides the rows of a product among several devices. Each device multiplies its rows of `a` by
// all of `b`, and writes its rows of `c`. k is never divided, so a strategy that can be shared out
// gives the same bits for any division. Standard library only.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/device/device.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// Returns the number of rows in a part of the product (TeamShare). On a GPU this is the height of a
// tile, because `tensor_f32x3` computes a whole tile again if an element is out of range for the
// three bf16 into which it is split.
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

// The sizes of the pieces in which a device multiplies the columns of its share. While it
// multiplies one piece, the columns of the next piece arrive.
struct PieceSizes {
  std::int64_t round;  // columns that the whole device computes at the same time
  std::int64_t most;   // largest piece, in whole rounds
  double growth;       // columns that arrive while one column is multiplied

  // Returns the number of columns in the next piece. The first piece is one round, because the
  // device waits for it. Each later piece arrives while the previous one is multiplied. Pieces are
  // whole rounds, except that a remainder of less than a round joins the last piece. `last` is the
  // number of columns in the previous piece, or 0 for the first piece. `left` is the number of
  // columns that are not yet in any piece.
  std::int64_t Next(std::int64_t last, std::int64_t left) const {
    const auto grown = static_cast<std::int64_t>(growth * static_cast<double>(last));
    const std::int64_t rounds = grown / round > 1 ? grown / round : 1;
    const std::int64_t columns = rounds * round < most ? rounds * round : most;
    return left - columns < round && left <= most ? left : columns < left ? columns : left;
  }
};

// Returns the piece as a problem. Unlike in other problems, the pitch of c is p.n.
inline MatmulProblem ColumnsOf(const MatmulProblem& p, const ProductPiece& piece) {
  MatmulProblem part = p;
  part.n = piece.columns;
  part.b = static_cast<const char*>(p.b) +
           piece.first * (p.transpose_b ? p.ldb : 1) * static_cast<std::int64_t>(SizeOf(p.dtype));
  part.c = static_cast<char*>(p.c) + piece.first * static_cast<std::int64_t>(SizeOf(p.out_dtype));
  return part;
}

// Implements SharedLaunch::launch for CPU strategies. All CPU devices read b in place.
template <const Strategy<MatmulProblem>& kStrategy>
void LaunchRows(const MatmulProblem& p, std::span<const TeamShare> shares, Stream&) {
  for (const TeamShare& share : shares)
    OnDeviceOf(*share.stream, [&] { kStrategy.launch(RowsOf(p, share), *share.stream); });
}

}  // namespace tessera
