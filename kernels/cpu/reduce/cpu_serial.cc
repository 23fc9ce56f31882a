// The definition of Reduce: one loop over the elements, in order, with the operation's wide
// accumulator.
//
// Cost at n = 2^20 (f32 SUM): 4 MiB read, 2^20 flops in one dependent chain.
#include "kernels/cpu/runtime/chunks.h"
#include "kernels/problem/strategy.h"
#include "kernels/same_bits/reduction.h"

namespace tessera {
namespace {

template <ReduceOp op, class T>
void Run(const ReduceProblem& p, const Stream& stream) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  const auto* x = static_cast<const T*>(p.x);
  Wide all = F::template Identity<Wide>();
  ForChunks(stream, p.n, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) all = F::Combine(all, F::Widen(F::Load(x[i], i)));
  });
  F::Finish(all, p.n, p.result);
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceCpuSerial = {
    .name = "cpu_serial",
    .summary = "one loop in index order, double accumulator: the definition",
    .source = "definition",
    .deterministic = true,
    .roundoff =
        [](const ReduceProblem& p) {
          return ReduceRoundoff(p.op, p.dtype, p.n, {0, p.n});
        },
    .cost =
        [](const ReduceProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.n);
          return Cost{.bytes = n * SizeOf(p.dtype), .flops = n, .depth = n};
        },
    .launch =
        [](const ReduceProblem& p, Stream& stream) {
          DispatchOp(p.op, [&](auto op) {
            DispatchDType(p.dtype, [&](auto t) { Run<op(), decltype(t)>(p, stream); });
          });
        },
};

}  // namespace tessera
