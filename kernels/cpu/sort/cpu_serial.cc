// Sort by merging, on one core, row after row.
//
// Short pieces of a row are sorted by the standard library. Adjacent pieces are then merged in
// pairs, and the merged pieces again, until the row is one piece. An element's index decides
// between equal keys, so the order is stable.
//
//     pieces   4 9 | 2 7 | 5 8 | 1 3
//     width 2  2 4 7 9   | 1 3 5 8
//     width 4  1 2 3 4 5 7 8 9
//
// Cost at n = 2^20 (f32): 2^20 * 20 comparisons; 8 passes over 16 MiB of keys with indices.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "kernels/device/device.h"
#include "kernels/problem/sort.h"

namespace tessera {
namespace {

// kPiece is the number of elements that the library sorts, and kLook the number of merged elements
// between two checks of Stream::stopped().
constexpr std::int64_t kPiece = std::int64_t{1} << 12, kLook = std::int64_t{1} << 16;

template <class Word>
struct Entry {
  Word key;
  std::int64_t index;

  bool operator<(const Entry& other) const {
    return key != other.key ? key < other.key : index < other.index;
  }
};

// Merges the sorted entries in[begin, middle) and in[middle, end) to out[begin, end).
template <class E>
void Merge(const E* in, std::int64_t begin, std::int64_t middle, std::int64_t end, E* out,
           const Stream& stream) {
  std::int64_t a = begin, b = middle;
  for (std::int64_t i = begin; i < end; ++i) {
    if (i % kLook == 0 && stream.stopped()) return;
    const bool first = b == end || (a < middle && in[a] < in[b]);
    out[i] = in[first ? a++ : b++];
  }
}

template <class Word>
void Run(const SortProblem& p, Stream& stream) {
  const SortKey<Word> key = MakeSortKey<Word>(p.dtype, p.descending);
  const auto bytes = static_cast<std::size_t>(p.n) * sizeof(Entry<Word>);
  auto* now = static_cast<Entry<Word>*>(stream.Scratch(bytes));
  auto* next = static_cast<Entry<Word>*>(stream.Scratch(bytes));
  for (std::int64_t row = 0; row < p.rows; ++row) {
    const std::int64_t first = row * p.n;
    const auto* x = static_cast<const Word*>(p.x) + first;
    for (std::int64_t begin = 0; begin < p.n; begin += kPiece) {
      if (stream.stopped()) return;
      const std::int64_t end = std::min(p.n, begin + kPiece);
      for (std::int64_t i = begin; i < end; ++i) now[i] = {key(x[i]), i};
      std::sort(now + begin, now + end);
    }
    for (std::int64_t width = kPiece; width < p.n; width *= 2) {
      for (std::int64_t begin = 0; begin < p.n && !stream.stopped(); begin += 2 * width)
        Merge(now, begin, std::min(p.n, begin + width), std::min(p.n, begin + 2 * width), next,
              stream);
      std::swap(now, next);
    }
    for (std::int64_t i = 0; i < p.n && !stream.stopped(); ++i) {
      if (p.wants_values) static_cast<Word*>(p.values)[first + i] = x[now[i].index];
      if (p.wants_indices) p.indices[first + i] = now[i].index;
    }
  }
}

}  // namespace

extern constexpr Strategy<SortProblem> kSortCpuSerial = {
    .name = "cpu_serial",
    .summary = "merge sort on one core",
    .source = "merge sort (von Neumann, 1945)",
    .deterministic = true,
    .roundoff = SortRoundoff,
    .cost =
        [](const SortProblem& p) {
          const auto n = static_cast<double>(p.elements());
          const double steps = n * (4 + 4 * std::log2(1 + static_cast<double>(p.n)));
          return Cost{.bytes = static_cast<std::uint64_t>(n) * SizeOf(p.dtype) + SortOutBytes(p),
                      .flops = static_cast<std::uint64_t>(steps),
                      .atomics = 0,
                      .depth = static_cast<std::uint64_t>(steps)};
        },
    .launch =
        [](const SortProblem& p, Stream& stream) {
          DispatchWord(p.dtype, [&](auto word) { Run<decltype(word)>(p, stream); });
        },
    .scratch =
        [](const SortProblem& p) {
          return 2 * static_cast<std::uint64_t>(p.n) * sizeof(Entry<std::uint64_t>);
        },
};

}  // namespace tessera
