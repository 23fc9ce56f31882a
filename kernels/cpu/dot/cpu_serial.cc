// The definition of Dot: one loop, one accumulator. It is the reference for the speed of every
// other strategy and, because its accumulator is a double, usually also for accuracy. A product of
// two floats is exact in a double, so the error of a sum of 2^28 products is below one float
// rounding of the sum of their magnitudes.
//
// Cost at n = 2^20 (f32): 8 MiB read, 2^21 flops, and a chain of 2^20 dependent additions. The
// adder's latency (4 cycles), rather than memory, is the limit.
#include "kernels/base/element.h"
#include "kernels/cpu/runtime/chunks.h"
#include "kernels/problem/strategy.h"

namespace tessera {
namespace {

template <class T>
void Run(const DotProblem& p, const Stream& stream) {
  const auto* a = static_cast<const T*>(p.a);
  const auto* b = static_cast<const T*>(p.b);
  WideOf<T> sum = 0;
  ForChunks(stream, p.n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) sum = WrapAdd(sum, Product(a[i], b[i]));
  });
  Finish(sum, p.result);
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotCpuSerial = {
    .name = "cpu_serial",
    .summary = "one loop, one double accumulator: the definition",
    .source = "definition",
    .deterministic = true,
    .roundoff =
        [](const DotProblem& p) {
          return SumRoundoff(p.dtype, {0, p.n + 1});
        },
    .cost =
        [](const DotProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.n);
          return Cost{.bytes = 2 * n * SizeOf(p.dtype), .flops = 2 * n, .depth = n};
        },
    .launch =
        [](const DotProblem& p, Stream& stream) {
          DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, stream); });
        },
};

}  // namespace tessera
