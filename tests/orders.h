// Rows of elements for Sort and TopK, and the order that both promise.
#pragma once

#include <array>
#include <numeric>

#include "tests/kernel_fixture.h"

namespace tessera::test {

enum class Values {
  kNormal,
  kUniformBits,  // every bit of an element is random
  kFew,          // five different values
  kEqual,        // all elements are equal
  kAscending,    // as far as the type can distinguish adjacent values
  kDescending,
  kSpecial,    // NaNs, infinities, zeros of both signs, subnormal numbers, the ends of the integers
  kMostlyNan,  // or, for integers, mostly the same value
  kZeros,      // only zeros, of both signs
  kOutliers,   // a few among many equal values
};
constexpr std::array kAllValues = {Values::kNormal,  Values::kUniformBits, Values::kFew,
                                   Values::kEqual,   Values::kAscending,   Values::kDescending,
                                   Values::kSpecial, Values::kMostlyNan,   Values::kZeros,
                                   Values::kOutliers};

template <class T>
using Bytes = std::array<unsigned char, sizeof(T)>;

template <class T>
T FromBits(std::uint64_t bits) {
  T element;
  std::memcpy(&element, &bits, sizeof element);
  return element;
}

// Returns a NaN of one of several patterns, of either sign.
template <class T>
T NanOf(std::uint64_t bits) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  auto raw = std::bit_cast<Bytes<T>>(Element<T>(bits % 2 != 0 ? nan : -nan));
  raw[0] |= static_cast<unsigned char>(bits >> 8);  // Bits of the fraction, in every type.
  return std::bit_cast<T>(raw);
}

template <class T>
T SpecialValue(Random& random) {
  const std::uint64_t choice = random.Bits() % 10;
  if constexpr (std::is_integral_v<T>) {
    using Limits = std::numeric_limits<T>;
    const std::array<T, 6> values = {Limits::min(),      Limits::max(),     0,
                                     static_cast<T>(-1), Limits::min() + 1, 1};
    return choice < values.size() ? values[choice] : Element<T>(random.Normal());
  } else {
    const std::array<double, 4> values = {kInfinity, -kInfinity, 0.0, -0.0};
    if (choice < values.size()) return Element<T>(values[choice]);
    if (choice < 6) return NanOf<T>(random.Bits());
    Bytes<T> raw{};  // A subnormal number of either sign.
    raw[0] = 1;
    raw[sizeof(T) - 1] = choice == 6 ? 0x80 : 0;
    return choice < 8 ? std::bit_cast<T>(raw) : Element<T>(random.Normal());
  }
}

template <class T>
std::vector<T> MakeValues(Values values, std::int64_t n, std::uint64_t seed) {
  Random random(seed);
  const auto element = [&](std::int64_t i) -> T {
    // f16 has few distinct values, so the elements rise in steps.
    const double step = static_cast<double>(i) / 16 - 1000;
    switch (values) {
      case Values::kUniformBits:
        return FromBits<T>(random.Bits());
      case Values::kSpecial:
        return SpecialValue<T>(random);
      case Values::kMostlyNan:
        if (random.Bits() % 8 == 0) return Element<T>(random.Normal());
        if constexpr (FloatElement<T>) return NanOf<T>(random.Bits());
        return Element<T>(1);
      case Values::kFew:
        return Element<T>(static_cast<double>(random.Bits() % 5));
      case Values::kEqual:
        return Element<T>(3);
      case Values::kZeros:
        return Element<T>(random.Bits() % 2 == 0 ? 0.0 : -0.0);
      case Values::kAscending:
        return Element<T>(step);
      case Values::kDescending:
        return Element<T>(-step);
      case Values::kOutliers:
        return Element<T>(random.Bits() % 500 == 0 ? random.Normal() : 0.5);
      case Values::kNormal:
        break;
    }
    return Element<T>(random.Normal());
  };
  std::vector<T> all;
  for (std::int64_t i = 0; i < n; ++i) all.push_back(element(i));
  return all;
}

// Returns the positions of the first k elements of the sorted row. Equal elements keep their order,
// and NaNs are above all numbers.
template <class T>
std::vector<std::int64_t> Sorted(const std::vector<T>& row, std::int64_t k, bool descending) {
  std::vector<std::int64_t> order(row.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](std::int64_t i, std::int64_t j) {
    const auto x = static_cast<ValueOf<T>>(At(row, i)), y = static_cast<ValueOf<T>>(At(row, j));
    const bool x_is_nan = x != x, y_is_nan = y != y;
    if (x_is_nan != y_is_nan) return x_is_nan == descending;
    return x == y || x_is_nan ? i < j : (x < y) != descending;
  };
  if (k < std::ssize(row)) std::nth_element(order.begin(), order.begin() + k, order.end(), before);
  std::sort(order.begin(), order.begin() + k, before);
  order.resize(static_cast<std::size_t>(k));
  return order;
}

// Expects the first k elements of each sorted line of x, whose element [0, ..., 0] is host[first].
// Results whose pointers are null are not checked.
template <class T>
void ExpectSorted(const std::vector<T>& host, const View& x, std::int64_t first, int axis,
                  std::int64_t k, bool descending, const std::vector<T>* values,
                  const std::vector<std::int64_t>* indices) {
  const Lines lines(x, axis);
  for (std::int64_t line = 0; k > 0 && line < lines.count(); ++line) {
    const std::vector<T> row = lines.Elements(host, first, line);
    const std::vector<std::int64_t> want = Sorted(row, k, descending);
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int64_t place = lines.Place(line, j, k), from = At(want, j);
      if (indices != nullptr) {
        ASSERT_EQ(At(*indices, place), from) << "row " << line << " element " << j;
      }
      if (values != nullptr) {
        ASSERT_EQ(std::bit_cast<Bytes<T>>(At(*values, place)),
                  std::bit_cast<Bytes<T>>(At(row, from)))
            << "row " << line << " element " << j;
      }
    }
  }
}

}  // namespace tessera::test
