// Histogram with separate counters for each block, in shared memory.
//
// Compared with `global_atomics`, a block has separate counters, which it adds to the result once,
// at its end. An addition in shared memory does not leave the SM. A warp's additions to one counter
// are still serialized, and so are its additions to different counters in one bank. If there are
// few bins, the block has several copies of the counters, and lane l uses copy l mod copies:
//
//     counters   bin 0: copy 0, copy 1, ..., copy c-1   bin 1: copy 0, ...
//
// With 32 copies, every lane has a bank to itself, so a warp's additions never wait for each other,
// whatever their bins. There is memory for 32 copies of at most 384 bins. Runs of elements in the
// same bin, as in `global_atomics`, help where there are fewer copies.
//
// Cost at n = 2^20, f32, 256 bins: 4 MiB read; 128 blocks with 32 KiB of counters each, which add
// 2^15 sums to the result.
//
// The kernel is correct for any n and alignment, because CountRuns is. A 32-bit counter does not
// overflow, because a block has fewer elements. Problems whose counters do not fit in shared memory
// are refused.
#include <string>

#include "kernels/cuda/histogram/histogram.cuh"

namespace tessera {
namespace {

constexpr std::int64_t kMostCounters = 12288;  // 48 KiB, which every GPU offers to each block
constexpr std::int64_t kLeastElements = 16 * kHistogramThreads;

// Returns the number of copies: a power of 2.
int Copies(const HistogramProblem& p) {
  int copies = kWarpSize;
  while (copies > 1 && copies * p.bins > kMostCounters) copies /= 2;
  return copies;
}

// A block should count more elements than it adds counters to the result.
std::int64_t LeastOf(const HistogramProblem& p) { return std::max(kLeastElements, 2 * p.bins); }

template <class E, class Bins>
__global__ void __launch_bounds__(kHistogramThreads)
    CountPrivately(const E* x, std::int64_t n, Bins bins, int copies, Counter* counts) {
  extern __shared__ unsigned counters[];
  const int all = bins.bins * copies;
  for (int i = static_cast<int>(threadIdx.x); i < all; i += kHistogramThreads) counters[i] = 0;
  __syncthreads();  // the counters are 0
  unsigned* const own = counters + threadIdx.x % copies;
  CountRuns(x, n, bins,
            [&](std::int32_t bin, unsigned run) { atomicAdd(own + bin * copies, run); });
  __syncthreads();  // the counts of all threads have been stored
  for (int bin = static_cast<int>(threadIdx.x); bin < bins.bins; bin += kHistogramThreads) {
    unsigned sum = 0;
    // Each lane begins with a different copy, because a copy's counters may share a bank.
    for (int c = 0; c < copies; ++c)
      sum += counters[bin * copies + (c + static_cast<int>(threadIdx.x)) % copies];
    if (sum != 0) atomicAdd(counts + bin, Counter{sum});
  }
}

void Enqueue(const HistogramProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  cuda.Zero(p.counts, static_cast<std::size_t>(p.bins) * sizeof(Counter));
  const int copies = Copies(p);
  const auto shared = static_cast<std::size_t>(p.bins * copies) * sizeof(unsigned);
  DispatchBins(p, [&]<class E>(E, const auto& bins) {
    CountPrivately<<<HistogramGrid(p, LeastOf(p)), kHistogramThreads, shared, cuda.handle()>>>(
        static_cast<const E*>(p.x), p.n, bins, copies, CountersOf(p));
    CUDA_CHECK_LAUNCH(CountPrivately);
  });
}

}  // namespace

extern constexpr Strategy<HistogramProblem> kHistogramPrivatized = {
    .name = "privatized",
    .summary = "every block counts in shared memory, in several copies if there are few bins",
    .source =
        "Gomez-Luna, Gonzalez-Linares, Benavides and Guil, An Optimized Approach to Histogram "
        "Computation on GPU, 2013",
    .backend = Backend::kCuda,
    .dtypes = ArrayDTypes(),
    .deterministic = true,
    .roundoff = [](const HistogramProblem&) { return 0.0; },
    .cost =
        [](const HistogramProblem& p) {
          const std::uint64_t blocks = HistogramGrid(p, LeastOf(p));
          return HistogramCost(p, blocks, blocks, HistogramDepth(p, LeastOf(p)));
        },
    .launch = Enqueue,
    .refuses = [](const HistogramProblem& p) -> std::string {
      return p.bins <= kMostCounters ? "" : "at most 12288 bins";
    },
};

}  // namespace tessera
