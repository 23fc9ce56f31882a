// Histogram with CUB, NVIDIA's library of CUDA primitives.
//
// CUB's even bins exclude their upper edge, and CUB finds the bin of a floating-point number with
// one multiplication, without comparing the number with the edges. Its counts may therefore
// differ from the definition. For integers in bins of width 1 the two agree, and this strategy
// accepts only such problems. It refuses large numbers of bins, because each of CUB's blocks has
// counters for all of them.
//
// Cost at n = 2^20, i32, 256 bins: 4 MiB read.
#include <algorithm>
#include <cub/device/device_histogram.cuh>
#include <string>
#include <type_traits>

#include "kernels/cuda/histogram/histogram.cuh"

namespace tessera {
namespace {

constexpr std::int64_t kMost = 16384;  // bins

template <class E>
void Run(const HistogramProblem& p, CudaStream& stream) {
  // CUB has no counters for bool.
  using Sample = std::conditional_t<std::is_same_v<E, bool>, std::uint8_t, E>;
  std::size_t bytes = 0;
  const auto count = [&](void* workspace) {
    CheckCuda(cub::DeviceHistogram::HistogramEven(workspace, bytes, static_cast<const Sample*>(p.x),
                                                  CountersOf(p), static_cast<int>(p.bins) + 1,
                                                  std::int64_t{0}, p.bins, p.n, stream.handle()),
              "cub::DeviceHistogram");
  };
  count(nullptr);  // gets the size of the workspace
  count(stream.Scratch(std::max<std::size_t>(bytes, 1)));
}

void Enqueue(const HistogramProblem& p, Stream& stream) {
  CudaStream& cuda = Cuda(stream);
  DispatchElement(p.dtype, [&]<class E>(E) {
    if constexpr (std::is_integral_v<E>) Run<E>(p, cuda);
  });
}

}  // namespace

extern constexpr Strategy<HistogramProblem> kHistogramLibrary = {
    .name = "library",
    .summary = "CUB's histogram, for integers that are their own bins",
    .source = "NVIDIA CUB",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kBool, DType::kU8, DType::kI8, DType::kI32, DType::kI64),
    .deterministic = true,
    .roundoff = [](const HistogramProblem&) { return 0.0; },
    .cost = [](const HistogramProblem& p) { return HistogramCost(p, 1, 0, 64); },
    .launch = Enqueue,
    .refuses = [](const HistogramProblem& p) -> std::string {
      return p.kind == BinKind::kIntegers && p.bins <= kMost ? "" : "at most 16384 integers";
    },
    // Each of CUB's blocks has counters in the workspace: 256 of them for elements of one byte.
    .scratch = [](const HistogramProblem& p) -> std::uint64_t {
      const std::int64_t blocks = std::min<std::int64_t>(2048, CeilDiv(p.n, 512));
      return (std::uint64_t{1} << 16) +
             static_cast<std::uint64_t>(blocks * std::max<std::int64_t>(256, p.bins)) *
                 sizeof(Counter);
    },
    .vendor = true,
};

}  // namespace tessera
