// Add: one loop that OpenMP divides among the cores. It reads two arrays and writes one, with one
// addition per element, so memory bandwidth is the only limit.
//
// Cost at n = 2^20 (f32): 12 MiB moved, 2^20 flops.
#include "kernels/base/element.h"
#include "kernels/cpu/runtime/chunks.h"
#include "kernels/problem/strategy.h"

namespace tessera {
namespace {

template <class T>
void Run(const AddProblem& p, const Stream& stream) {
  const auto* a = static_cast<const T*>(p.a);
  const auto* b = static_cast<const T*>(p.b);
  auto* out = static_cast<T*>(p.out);
#pragma omp parallel for schedule(static) if (p.n > kChunk)
  for (std::int64_t begin = 0; begin < p.n; begin += kChunk) {
    if (stream.stopped()) continue;
    const std::int64_t end = std::min(p.n, begin + kChunk);
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i)
      out[i] = T(WrapAdd(ValueOf<T>(a[i]), ValueOf<T>(b[i])));
  }
}

}  // namespace

extern constexpr Strategy<AddProblem> kAddCpu = {
    .name = "cpu",
    .summary = "one vectorised loop on all cores",
    .source = "vector addition from the notes on hardware acceleration",
    .deterministic = true,
    .roundoff = [](const AddProblem& p) { return UnitRoundoff(p.dtype); },
    .cost =
        [](const AddProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.n);
          return Cost{.bytes = 3 * n * SizeOf(p.dtype), .flops = n, .depth = 1};
        },
    .launch =
        [](const AddProblem& p, Stream& stream) {
          DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, stream); });
        },
};

}  // namespace tessera
