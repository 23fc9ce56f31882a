// Reduce on all cores: chunks of 2^16 elements that OpenMP divides among the cores, with eight
// independent accumulators per chunk. The chunks' values are combined in index order, so the bits
// are the same for any number of threads.
//
// Cost at n = 2^20 (f32 SUM): 4 MiB read, 2^20 flops, 16 partial values, depth 2^13 + 8 + 16.
#include "kernels/cpu/runtime/chunks.h"
#include "kernels/problem/strategy.h"
#include "kernels/same_bits/reduction.h"

namespace tessera {
namespace {

constexpr int kChains = 8;

template <ReduceOp op, class T>
void Run(const ReduceProblem& p, const Stream& stream) {
  using F = Fold<op, T>;
  using Wide = typename F::Wide;
  const auto* x = static_cast<const T*>(p.x);
  const auto partial = [x](std::int64_t begin, std::int64_t end) {
    Wide chain[kChains];
    for (Wide& c : chain) c = F::template Identity<Wide>();
    std::int64_t i = begin;
    for (; i + kChains <= end; i += kChains) {
#pragma omp simd
      for (int j = 0; j < kChains; ++j)
        chain[j] = F::Combine(chain[j], F::Widen(F::Load(x[i + j], i + j)));
    }
    Wide all = chain[0];
    for (int j = 1; j < kChains; ++j) all = F::Combine(all, chain[j]);
    for (; i < end; ++i) all = F::Combine(all, F::Widen(F::Load(x[i], i)));
    return all;
  };
  const Wide all = FoldChunks(stream, p.n, F::template Identity<Wide>(), partial,
                              [](Wide a, Wide b) { return F::Combine(a, b); });
  F::Finish(all, p.n, p.result);
}

std::uint64_t Depth(std::int64_t n) {
  return static_cast<std::uint64_t>(std::min(n, kChunk) / kChains + 2 * kChains + Chunks(n));
}

}  // namespace

extern constexpr Strategy<ReduceProblem> kReduceCpuParallel = {
    .name = "cpu_parallel",
    .summary = "chunks on all cores, eight double accumulators each, combined in order",
    .source = "OpenMP reduction from the notes on dot products in Metal, made deterministic",
    .deterministic = true,
    .roundoff =
        [](const ReduceProblem& p) {
          return ReduceRoundoff(p.op, p.dtype, p.n, {0, static_cast<std::int64_t>(Depth(p.n))});
        },
    .cost =
        [](const ReduceProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.n);
          return Cost{.bytes = n * SizeOf(p.dtype), .flops = n, .depth = Depth(p.n)};
        },
    .launch =
        [](const ReduceProblem& p, Stream& stream) {
          DispatchOp(p.op, [&](auto op) {
            DispatchDType(p.dtype, [&](auto t) { Run<op(), decltype(t)>(p, stream); });
          });
        },
};

}  // namespace tessera
