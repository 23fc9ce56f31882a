// Scan in the fixed order of kernels/same_bits/fixed_scan.h, on all cores.
//
// The segments of a stripe do not depend on each other, so the inner loop adds to 32 of them at the
// same time, and the compiler vectorises it. Adjacent columns are scanned together instead, row by
// row, which reads whole cache lines. If there are many more lines than cores, a core walks down
// whole lines, which it reads and writes once. If there are fewer, the chunks of a line are divided
// among the cores in three steps: the totals of all chunks, the totals before each chunk, and the
// results, for which x is read a second time.
//
// Cost at n = 2^20 (f32): 8 MiB read, 4 MiB written, 3 * 2^20 additions, 256 chunks.
#include <algorithm>

#include "kernels/cpu/runtime/host_threads.h"
#include "kernels/device/device.h"
#include "kernels/same_bits/fixed_scan.h"

namespace tessera {
namespace {

// The adjacent columns that a core takes together. More of them use whole pages.
constexpr std::int64_t kLeastColumns = 16, kMostColumns = 128;
// If there are more blocks, cores do not share lines.
constexpr std::int64_t kMostShared = 1024;
// The least number of elements that a core takes at a time.
constexpr std::int64_t kLeastWork = std::int64_t{1} << 13;

// The elements of adjacent lines at the positions of a chunk: element i of line c is
// x[i * stride + c].
template <class F>
struct Piece {
  const typename F::Element* x;
  typename F::Out* out;  // null if only the totals are needed
  std::int64_t stride;
  std::int64_t count;
  std::int64_t lines;
  bool exclusive;
};

// Scans at most kScanStripe elements of one line. Returns their total, which is unspecified unless
// they are kScanStripe. base: the total of the chunks before this one; before: the total of the
// stripes before this one in its chunk.
template <class F>
ScanValue<F> ScanStripe(const Piece<F>& piece, ScanValue<F> base, ScanValue<F> before) {
  using Value = ScanValue<F>;
  Value within[kScanItems][kScanSegments];
  Value totals[kScanSegments];
  const int all = static_cast<int>((piece.count + kScanItems - 1) / kScanItems);
  std::fill_n(totals, kScanSegments, F::template Identity<Value>());
  for (int j = 0; j < std::min<std::int64_t>(kScanItems, piece.count); ++j) {
    const int segments = static_cast<int>((piece.count - j + kScanItems - 1) / kScanItems);
    for (int s = 0; s < segments; ++s) {
      const auto element = piece.x[(s * kScanItems + j) * piece.stride];
      totals[s] = F::Combine(totals[s], static_cast<Value>(F::Load(element, 0)));
      within[j][s] = totals[s];
    }
  }
  for (int distance = 1; distance < all; distance *= 2)
    for (int s = all - 1; s >= distance; --s)
      totals[s] = F::Combine(totals[s - distance], totals[s]);
  if (piece.out == nullptr) return totals[all - 1];
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
  return totals[all - 1];
}

// Scans a chunk of one line. Returns its total, which is unspecified unless the chunk is complete.
template <class F>
typename F::Wide ScanLine(Piece<F> chunk, typename F::Wide base) {
  auto before = F::template Identity<ScanValue<F>>();
  for (std::int64_t left = chunk.count; left > 0; left -= kScanStripe) {
    chunk.count = std::min(left, kScanStripe);
    before = F::Combine(before, ScanStripe(chunk, static_cast<ScanValue<F>>(base), before));
    chunk.x += kScanStripe * chunk.stride;
    if (chunk.out != nullptr) chunk.out += kScanStripe * chunk.stride;
  }
  return static_cast<typename F::Wide>(before);
}

// Scans a chunk of adjacent lines, row by row. totals: the totals of the chunks before this one,
// which are replaced by the totals of this chunk. These are unspecified unless it is complete.
template <class F>
void ScanColumns(const Piece<F>& chunk, typename F::Wide* totals) {
  using Value = ScanValue<F>;
  const Value nothing = F::template Identity<Value>();
  constexpr int kWindows = kScanSegments - 1;
  // The total of the stripes before this one, of the segments before this one in the stripe, and of
  // the elements so far in the segment.
  Value before[kMostColumns], segments[kMostColumns], within[kMostColumns];
  // What is added to `within`, and the last result.
  Value start[kMostColumns], result[kMostColumns];
  // The totals of the last 2^k windows of 2^k segments, from row 2^k - 1. They are what the scan of
  // Kogge and Stone combines in its step k.
  Value windows[kWindows][kMostColumns];
  const std::int64_t lines = chunk.lines;
  std::fill_n(before, lines, nothing);
  for (std::int64_t first = 0; first < chunk.count; first += kScanItems) {
    const int s = static_cast<int>(first / kScanItems % kScanSegments);
    if (s == 0) std::fill_n(segments, lines, nothing);
    for (std::int64_t c = 0; c < lines; ++c) {
      start[c] = result[c] =
          F::Combine(static_cast<Value>(totals[c]), F::Combine(before[c], segments[c]));
      within[c] = nothing;
    }
    const std::int64_t end = std::min<std::int64_t>(chunk.count, first + kScanItems);
    for (std::int64_t i = first; i < end; ++i) {
      const auto* const x = chunk.x + i * chunk.stride;
      auto* const out = chunk.out == nullptr ? nullptr : chunk.out + i * chunk.stride;
      for (std::int64_t c = 0; c < lines; ++c)
        within[c] = F::Combine(within[c], static_cast<Value>(F::Load(x[c], 0)));
      if (out == nullptr) continue;
      for (std::int64_t c = 0; c < lines; ++c) {
        const Value next = F::Combine(start[c], within[c]);
        out[c] = FinishScan<F>(chunk.exclusive ? result[c] : next);
        result[c] = next;
      }
    }
    for (int distance = 1; distance < kScanSegments; distance *= 2) {
      Value* const window = windows[distance - 1 + s % distance];
      for (std::int64_t c = 0; c < lines; ++c) {
        const Value total = within[c];
        if (s >= distance) within[c] = F::Combine(window[c], total);
        window[c] = total;
      }
    }
    std::copy_n(within, lines, segments);
    if (s + 1 == kScanSegments)
      for (std::int64_t c = 0; c < lines; ++c) before[c] = F::Combine(before[c], segments[c]);
  }
  std::copy_n(before, lines, totals);
}

template <class F>
void ScanChunk(const Piece<F>& chunk, typename F::Wide* totals) {
  if (chunk.lines > 1) return ScanColumns(chunk, totals);
  *totals = ScanLine(chunk, *totals);
}

// How the lines of a problem are divided: into blocks of adjacent columns.
struct Blocks {
  const ScanProblem& p;
  std::int64_t workers = HostThreads();
  std::int64_t chunks = ScanChunks(p.length);
  // The columns of a block, and the blocks that are next to each other.
  std::int64_t columns =
      std::clamp(p.outer * p.inner / (4 * workers) / kLeastColumns * kLeastColumns, kLeastColumns,
                 kMostColumns);
  std::int64_t across = (p.inner + columns - 1) / columns;
  std::int64_t count = p.outer * across;

  // Whether cores share a line.
  bool Shared() const {
    return workers > 1 && chunks > 1 && count < std::min(4 * workers, kMostShared);
  }
  std::int64_t FirstLine(std::int64_t block) const { return block % across * columns; }
  std::int64_t Lines(std::int64_t block) const {
    return std::min(columns, p.inner - FirstLine(block));
  }
  template <class F>
  Piece<F> Chunk(std::int64_t block, std::int64_t chunk, bool store) const {
    const std::int64_t at = chunk * kScanChunk;
    const std::int64_t row = block / across * p.length + (p.reverse ? p.length - 1 - at : at);
    const std::int64_t first = row * p.inner + FirstLine(block);
    return {static_cast<const typename F::Element*>(p.x) + first,
            store ? static_cast<typename F::Out*>(p.out) + first : nullptr,
            p.reverse ? -p.inner : p.inner,
            std::min(kScanChunk, p.length - at),
            Lines(block),
            p.exclusive};
  }
};

// Scans a block from its beginning to its end.
template <class F>
void WalkBlock(const Blocks& blocks, std::int64_t block, const Stream& stream) {
  typename F::Wide totals[kMostColumns];
  const std::int64_t lines = blocks.Lines(block);
  if (blocks.chunks == 1) {
    std::fill_n(totals, lines, F::template Identity<typename F::Wide>());
    return ScanChunk(blocks.Chunk<F>(block, 0, /*store=*/true), totals);
  }
  ScanCarry<F> carries[kMostColumns];
  for (std::int64_t chunk = 0; chunk < blocks.chunks && !stream.stopped(); ++chunk) {
    for (std::int64_t c = 0; c < lines; ++c) totals[c] = carries[c].Base();
    ScanChunk(blocks.Chunk<F>(block, chunk, /*store=*/true), totals);
    for (std::int64_t c = 0; c < lines; ++c) carries[c].Add(totals[c]);
  }
}

template <class F>
void Run(const ScanProblem& p, Stream& stream) {
  using Wide = typename F::Wide;
  const Blocks blocks = {p};
  if (!blocks.Shared()) {
    const std::int64_t work = p.length * std::min(p.inner, blocks.columns);
    const std::int64_t each = std::max<std::int64_t>(1, kLeastWork / work);
#pragma omp parallel for schedule(dynamic, each) if (p.elements() > (1 << 16))
    for (std::int64_t block = 0; block < blocks.count; ++block)
      if (!stream.stopped()) WalkBlock<F>(blocks, block, stream);
    return;
  }
  // The totals of each chunk [outer, chunks, inner], and then the totals of the chunks before it.
  const std::int64_t all = blocks.count * blocks.chunks, rows = p.outer * blocks.chunks;
  auto* const totals =
      static_cast<Wide*>(stream.Scratch(static_cast<std::size_t>(rows * p.inner) * sizeof(Wide)));
  std::fill_n(totals, rows * p.inner, F::template Identity<Wide>());
  const auto scan = [&](bool store) {
#pragma omp parallel for schedule(dynamic, 1)
    for (std::int64_t i = 0; i < all; ++i) {
      const std::int64_t block = i / blocks.chunks, chunk = i % blocks.chunks;
      const std::int64_t row = block / blocks.across * blocks.chunks + chunk;
      if (!stream.stopped())
        ScanChunk(blocks.Chunk<F>(block, chunk, store),
                  totals + row * p.inner + blocks.FirstLine(block));
    }
  };
  scan(/*store=*/false);
  for (std::int64_t line = 0; line < p.outer * p.inner; ++line) {
    ScanCarry<F> carry;
    Wide* const of_line = totals + line / p.inner * blocks.chunks * p.inner + line % p.inner;
    for (std::int64_t chunk = 0; chunk < blocks.chunks; ++chunk) {
      Wide& value = of_line[chunk * p.inner];
      const Wide total = value;
      value = carry.Base();
      carry.Add(total);
    }
  }
  scan(/*store=*/true);
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
          // An element of a short row takes longer.
          const bool short_rows = p.inner == 1 && p.length < 32;
          return Cost{.bytes = ScanBytes(p) + n * SizeOf(p.dtype),
                      .flops = (short_rows ? 12 : 7) * n,
                      .atomics = 0,
                      .depth = static_cast<std::uint64_t>(std::min(p.length, kScanChunk))};
        },
    .launch =
        [](const ScanProblem& p, Stream& stream) {
          DispatchScan(p.op, p.dtype, [&]<class F>(std::type_identity<F>) { Run<F>(p, stream); });
        },
    .scratch =
        [](const ScanProblem& p) {
          // The same for any number of cores.
          const std::int64_t chunks = ScanChunks(p.length);
          const std::int64_t blocks = p.outer * ((p.inner + kMostColumns - 1) / kMostColumns);
          if (chunks == 1 || blocks >= kMostShared) return std::uint64_t{0};
          return static_cast<std::uint64_t>(p.outer * p.inner * chunks) * sizeof(double);
        },
};

}  // namespace tessera
