#include "client/random_array.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numbers>

#include "kernels/base/element.h"

namespace tessera {
namespace {

// The output function of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
// generators", 2014.
std::uint64_t Mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

template <class Real>
struct Pair {
  Real first, second;
};

// Returns elements 2i and 2i + 1, from one 64-bit hash.
template <class Real>
Pair<Real> Draw(Distribution distribution, std::uint64_t seed, std::uint64_t i) {
  switch (distribution) {
    case Distribution::kOnes:
      return {1, 1};
    case Distribution::kZeros:
      return {0, 0};
    case Distribution::kNormal:
    case Distribution::kUniform:
      break;
  }
  constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15u;
  const std::uint64_t bits = Mix(Mix(seed) + (i + 1) * kGoldenRatio);
  if (distribution == Distribution::kUniform) {
    // Each number has 24 random bits. A float represents every multiple of 2^-24 below 1 exactly,
    // so none rounds up to 1.
    return {static_cast<Real>(bits >> 40) * Real{0x1p-24},
            static_cast<Real>(bits & 0xffffffu) * Real{0x1p-24}};
  }
  // Box and Muller, "A note on the generation of random normal deviates", 1958. Adding 0.5 keeps
  // the logarithm finite.
  const Real u = (static_cast<Real>(bits >> 32) + Real{0.5}) * Real{0x1p-32};
  const Real v = static_cast<Real>(bits & 0xffffffffu) * Real{0x1p-32};
  const Real radius = std::sqrt(Real{-2} * std::log(u));
  const Real angle = Real{2} * std::numbers::pi_v<Real> * v;
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

// Fills out[0, count) with the elements starting at `first`. `first` is even.
template <class T, class Real, class Convert>
void Fill(Distribution distribution, std::uint64_t seed, std::uint64_t first, std::size_t count,
          char* out, Convert convert) {
  for (std::size_t i = 0; i < count; i += 2) {
    const Pair<Real> pair = Draw<Real>(distribution, seed, (first + i) / 2);
    const T values[] = {static_cast<T>(convert(pair.first)), static_cast<T>(convert(pair.second))};
    std::memcpy(out + i * sizeof(T), values, i + 1 < count ? sizeof(values) : sizeof(T));
  }
}

}  // namespace

std::optional<Distribution> ParseDistribution(std::string_view name) {
  if (name == "normal") return Distribution::kNormal;
  if (name == "uniform") return Distribution::kUniform;
  if (name == "ones") return Distribution::kOnes;
  if (name == "zeros") return Distribution::kZeros;
  return std::nullopt;
}

Source RandomArray(Distribution distribution, DType dtype, std::uint64_t seed) {
  return [=](std::uint64_t offset, absl::Span<char> out) {
    const std::uint64_t first = offset / SizeOf(dtype);
    const std::size_t count = out.size() / SizeOf(dtype);
    const auto fill = [&]<class T, class Real>(T, Real, auto convert) {
      Fill<T, Real>(distribution, seed, first, count, out.data(), convert);
      return absl::OkStatus();
    };
    const bool constant =
        distribution == Distribution::kOnes || distribution == Distribution::kZeros;
    const auto integer = [constant](double x) { return std::llround(constant ? x : 100 * x); };
    switch (dtype) {
      case DType::kF32:
        return fill(float{}, float{}, [](float x) { return x; });
      case DType::kF64:
        return fill(double{}, double{}, [](double x) { return x; });
      case DType::kF16:
        return fill(Half{}, float{}, [](float x) { return Half(x); });
      case DType::kBF16:
        return fill(BFloat16{}, float{}, [](float x) { return BFloat16(x); });
      case DType::kI32:
        return fill(std::int32_t{}, double{}, integer);
      case DType::kI64:
        return fill(std::int64_t{}, double{}, integer);
      case DType::kU8:
        return fill(std::uint8_t{}, double{},
                    [&](double x) { return std::min(std::llabs(integer(x)), 255LL); });
      case DType::kI8:
        return fill(std::int8_t{}, double{},
                    [&](double x) { return std::clamp(integer(x), -128LL, 127LL); });
      case DType::kBool:
        return fill(bool{}, float{}, [](float x) { return x > 0; });
    }
    return absl::OkStatus();
  };
}

}  // namespace tessera
