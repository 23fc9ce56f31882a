// OpenMP divides chunks of 2^16 elements among the cores, with eight independent accumulators per
// chunk, as in Reduce's strategy `cpu_parallel`.
#include "kernels/cpu/runtime/sum.h"

#include <algorithm>

#include "kernels/cpu/runtime/chunks.h"

namespace tessera {
namespace {

constexpr int kChains = 8;

template <class T>
WideOf<T> SumChunk(const T* x, std::int64_t begin, std::int64_t end) {
  WideOf<T> chain[kChains] = {};
  std::int64_t i = begin;
  for (; i + kChains <= end; i += kChains) {
#pragma omp simd
    for (int j = 0; j < kChains; ++j)
      chain[j] = WrapAdd(chain[j], static_cast<WideOf<T>>(x[i + j]));
  }
  WideOf<T> sum = 0;
  for (; i < end; ++i) sum = WrapAdd(sum, static_cast<WideOf<T>>(x[i]));
  for (WideOf<T> c : chain) sum = WrapAdd(sum, c);
  return sum;
}

}  // namespace

template <class T>
WideOf<T> ParallelSum(const T* x, std::int64_t n, const Stream& stream) {
  return FoldChunks(
      stream, n, WideOf<T>(0),
      [x](std::int64_t begin, std::int64_t end) { return SumChunk(x, begin, end); },
      WrapAdd<WideOf<T>>);
}

template double ParallelSum(const float*, std::int64_t, const Stream&);
template double ParallelSum(const double*, std::int64_t, const Stream&);
template std::int64_t ParallelSum(const std::int64_t*, std::int64_t, const Stream&);

std::int64_t ParallelSumDepth(std::int64_t n) {
  return std::min(n, kChunk) / kChains + 2 * kChains + Chunks(n);
}

}  // namespace tessera
