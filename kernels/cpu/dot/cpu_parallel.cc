// Dot on all cores: chunks of 2^16 elements that OpenMP divides among the cores, with eight
// independent accumulators per chunk.
//
// Compared with cpu_serial, the eight chains hide the adder's latency and fill the vector
// registers, so each core uses its share of the memory bandwidth, and the cores together use all of
// it. Accumulators are double, as in cpu_serial. The memory latency hides the cost of the
// conversions.
//
// Cost at n = 2^20 (f32): 8 MiB read, 2^21 flops, 16 partial sums, depth 2^13 + 8 + 16.
#include "kernels/base/element.h"
#include "kernels/cpu/runtime/chunks.h"
#include "kernels/problem/strategy.h"

namespace tessera {
namespace {

constexpr int kChains = 8;

template <class T>
WideOf<T> DotChunk(const T* a, const T* b, std::int64_t begin, std::int64_t end) {
  WideOf<T> chain[kChains] = {};
  std::int64_t i = begin;
  for (; i + kChains <= end; i += kChains) {
#pragma omp simd
    for (int j = 0; j < kChains; ++j) chain[j] = WrapAdd(chain[j], Product(a[i + j], b[i + j]));
  }
  WideOf<T> sum = 0;
  for (; i < end; ++i) sum = WrapAdd(sum, Product(a[i], b[i]));
  for (WideOf<T> c : chain) sum = WrapAdd(sum, c);
  return sum;
}

template <class T>
void Run(const DotProblem& p, const Stream& stream) {
  const auto* a = static_cast<const T*>(p.a);
  const auto* b = static_cast<const T*>(p.b);
  const auto sum = FoldChunks(
      stream, p.n, WideOf<T>(0),
      [&](std::int64_t begin, std::int64_t end) { return DotChunk(a, b, begin, end); },
      WrapAdd<WideOf<T>>);
  Finish(sum, p.result);
}

std::uint64_t Depth(std::int64_t n) {
  return static_cast<std::uint64_t>(std::min(n, kChunk) / kChains + 2 * kChains + Chunks(n));
}

}  // namespace

extern constexpr Strategy<DotProblem> kDotCpuParallel = {
    .name = "cpu_parallel",
    .summary = "chunks on all cores, eight vectorised double accumulators each",
    .source = "OpenMP reduction from the notes on dot products in Metal, made deterministic",
    .deterministic = true,
    .roundoff =
        [](const DotProblem& p) {
          return SumRoundoff(p.dtype, {0, static_cast<std::int64_t>(Depth(p.n)) + 1});
        },
    .cost =
        [](const DotProblem& p) {
          const auto n = static_cast<std::uint64_t>(p.n);
          return Cost{.bytes = 2 * n * SizeOf(p.dtype), .flops = 2 * n, .depth = Depth(p.n)};
        },
    .launch =
        [](const DotProblem& p, Stream& stream) {
          DispatchDType(p.dtype, [&](auto t) { Run<decltype(t)>(p, stream); });
        },
};

}  // namespace tessera
