// Histogram with atomic additions to the result, in device memory.
//
// A thread finds the bin of an element and adds 1 to the bin's counter. Atomics happen in the L2
// cache, which serves many addresses at a time, but the additions to one counter are serialized. If
// all elements are in a few bins, these additions therefore determine the time. A run of a thread's
// elements in the same bin is added at once, so sorted elements, or elements that are all the same,
// need few additions. Elements that alternate between a few bins are the worst case.
//
// Cost at n = 2^20, f32, 256 bins: 4 MiB read, up to 2^20 additions, 2^12 for each counter.
//
// The kernel is correct for any number of bins, because its counters are the result's, and for any
// n and alignment, because CountRuns is. The order of integer additions does not matter.
#include "kernels/cuda/histogram/histogram.cuh"

namespace tessera {
namespace {

constexpr std::int64_t kLeast = 16 * kHistogramThreads;  // minimum number of elements of a block

template <class E, class Bins>
__global__ void __launch_bounds__(kHistogramThreads)
    CountGlobally(const E* x, std::int64_t n, Bins bins, Counter* counts) {
  CountRuns(x, n, bins,
            [&](std::int32_t bin, unsigned run) { atomicAdd(counts + bin, Counter{run}); });
}

void Enqueue(const HistogramProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  cuda.Zero(p.counts, static_cast<std::size_t>(p.bins) * sizeof(Counter));
  DispatchBins(p, [&]<class E>(E, const auto& bins) {
    CountGlobally<<<HistogramGrid(p, kLeast), kHistogramThreads, 0, cuda.handle()>>>(
        static_cast<const E*>(p.x), p.n, bins, CountersOf(p));
    CUDA_CHECK_LAUNCH(CountGlobally);
  });
}

}  // namespace

extern constexpr Strategy<HistogramProblem> kHistogramGlobalAtomics = {
    .name = "global_atomics",
    .summary = "every thread adds to the counters of the result",
    .source = "definition",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const HistogramProblem&) { return 0.0; },
    .cost =
        [](const HistogramProblem& p) {
          const auto each = static_cast<std::uint64_t>(p.n / std::max<std::int64_t>(1, p.bins));
          return HistogramCost(p, 1, each, HistogramDepth(p, kLeast));
        },
    .launch = Enqueue,
};

}  // namespace tessera
