// Divides an array into chunks of a fixed size for the parallel CPU strategies. Each chunk has one
// partial result, and these are combined in index order. The chunks depend only on n, so the bits
// do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/device/device.h"

namespace tessera {

// Elements per chunk. A chunk is large enough to hide the cost of handing out work (a few
// microseconds), and small enough to balance 2^20 elements over 16 threads. For f32 it is 256 KiB.
inline constexpr std::int64_t kChunk = std::int64_t{1} << 16;

constexpr std::int64_t Chunks(std::int64_t n) { return (n + kChunk - 1) / kChunk; }

// Calls partial(begin, end) -> P for each chunk, then combine(P, P) from left to right. Returns
// identity for n == 0. Skips chunks once the stream has been stopped.
template <class P, class Partial, class Combine>
P FoldChunks(const Stream& stream, std::int64_t n, P identity, const Partial& partial,
             const Combine& combine) {
  const std::int64_t chunks = Chunks(n);
  if (chunks == 0) return identity;
  if (chunks == 1) return partial(std::int64_t{0}, n);
  std::vector<P> partials(static_cast<std::size_t>(chunks), identity);
#pragma omp parallel for schedule(static)
  for (std::int64_t c = 0; c < chunks; ++c) {
    if (stream.stopped()) continue;
    partials[static_cast<std::size_t>(c)] = partial(c * kChunk, std::min(n, (c + 1) * kChunk));
  }
  P all = partials[0];
  for (std::size_t c = 1; c < partials.size(); ++c) all = combine(all, partials[c]);
  return all;
}

// Calls f(begin, end) for one chunk after the other, until the stream is stopped.
template <class F>
void ForChunks(const Stream& stream, std::int64_t n, const F& f) {
  for (std::int64_t begin = 0; begin < n && !stream.stopped(); begin += kChunk)
    f(begin, std::min(n, begin + kChunk));
}

}  // namespace tessera
