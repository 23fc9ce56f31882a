// Histogram on all cores. The elements are divided into shares, each of which has its own
// counters, and the counters are added up at the end.
//
// With more bins there are fewer shares, so that all counters take at most 64 MiB, and adding them
// up takes a fraction of the time: 2^20 bins have 8 shares, and 2^23 bins have one, whose counters
// are the result. An addition waits for the previous addition to the same counter. A run of
// elements in the same bin is therefore added up in a register.
//
// Cost at n = 2^20, f32, 256 bins: 4 MiB read, and 16 sets of counters of 2 KiB.
#include <algorithm>

#include "kernels/cpu/runtime/chunks.h"
#include "kernels/same_bits/bins.h"

namespace tessera {
namespace {

constexpr std::int64_t kMostShares = 64, kMostCounters = std::int64_t{1} << 23;

std::int64_t Shares(const HistogramProblem& p) {
  const std::int64_t bins = std::max<std::int64_t>(1, p.bins);
  return std::clamp<std::int64_t>(std::min(p.n / std::max(kChunk, 4 * bins), kMostCounters / bins),
                                  1, kMostShares);
}

// Returns the bytes of the counters of all shares but the first, whose counters are the result.
std::uint64_t ScratchOf(const HistogramProblem& p) {
  return static_cast<std::uint64_t>((Shares(p) - 1) * p.bins) * sizeof(std::int64_t);
}

template <class E, class Bins>
void Count(const Stream& stream, const E* x, std::int64_t n, const Bins& bins,
           std::int64_t* counts) {
  std::int32_t last = kNoBin;
  std::int64_t run = 0;
  ForChunks(stream, n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int32_t bin = bins(x[i]);
      if (bin != last) {
        if (last >= 0) counts[last] += run;
        last = bin;
        run = 0;
      }
      ++run;
    }
  });
  if (last >= 0) counts[last] += run;
}

void Run(const HistogramProblem& p, Stream& stream) {
  const std::int64_t shares = Shares(p);
  auto* const others = static_cast<std::int64_t*>(stream.Scratch(ScratchOf(p)));
  const auto counters = [&](std::int64_t share) {
    return share == 0 ? p.counts : others + (share - 1) * p.bins;
  };
  DispatchBins(p, [&]<class E>(E, auto bins) {
    bins.Begin();
    const auto* x = static_cast<const E*>(p.x);
    const std::int64_t each = (p.n + shares - 1) / shares;
#pragma omp parallel for schedule(dynamic, 1) if (shares > 1)
    for (std::int64_t share = 0; share < shares; ++share) {
      const std::int64_t begin = std::min(p.n, share * each), end = std::min(p.n, begin + each);
      ForChunks(stream, p.bins, [own = counters(share)](std::int64_t first, std::int64_t last) {
        std::fill(own + first, own + last, 0);
      });
      Count(stream, x + begin, end - begin, bins, counters(share));
    }
  });
  if (shares == 1 || stream.stopped()) return;
  const std::int64_t chunks = Chunks(p.bins);
#pragma omp parallel for schedule(static) if (chunks > 1)
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const std::int64_t end = std::min(p.bins, (chunk + 1) * kChunk);
    for (std::int64_t share = 1; share < shares; ++share)
      for (std::int64_t bin = chunk * kChunk; bin < end; ++bin)
        p.counts[bin] += counters(share)[bin];
  }
}

}  // namespace

extern constexpr Strategy<HistogramProblem> kHistogramCpuParallel = {
    .name = "cpu_parallel",
    .summary = "each core counts a share in separate counters, which are added at the end",
    .source = "definition",
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const HistogramProblem&) { return 0.0; },
    .cost =
        [](const HistogramProblem& p) {
          const std::int64_t shares = Shares(p);
          return CpuHistogramCost(p, shares, static_cast<std::uint64_t>(2 * shares));
        },
    .launch = Run,
    .scratch = ScratchOf,
};

}  // namespace tessera
