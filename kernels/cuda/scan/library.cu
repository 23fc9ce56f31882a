// Scan with CUB, CUDA's library of building blocks: its single-pass scan with decoupled look-back.
//
// Elements are added in their own type, as CUB's documentation recommends, so a sum of floats has a
// larger error bound than in the other strategies. One call scans one row.
//
// Cost at n = 2^20, f32: 4 MiB read, 4 MiB written, two launches.
#include <algorithm>
#include <cub/device/device_scan.cuh>
#include <string>

#include "kernels/cuda/scan/scan.cuh"

namespace tessera {
namespace {

constexpr std::int64_t kMostRows = 64;

template <class F>
void Run(const ScanProblem& p, CudaStream& stream) {
  std::size_t bytes = 0;
  const auto scan = [&](void* workspace, std::int64_t row = 0) {
    const auto* x = static_cast<const typename F::Element*>(p.x) + row * p.length;
    auto* out = static_cast<typename F::Out*>(p.out) + row * p.length;
    CheckCuda(
        p.exclusive
            ? cub::DeviceScan::ExclusiveSum(workspace, bytes, x, out, p.length, stream.handle())
            : cub::DeviceScan::InclusiveSum(workspace, bytes, x, out, p.length, stream.handle()),
        "cub::DeviceScan");
  };
  scan(nullptr);  // gets the size of the workspace
  void* const workspace = stream.Scratch(std::max<std::size_t>(bytes, 1));
  for (std::int64_t row = 0; row < p.outer; ++row) scan(workspace, row);
}

void Enqueue(const ScanProblem& p, Stream& stream) {
  if (p.dtype == DType::kF32) {
    Run<Fold<ReduceOp::kSum, float>>(p, Cuda(stream));
  } else if (p.dtype == DType::kF64) {
    Run<Fold<ReduceOp::kSum, double>>(p, Cuda(stream));
  } else {
    Run<Fold<ReduceOp::kSum, std::int64_t>>(p, Cuda(stream));
  }
}

std::string Refuses(const ScanProblem& p) {
  if (p.op != ReduceOp::kSum || p.reverse) return "a forward sum";
  return p.inner == 1 && p.outer <= kMostRows ? "" : "at most 64 rows";
}

}  // namespace

extern constexpr Strategy<ScanProblem> kScanLibrary = {
    .name = "library",
    .summary = "CUB's device-wide scan, adding in the elements' type",
    .source = "NVIDIA CUB",
    .backend = Backend::kCuda,
    .dtypes = DTypesOf(DType::kF32, DType::kF64, DType::kI64),
    .roundoff =
        [](const ScanProblem& p) {
          return p.dtype == DType::kF32 ? static_cast<double>(p.length) * kRoundoffF32
                                        : ScanRoundoff(p, p.length);
        },
    .cost =
        [](const ScanProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.elements());
          return Cost{.bytes = ScanBytes(p), .flops = 2 * n, .atomics = 0, .depth = 64};
        },
    .launch = Enqueue,
    .refuses = Refuses,
    .vendor = true,
};

}  // namespace tessera
