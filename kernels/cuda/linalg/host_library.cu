// Linalg by LAPACK on the host: the matrices are copied there in pieces, and the results back.
//
// The chain of steps of a large decomposition runs faster on the host's cores than on a single
// multiprocessor, and the copies take less time than the decomposition: a matrix of n columns has
// n^2 elements, for which LAPACK needs at least n^3 / 3 operations.
#include <algorithm>
#include <cstdint>

#include "kernels/cpu/linalg/lapack.h"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/problem/linalg.h"

namespace tessera {
namespace {

// Bytes of matrices and results in host memory, unless a single matrix is larger.
constexpr std::int64_t kPiece = std::int64_t{64} << 20;

// The bytes of one matrix, its right sides and its result.
struct Sizes {
  std::int64_t x, b, out;

  explicit Sizes(const LinalgProblem& p) {
    const auto size = static_cast<std::int64_t>(SizeOf(p.dtype));
    x = p.m * p.n * size;
    b = p.n * p.columns * size;
    out = p.out_rows() * p.out_columns() * size;
  }
  std::int64_t all() const { return x + b + out; }
};

// Returns the problem of as many matrices as a piece has.
LinalgProblem PieceOf(LinalgProblem p) {
  const std::int64_t each = std::max<std::int64_t>(1, Sizes(p).all());
  p.stack = std::clamp<std::int64_t>(kPiece / each, 1, std::max<std::int64_t>(1, p.stack));
  return p;
}

void Run(const LinalgProblem& p, Stream& stream) {
  Cuda(stream);
  const Sizes sizes(p);
  LinalgProblem piece = PieceOf(p);
  const std::int64_t most = piece.stack;
  auto* const host =
      static_cast<std::byte*>(stream.HostScratch(static_cast<std::size_t>(most * sizes.all())));
  void* const work = stream.HostScratch(LapackBytes(piece));
  std::byte *const x = host, *const b = x + most * sizes.x, *const out = b + most * sizes.b;
  piece.x = x;
  piece.b = b;
  piece.out = out;
  std::int64_t bad = -1;
  for (std::int64_t first = 0; first < p.stack && !stream.stopped(); first += most) {
    piece.stack = std::min(most, p.stack - first);
    const auto copied = [&](std::int64_t each) {
      return static_cast<std::size_t>(piece.stack * each);
    };
    stream.CopyToHost(x, static_cast<const std::byte*>(p.x) + first * sizes.x, copied(sizes.x));
    if (sizes.b > 0)
      stream.CopyToHost(b, static_cast<const std::byte*>(p.b) + first * sizes.b, copied(sizes.b));
    RunLapack(piece, stream, work);
    if (bad < 0 && piece.result->index >= 0) bad = first + piece.result->index;
    const HostBytes results{out, copied(sizes.out)};
    stream.CopyToDevice(static_cast<std::byte*>(p.out) + first * sizes.out, {&results, 1});
  }
  p.result->index = bad;
}

}  // namespace

extern constexpr Strategy<LinalgProblem> kLinalgHostLibrary = {
    .name = "host_library",
    .summary = "LAPACK on the host, between copies of the matrices and the results",
    .source = "OpenBLAS",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64),  // the split among threads may depend on the load
    .roundoff = LinalgRoundoff,
    .cost =
        [](const LinalgProblem& p) {
          const double flops = static_cast<double>(p.stack) * LinalgFlops(p);
          // A PCIe 5 link moves 50 GB/s, a hundredth of what device memory does. The copies and
          // waits for a single small matrix take 200 us (NVIDIA H200, 2026-12-01).
          return Cost{.bytes = Whole(100 * LinalgBytes(p)),
                      .flops = Whole(flops),
                      .atomics = 0,
                      .depth = Whole(200e3 + flops / 8)};
        },
    .launch = Run,
    .scratch =
        [](const LinalgProblem& p) {
          const LinalgProblem piece = PieceOf(p);
          return static_cast<std::uint64_t>(piece.stack * Sizes(p).all()) + LapackBytes(piece);
        },
    .vendor = true,
};

}  // namespace tessera
