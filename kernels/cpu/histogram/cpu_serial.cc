// Histogram as it is defined: one core looks for the bin of each element in turn.
//
// Cost at n = 2^20, f32: 4 MiB read.
#include <algorithm>

#include "kernels/cpu/runtime/chunks.h"
#include "kernels/same_bits/bins.h"

namespace tessera {
namespace {

void Run(const HistogramProblem& p, Stream& stream) {
  ForChunks(stream, p.bins, [&](std::int64_t begin, std::int64_t end) {
    std::fill(p.counts + begin, p.counts + end, 0);
  });
  DispatchBins(p, [&]<class E>(E, auto bins) {
    bins.Begin();
    const auto* x = static_cast<const E*>(p.x);
    ForChunks(stream, p.n, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        if (const std::int32_t bin = bins(x[i]); bin >= 0) ++p.counts[bin];
    });
  });
}

}  // namespace

extern constexpr Strategy<HistogramProblem> kHistogramCpuSerial = {
    .name = "cpu_serial",
    .summary = "one element after the other on one core",
    .source = "definition",
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const HistogramProblem&) { return 0.0; },
    .cost = [](const HistogramProblem& p) { return CpuHistogramCost(p, 1, 1); },
    .launch = Run,
};

}  // namespace tessera
