#include "kernels/bench/launches.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace tessera::bench {
namespace {

// Compiles a function for several kinds of processors; the loader picks one version.
// ThreadSanitizer does not support this: its runtime is not yet initialised when the loader picks.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define TESSERA_BEST_CLONE \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TESSERA_BEST_CLONE
#endif

// The number of bytes or words that a thread's loop processes at a time.
constexpr std::size_t kChunk = std::size_t{1} << 20;

TESSERA_BEST_CLONE std::uint64_t Mix(const std::uint64_t* words, std::size_t n) {
  std::uint64_t mix = 0;
  for (std::size_t i = 0; i < n; ++i) mix ^= words[i];
  return mix;
}

// Chains that fill eight 64-byte vectors hide the latency of an operation that runs on two units.
template <class T>
constexpr int kChains = 512 / sizeof(T);
constexpr int kSteps = 1 << 20;

template <class T>
inline __attribute__((always_inline)) T FmaChains(T factor) {
  T chain[kChains<T>];
  for (int j = 0; j < kChains<T>; ++j) chain[j] = static_cast<T>(j);
  for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 128
    for (int j = 0; j < kChains<T>; ++j) chain[j] = chain[j] * factor + factor;
  }
  T sum = 0;
  for (T value : chain) sum += value;
  return sum;
}

TESSERA_BEST_CLONE float FmaFloat(float factor) { return FmaChains(factor); }
TESSERA_BEST_CLONE double FmaDouble(double factor) { return FmaChains(factor); }

bool OnCuda(const Stream& stream) { return stream.device().info().backend == Backend::kCuda; }

}  // namespace

void LaunchRead(Stream& stream, const void* data, std::size_t bytes, void* sink) {
  if constexpr (kWithCuda)
    if (OnCuda(stream)) return LaunchReadCuda(stream, data, bytes, sink);
  const auto* words = static_cast<const std::uint64_t*>(data);
  const std::size_t n = bytes / sizeof *words;
  const auto chunks = static_cast<std::int64_t>((n + kChunk - 1) / kChunk);
  std::uint64_t mix = 0;
#pragma omp parallel for reduction(^ : mix) schedule(static)
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const std::size_t at = static_cast<std::size_t>(chunk) * kChunk;
    mix ^= Mix(words + at, std::min(kChunk, n - at));
  }
  std::memcpy(sink, &mix, sizeof mix);
}

void LaunchCopy(Stream& stream, void* to, const void* from, std::size_t bytes) {
  if constexpr (kWithCuda)
    if (OnCuda(stream)) return LaunchCopyCuda(stream, to, from, bytes);
  const auto chunks = static_cast<std::int64_t>((bytes + kChunk - 1) / kChunk);
#pragma omp parallel for schedule(static)
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const std::size_t at = static_cast<std::size_t>(chunk) * kChunk;
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at,
                std::min(kChunk, bytes - at));
  }
}

double LaunchFma(Stream& stream, bool double_precision, void* sink) {
  if constexpr (kWithCuda)
    if (OnCuda(stream)) return LaunchFmaCuda(stream, double_precision, sink);
  const int threads = stream.device().info().multiprocessors;
  double sum = 0;
#pragma omp parallel for reduction(+ : sum) num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread)
    sum += double_precision ? FmaDouble(0.5) : static_cast<double>(FmaFloat(0.5F));
  std::memcpy(sink, &sum, sizeof sum);
  return 2.0 * threads * (double_precision ? kChains<double> : kChains<float>)*kSteps;
}

}  // namespace tessera::bench
