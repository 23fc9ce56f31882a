// Scan as it is defined: one core takes one line after the other, and each line from its first
// element to its last.
//
// Cost at n = 2^20 (f32): 4 MiB read, 4 MiB written, 2^20 additions that wait for each other.
#include "kernels/device/device.h"
#include "kernels/same_bits/fixed_scan.h"

namespace tessera {
namespace {

// Number of elements between two checks of Stream::stopped().
constexpr std::int64_t kLook = std::int64_t{1} << 16;

template <class F>
void Run(const ScanProblem& p, const Stream& stream) {
  using T = typename F::Element;
  const auto* x = static_cast<const T*>(p.x);
  auto* out = static_cast<typename F::Out*>(p.out);
  for (std::int64_t line = 0; line < p.outer * p.inner; ++line) {
    const std::int64_t first = line / p.inner * p.length * p.inner + line % p.inner;
    auto sum = F::template Identity<typename F::Wide>();
    for (std::int64_t i = 0; i < p.length; ++i) {
      if (i % kLook == 0 && stream.stopped()) return;
      const std::int64_t at = first + (p.reverse ? p.length - 1 - i : i) * p.inner;
      const auto next = F::Combine(sum, F::Widen(F::Load(x[at], i)));
      out[at] = F::FinishAxis(p.exclusive ? sum : next, 1);
      sum = next;
    }
  }
}

}  // namespace

extern constexpr Strategy<ScanProblem> kScanCpuSerial = {
    .name = "cpu_serial",
    .summary = "one element after the other on one core",
    .source = "definition",
    .deterministic = true,
    .roundoff = [](const ScanProblem& p) { return ScanRoundoff(p, p.length); },
    .cost =
        [](const ScanProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.elements());
          return Cost{.bytes = ScanBytes(p), .flops = n, .atomics = 0, .depth = n};
        },
    .launch =
        [](const ScanProblem& p, Stream& stream) {
          DispatchScan(p.op, p.dtype, [&]<class F>(std::type_identity<F>) { Run<F>(p, stream); });
        },
};

}  // namespace tessera
