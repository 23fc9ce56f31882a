// Scan in the fixed order of kernels/same_bits/fixed_scan.h, on all cores.
//
// The segments of a stripe do not depend on each other, so the inner loop adds to 32 of them at the
// same time, and the compiler vectorises it. If there are at least as many lines as cores, a core
// walks down whole lines, which it reads and writes once. If there are fewer, the chunks of a line
// are divided among the cores in three steps: the totals of all chunks, the totals before each
// chunk, and the results, for which x is read a second time.
//
// Cost at n = 2^20 (f32): 8 MiB read, 4 MiB written, 3 * 2^20 additions, 256 chunks.
#include <algorithm>

#include "kernels/device/device.h"
#include "kernels/same_bits/fixed_scan.h"

namespace tessera {
namespace {

// The lines that a core takes together: adjacent columns, which share cache lines.
constexpr std::int64_t kColumns = 16;

// The elements of one line at the positions of a chunk: element i of the chunk is x[i * stride].
template <class F>
struct Piece {
  const typename F::Element* x;
  typename F::Out* out;  // null if only the total is needed
  std::int64_t stride;
  std::int64_t count;
  bool exclusive;
};

// Scans at most kScanStripe elements. Returns their total. base: the total of the chunks before
// this one; before: the total of the stripes before this one in its chunk.
template <class F>
ScanValue<F> ScanStripe(const Piece<F>& piece, ScanValue<F> base, ScanValue<F> before) {
  using Value = ScanValue<F>;
  Value within[kScanItems][kScanSegments];
  Value totals[kScanSegments];
  std::fill_n(totals, kScanSegments, F::template Identity<Value>());
  for (int j = 0; j < kScanItems; ++j) {
    const std::int64_t left = (piece.count - j + kScanItems - 1) / kScanItems;
    const int segments = static_cast<int>(std::clamp<std::int64_t>(left, 0, kScanSegments));
    for (int s = 0; s < segments; ++s) {
      const auto element = piece.x[(s * kScanItems + j) * piece.stride];
      totals[s] = F::Combine(totals[s], static_cast<Value>(F::Load(element, 0)));
      within[j][s] = totals[s];
    }
  }
  for (int distance = 1; distance < kScanSegments; distance *= 2)
    for (int s = kScanSegments - 1; s >= distance; --s)
      totals[s] = F::Combine(totals[s - distance], totals[s]);
  if (piece.out == nullptr) return totals[kScanSegments - 1];
  for (std::int64_t first = 0, s = 0; first < piece.count; first += kScanItems, ++s) {
    const Value segments = s == 0 ? F::template Identity<Value>() : totals[s - 1];
    Value result = F::Combine(base, F::Combine(before, segments));
    const Value start = result;
    const std::int64_t end = std::min<std::int64_t>(kScanItems, piece.count - first);
    for (std::int64_t j = 0; j < end; ++j) {
      const Value next = F::Combine(start, within[j][s]);
      piece.out[(first + j) * piece.stride] = FinishScan<F>(piece.exclusive ? result : next);
      result = next;
    }
  }
  return totals[kScanSegments - 1];
}

// Scans a chunk and returns its total.
template <class F>
typename F::Wide ScanChunk(Piece<F> chunk, typename F::Wide base) {
  auto before = F::template Identity<ScanValue<F>>();
  for (std::int64_t left = chunk.count; left > 0; left -= kScanStripe) {
    chunk.count = std::min(left, kScanStripe);
    before = F::Combine(before, ScanStripe(chunk, static_cast<ScanValue<F>>(base), before));
    chunk.x += kScanStripe * chunk.stride;
    if (chunk.out != nullptr) chunk.out += kScanStripe * chunk.stride;
  }
  return static_cast<typename F::Wide>(before);
}

// The lines of a problem, in the order in which they are scanned.
template <class F>
struct Lines {
  const ScanProblem& p;

  std::int64_t chunks() const { return ScanChunks(p.length); }
  Piece<F> Chunk(std::int64_t line, std::int64_t chunk, bool store) const {
    const std::int64_t at = chunk * kScanChunk;
    const std::int64_t first = line / p.inner * p.length * p.inner + line % p.inner +
                               (p.reverse ? p.length - 1 - at : at) * p.inner;
    return {static_cast<const typename F::Element*>(p.x) + first,
            store ? static_cast<typename F::Out*>(p.out) + first : nullptr,
            p.reverse ? -p.inner : p.inner, std::min(kScanChunk, p.length - at), p.exclusive};
  }
};

// Scans adjacent lines from their beginning to their end.
template <class F>
void WalkLines(const Lines<F>& lines, std::int64_t first, std::int64_t end, const Stream& stream) {
  ScanCarry<F> carries[kColumns];
  for (std::int64_t chunk = 0; chunk < lines.chunks() && !stream.stopped(); ++chunk) {
    for (std::int64_t line = first; line < end; ++line) {
      ScanCarry<F>& carry = carries[line - first];
      carry.Add(ScanChunk(lines.Chunk(line, chunk, /*store=*/true), carry.Base()));
    }
  }
}

template <class F>
void Run(const ScanProblem& p, Stream& stream) {
  using Wide = typename F::Wide;
  const Lines<F> lines = {p};
  const std::int64_t all = p.outer * p.inner, chunks = lines.chunks();
  const std::int64_t together = p.inner == 1 ? 1 : kColumns;
  const std::int64_t walks = (all + together - 1) / together;
  const int workers = stream.device().info().multiprocessors;
  if (workers == 1 || chunks == 1 || walks >= 4 * workers) {
#pragma omp parallel for schedule(dynamic, 1) if (workers > 1 && p.elements() > (1 << 16))
    for (std::int64_t walk = 0; walk < walks; ++walk)
      WalkLines(lines, walk * together, std::min(all, (walk + 1) * together), stream);
    return;
  }
  // The total of each chunk, and then the total of the chunks before it.
  auto* totals =
      static_cast<Wide*>(stream.Scratch(static_cast<std::size_t>(all * chunks) * sizeof(Wide)));
#pragma omp parallel for schedule(dynamic, 1)
  for (std::int64_t i = 0; i < all * chunks; ++i) {
    if (stream.stopped()) continue;
    const Wide nothing = F::template Identity<Wide>();
    totals[i] = ScanChunk(lines.Chunk(i / chunks, i % chunks, /*store=*/false), nothing);
  }
  for (std::int64_t line = 0; line < all; ++line) {
    ScanCarry<F> carry;
    for (std::int64_t i = line * chunks; i < (line + 1) * chunks; ++i) {
      const Wide total = totals[i];
      totals[i] = carry.Base();
      carry.Add(total);
    }
  }
#pragma omp parallel for schedule(dynamic, 1)
  for (std::int64_t i = 0; i < all * chunks; ++i) {
    if (!stream.stopped())
      ScanChunk(lines.Chunk(i / chunks, i % chunks, /*store=*/true), totals[i]);
  }
}

}  // namespace

extern constexpr Strategy<ScanProblem> kScanCpuFixedOrder = {
    .name = "fixed_order",
    .summary = "chunks on all cores, in an order that depends only on the length",
    .source = "scan of Kogge and Stone (1973) inside stripes; three steps over chunks",
    .deterministic = true,
    .roundoff = [](const ScanProblem& p) { return ScanRoundoff(p, ScanSteps(p.dtype, p.length)); },
    .cost =
        [](const ScanProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.elements());
          return Cost{.bytes = ScanBytes(p) + n * SizeOf(p.dtype),
                      .flops = 3 * n,
                      .atomics = 0,
                      .depth = static_cast<std::uint64_t>(std::min(p.length, kScanChunk))};
        },
    .launch =
        [](const ScanProblem& p, Stream& stream) {
          DispatchScan(p.op, p.dtype, [&]<class F>(std::type_identity<F>) { Run<F>(p, stream); });
        },
    .scratch =
        [](const ScanProblem& p) {
          return static_cast<std::uint64_t>(p.outer * p.inner * ScanChunks(p.length)) *
                 sizeof(double);
        },
};

}  // namespace tessera
