// Take on all cores. Rows whose elements are adjacent in x are copied with memcpy, so an index is
// read and checked once per row. Other elements are copied one by one.
//
// The cores share the rows of the result in chunks of about kChunk elements. Each chunk finds its
// first bad index, and the smallest of these is the result, whatever the order of the chunks. A row
// is copied in pieces of at most kChunk elements. Between two pieces, the strategy checks whether
// it has been stopped.
//
// Cost at 2^14 rows of 64 f32: 4 MiB read, 4 MiB written, 2^14 indices.
#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/cpu/runtime/chunks.h"
#include "kernels/problem/take.h"

namespace tessera {
namespace {

constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

template <class E, class I>
struct Rows {
  const TakeProblem& p;
  const Stream& stream;
  const E* x = static_cast<const E*>(p.x);
  const I* indices = static_cast<const I*>(p.indices);
  E* out = static_cast<E*>(p.out);

  // Copies the row for index j of outer index o. Returns the position of the first bad index, or
  // kNone.
  std::int64_t Copy(std::int64_t o, std::int64_t j) const {
    E* const to = out + (o * p.count + j) * p.inner;
    const E* const from = x + o * p.strides[0];
    if (p.along) return CopyAlong(from, (o * p.count + j) * p.inner, to);
    const std::int64_t index = ResolveIndex(indices[j], p.length, p.mode);
    if (index < 0) return j;
    const E* const row = from + index * p.strides[1];
    if (p.inner == 1) {
      *to = *row;
    } else if (p.strides[2] == 1) {
      ForChunks(stream, p.inner, [&](std::int64_t begin, std::int64_t end) {
        std::memcpy(to + begin, row + begin, static_cast<std::size_t>(end - begin) * sizeof(E));
      });
    } else {
      ForChunks(stream, p.inner, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) to[i] = row[i * p.strides[2]];
      });
    }
    return kNone;
  }

  std::int64_t CopyAlong(const E* from, std::int64_t first, E* to) const {
    std::int64_t bad = kNone;
    ForChunks(stream, p.inner, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t index = ResolveIndex(indices[first + i], p.length, p.mode);
        if (index >= 0) {
          to[i] = from[index * p.strides[1] + i * p.strides[2]];
        } else {
          bad = std::min(bad, first + i);
        }
      }
    });
    return bad;
  }
};

template <class E, class I>
void Run(const TakeProblem& p, const Stream& stream) {
  const Rows<E, I> rows = {p, stream};
  const std::int64_t all = p.outer * p.count;
  const std::int64_t each = std::max<std::int64_t>(1, kChunk / p.inner);
  const std::int64_t chunks = (all + each - 1) / each;
  std::int64_t bad = kNone;
#pragma omp parallel for schedule(dynamic, 1) reduction(min : bad) if (chunks > 1)
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (stream.stopped()) continue;
    const std::int64_t first = chunk * each, end = std::min(all, first + each);
    std::int64_t o = first / p.count, j = first % p.count;
    for (std::int64_t row = first; row < end; ++row) {
      bad = std::min(bad, rows.Copy(o, j));
      if (++j == p.count) {
        j = 0;
        ++o;
      }
    }
  }
  p.result->index = bad == kNone ? -1 : bad;
}

}  // namespace

extern constexpr Strategy<TakeProblem> kTakeCpuParallel = {
    .name = "cpu_parallel",
    .summary = "copies rows on all cores, with one copy per row if its elements are adjacent",
    .source = "definition",
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const TakeProblem&) { return 0.0; },
    .cost =
        [](const TakeProblem& p) {
          constexpr std::int64_t kLine = 64;
          return TakeCost(p, kLine,
                          static_cast<std::uint64_t>(
                              std::min(p.elements(), std::max<std::int64_t>(kChunk, p.inner))));
        },
    .launch =
        [](const TakeProblem& p, Stream& stream) {
          DispatchSize(p.dtype, [&]<class E>(E) {
            DispatchIndex(p, [&]<class I>(I) { Run<E, I>(p, stream); });
          });
        },
};

}  // namespace tessera
