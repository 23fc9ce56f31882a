// Select on all cores: the cores count the mask in chunks, the counts are added up, and then each
// chunk knows where its elements go.
//
// A branch that depends on a random mask is mispredicted half of the time. A chunk therefore first
// lists the positions of its selected elements, in short parts: it stores every position at the end
// of the list, and extends the list only if the byte is not 0. Then it copies the elements at the
// listed positions.
//
// Cost at n = 2^20, f32, half of them selected: 1 MiB of mask, twice, and 4 MiB of x read, 2 MiB
// written.
#include <algorithm>
#include <array>
#include <vector>

#include "kernels/cpu/runtime/chunks.h"
#include "kernels/problem/select.h"
#include "kernels/problem/take.h"

namespace tessera {
namespace {

constexpr std::int64_t kPart = 4096;  // elements whose positions are listed at a time

// Calls f(chunk, begin, end) for every chunk, on all cores, until the stream is stopped.
template <class F>
void ForChunksTogether(const Stream& stream, std::int64_t n, const F& f) {
  const std::int64_t chunks = Chunks(n);
#pragma omp parallel for schedule(static) if (chunks > 1)
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (stream.stopped()) continue;
    f(static_cast<std::size_t>(chunk), chunk * kChunk, std::min(n, (chunk + 1) * kChunk));
  }
}

// Writes the results of the elements [begin, end), beginning at result `at`.
template <class E>
void Write(const SelectProblem& p, std::int64_t begin, std::int64_t end, std::int64_t at) {
  const auto* x = static_cast<const E*>(p.x);
  const auto* mask = static_cast<const std::uint8_t*>(p.mask);
  auto* values = static_cast<E*>(p.values);
  std::array<std::uint16_t, kPart> places;
  for (std::int64_t first = begin; first < end; first += kPart) {
    const std::int64_t length = std::min(kPart, end - first);
    std::size_t found = 0;
    for (std::int64_t i = 0; i < length; ++i) {
      places[found] = static_cast<std::uint16_t>(i);
      found += mask[first + i] != 0 ? 1 : 0;
    }
    if (p.wants_values)
      for (std::size_t j = 0; j < found; ++j)
        values[at + static_cast<std::int64_t>(j)] = x[first + places[j]];
    if (p.wants_indices)
      for (std::size_t j = 0; j < found; ++j)
        p.indices[at + static_cast<std::int64_t>(j)] = first + places[j];
    at += static_cast<std::int64_t>(found);
  }
}

template <class E>
void Run(const SelectProblem& p, const Stream& stream) {
  const auto* mask = static_cast<const std::uint8_t*>(p.mask);
  std::vector<std::int64_t> starts(static_cast<std::size_t>(Chunks(p.n)) + 1);
  ForChunksTogether(stream, p.n, [&](std::size_t chunk, std::int64_t begin, std::int64_t end) {
    std::int64_t count = 0;
    for (std::int64_t i = begin; i < end; ++i) count += mask[i] != 0 ? 1 : 0;
    starts[chunk + 1] = count;
  });
  for (std::size_t chunk = 1; chunk < starts.size(); ++chunk) starts[chunk] += starts[chunk - 1];
  // If the stream has been stopped, the results of a chunk without a count would overwrite others.
  if (stream.stopped()) return;
  ForChunksTogether(stream, p.n, [&](std::size_t chunk, std::int64_t begin, std::int64_t end) {
    Write<E>(p, begin, end, starts[chunk]);
  });
}

}  // namespace

extern constexpr Strategy<SelectProblem> kSelectCpuParallel = {
    .name = "cpu_parallel",
    .summary = "counts the mask in chunks on all cores, and then copies without branches",
    .source = "definition",
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const SelectProblem&) { return 0.0; },
    .cost =
        [](const SelectProblem& p) {
          return SelectCost(p, 2, 64, static_cast<std::uint64_t>(std::min(p.n, kChunk)));
        },
    .launch = [](const SelectProblem& p,
                 Stream& stream) { DispatchSize(p.dtype, [&]<class E>(E) { Run<E>(p, stream); }); },
};

}  // namespace tessera
