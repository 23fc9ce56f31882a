// Every strategy of SumByLabel in the table, for every type, compared with exact sums and, for the
// strategies that promise it, with the documented order of the additions, stated a second time.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#include "kernels/run/operation.h"
#include "kernels/same_bits/convert.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

using Window = StridedWindow;
using Extents = std::vector<std::int64_t>;

// Returns the row to which NumPy would add, or nothing.
std::optional<std::int64_t> RowOf(std::int64_t label, std::int64_t length, TakeMode mode) {
  __extension__ typedef __int128 Wide;
  const Wide wide = label, extent = length;
  if (mode == TakeMode::kWrap) return static_cast<std::int64_t>((wide % extent + extent) % extent);
  if (mode == TakeMode::kClip) return wide < 0 ? 0 : wide >= extent ? length - 1 : label;
  if (wide < -extent || wide >= extent) return std::nullopt;
  return static_cast<std::int64_t>(wide < 0 ? wide + extent : wide);
}

// The accumulator and the result of the sums of elements T.
template <class T>
using Accumulator = std::conditional_t<std::is_integral_v<T>, std::uint64_t, double>;
template <class T>
using Result = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>;

// Adds 64 terms at a time, then 64 of these sums at a time, and then what is left.
template <class A>
A InOrder(const std::vector<A>& terms) {
  const auto by_64 = [](const std::vector<A>& from) {
    std::vector<A> sums;
    for (std::size_t i = 0; i < from.size(); ++i) {
      if (i % 64 == 0) sums.push_back(0);
      sums.back() += from[i];
    }
    return sums;
  };
  const std::vector<A> groups = by_64(by_64(terms));
  return std::accumulate(groups.begin(), groups.end(), A{0});
}

class SumByLabelTest : public StrategyTest<SumByLabelProblem> {
 protected:
  // Calls f(T{}), where T is the type of the elements. Elements of BOOL are bytes, 0 or 1.
  template <class F>
  void ForElement(F f) const {
    DispatchElement(GetParam().dtype, [&]<class Own>(Own) {
      f(std::conditional_t<std::is_same_v<Own, bool>, std::uint8_t, Own>{});
    });
  }

  template <class T>
  static std::vector<T> Elements(std::int64_t n, std::uint64_t seed = 1) {
    std::vector<T> all(static_cast<std::size_t>(n));
    Random random(seed);
    for (T& element : all) {
      if constexpr (std::is_integral_v<T>) {
        element = static_cast<T>(random.Bits());
        if (GetParam().dtype == DType::kBool) element &= 1;
      } else {
        element = Element<T>(random.Normal());
      }
    }
    return all;
  }

  // Returns labels that are valid in every mode, or, unless the mode is kError, any labels.
  template <class I>
  static std::vector<I> Labels(std::int64_t n, std::int64_t length, TakeMode mode,
                               std::uint64_t seed = 2) {
    std::vector<I> all(static_cast<std::size_t>(n));
    Random random(seed);
    for (I& label : all) {
      label = static_cast<I>(random.Below(2 * length) - length);
      if (mode != TakeMode::kError && random.Bits() % 4 == 0) label = static_cast<I>(random.Bits());
    }
    return all;
  }

  // Sums, and checks the sums or the error.
  template <class T, class I>
  static void Check(const std::vector<T>& host, const Window& of, const std::vector<I>& labels,
                    const Window& at, std::int64_t length, TakeMode mode = TakeMode::kError,
                    std::size_t offset = 0, Launch launch = {}) {
    SCOPED_TRACE(testing::Message() << "x " << testing::PrintToString(of.shape) << " by "
                                    << testing::PrintToString(of.strides) << " to " << length
                                    << " rows " << Name(mode) << " offset " << offset);
    DeviceArray<T> x(stream(), host, offset);
    DeviceArray<I> places(stream(), labels, offset % 2);
    const View view = of.Of(x.data(), GetParam().dtype), where = at.Of(places.data(), DTypeOf<I>());
    const OperationSpec spec = SumByLabelSpec{.length = length, .mode = mode};
    const ResultType type = Get(TypeOf(spec, {view, where}));
    ASSERT_EQ(type.arrays.size(), 1u);
    Extents shape = of.shape;
    shape[0] = length;
    const Shape& got_shape = type.arrays[0].shape;
    EXPECT_EQ(Extents(got_shape.dims.begin(), got_shape.dims.begin() + got_shape.rank), shape);
    EXPECT_EQ(type.arrays[0].dtype, DTypeOf<Result<T>>());
    DeviceArray<Result<T>> out(stream(), got_shape.elements());
    const auto run = tessera::Run(spec, stream(), {view, where}, {out.data()}, options(launch));
    x.ExpectUnchanged(host);
    places.ExpectUnchanged(labels);

    const std::int64_t rows = of.shape[0];
    const std::int64_t inner = rows == 0 ? 0 : view.elements() / rows;
    std::vector<std::vector<Accumulator<T>>> terms(static_cast<std::size_t>(got_shape.elements()));
    for (std::int64_t i = 0; i < rows * std::min<std::int64_t>(inner, 1); ++i) {
      const std::int64_t label = At(labels, PlaceIn(at, i));
      const std::optional<std::int64_t> row = RowOf(label, length, mode);
      if (!row.has_value()) return ExpectBad(run.status(), i, label);
      for (std::int64_t c = 0; c < inner; ++c)
        At(terms, *row * inner + c)
            .push_back(static_cast<Accumulator<T>>(
                static_cast<ValueOf<T>>(At(host, PlaceIn(of, i * inner + c)))));
    }
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->stats.strategy, GetParam().name);
    const std::vector<Result<T>> got = out.Values();
    ASSERT_EQ(got.size(), terms.size());
    for (std::size_t i = 0; i < got.size(); ++i) CheckSum<T>(got[i], terms[i], run->stats.roundoff);
  }

  template <class T>
  static void CheckSum(Result<T> got, const std::vector<Accumulator<T>>& terms, double roundoff) {
    const Accumulator<T> sum = InOrder(terms);
    if constexpr (std::is_integral_v<T>) {
      ASSERT_EQ(got, static_cast<std::int64_t>(sum));
    } else {
      const auto want = ConvertElement<T>(sum == sum ? sum : std::nan(""));
      if (strategy().deterministic) {
        ASSERT_EQ(std::memcmp(&got, &want, sizeof got), 0)
            << static_cast<double>(Exact(got)) << " is not " << static_cast<double>(Exact(want))
            << " of " << terms.size();
      }
      long double exact = 0, magnitude = 0;
      for (double term : terms) {
        exact += term;
        magnitude += std::abs(term);
      }
      if (!std::isfinite(exact) || !std::isfinite(Exact(want))) return;
      const long double tiny = sizeof(T) == 2 ? 0x1p-25L : 0;
      ASSERT_LE(std::abs(Exact(got) - exact),
                roundoff * magnitude + UnitRoundoff(DTypeOf<T>()) * std::abs(exact) + tiny);
    }
  }

  static void ExpectBad(const absl::Status& status, std::int64_t position, std::int64_t value) {
    EXPECT_EQ(ErrorReason(status), "BAD_INDEX") << status;
    EXPECT_EQ(ErrorMetadata(status)["position"], absl::StrCat(position));
    EXPECT_EQ(ErrorMetadata(status)["value"], absl::StrCat(value));
  }

  // Sums rows without gaps.
  template <class T, class I = std::int64_t>
  static void CheckShape(std::int64_t n, std::int64_t inner, std::int64_t length,
                         TakeMode mode = TakeMode::kError, std::size_t offset = 0,
                         Launch launch = {}) {
    Check(Elements<T>(n * inner), Whole({n, inner}), Labels<I>(n, length, mode), Whole({n}), length,
          mode, offset, launch);
  }
};

// Numbers of terms around the size of a chunk and of a group, for one label and for a few; and
// lengths around the one at which labels get a wider type.
TEST_P(SumByLabelTest, EverySize) {
  ForElement([]<class T>(T) {
    for (std::int64_t n :
         Sizes({1, 2, 63, 64, 65, 127, 128, 1000, 4095, 4096, 4097, 8192, 20'000, 70'001}))
      for (std::int64_t length : {1, 2, 7, 500, 0x7f80, 0x7f81, 70'000})
        if (!WatchedClosely() || n * length < 5000)
          CheckShape<T, std::int32_t>(n, 1, length, TakeMode::kError,
                                      static_cast<std::size_t>(n % 5));
    for (std::int64_t inner : Sizes({2, 3, 31, 32, 511, 512, 513, 1100}))
      for (std::int64_t n : {1, 5, 65, 300}) CheckShape<T>(n, inner, 3);
    CheckShape<T>(std::min<std::int64_t>(Largest(), 9000), 5, 2);
  });
}

TEST_P(SumByLabelTest, Modes) {
  ForElement([]<class T>(T) {
    for (TakeMode mode : kAllTakeModes) {
      for (std::int64_t length : {1, 10, 1000}) {
        CheckShape<T>(777, 3, length, mode);
        CheckShape<T, std::int32_t>(3000, 1, length, mode, 1);
      }
    }
  });
}

// Tests labels that are all different, in no order and in order, and many more labels than rows.
TEST_P(SumByLabelTest, ManyLabels) {
  ForElement([]<class T>(T) {
    for (std::int64_t n : Sizes({5000, sizeof(T) == 4 ? 1'000'000 : 100'000})) {
      const auto x = Elements<T>(n);
      std::vector<std::int32_t> labels(static_cast<std::size_t>(n));
      std::iota(labels.begin(), labels.end(), 0);
      if (n == 5000) Check(x, Whole({n}), labels, Whole({n}), n);
      Random random(3);
      for (std::int64_t i = n - 1; i > 0; --i)
        std::swap(At(labels, i), At(labels, random.Below(i)));
      Check(x, Whole({n}), labels, Whole({n}), n);
    }
    CheckShape<T>(3, 2, 40'000);
  });
}

TEST_P(SumByLabelTest, StridedViews) {
  ForElement([]<class T>(T) {
    const auto x = Elements<T>(6000);
    const auto labels = Labels<std::int64_t>(6000, 4, TakeMode::kError);
    for (const Window& window : StridedWindows()) {
      const std::int64_t n = window.shape[0];
      for (const Window& at :
           {Whole({n}), Window{5999, {n}, {-2}}, Window{7, {n}, {0}}, Window{1, {n}, {5}}})
        Check(x, window, labels, at, 4, TakeMode::kError, 1);
    }
  });
}

TEST_P(SumByLabelTest, Launches) {
  ForElement([]<class T>(T) {
    for (const Launch& launch : tessera::test::Launches(limits()))
      for (std::int64_t inner : {1, 7}) CheckShape<T>(3333, inner, 10, TakeMode::kError, 1, launch);
  });
}

// The first of several bad labels is named, wherever they are.
TEST_P(SumByLabelTest, BadLabels) {
  ForElement([]<class T>(T) {
    const std::int64_t n = Watched() ? 500 : 20'000, length = 40;
    const auto x = Elements<T>(2 * n);
    for (std::int64_t value : {length, -length - 1, std::int64_t{INT32_MIN}, INT64_MAX}) {
      for (std::int64_t place : {std::int64_t{0}, n / 2, n - 1}) {
        auto labels = Labels<std::int64_t>(n, length, TakeMode::kError);
        At(labels, n - 1) = INT64_MIN;
        At(labels, place) = value;
        Check(x, Whole({n, 2}), labels, Whole({n}), length);
      }
    }
    // An error leaves no trace in the next result.
    CheckShape<T>(100, 1, length);
  });
}

TEST_P(SumByLabelTest, EmptyArrays) {
  ForElement([]<class T>(T) {
    const std::vector<std::int64_t> none, bad = {77, -77};
    Check(Elements<T>(0), Whole({0}), none, Whole({0}), 5);
    Check(Elements<T>(0), Whole({0, 3}), none, Whole({0}), 2);
    Check(Elements<T>(0), Whole({0}), none, Whole({0}), 0);
    Check(Elements<T>(0), Whole({2, 0}), bad, Whole({2}), 3);
    Check(Elements<T>(0), Whole({2, 0}), bad, Whole({2}), 0);
  });
}

// Tests sums that overflow their type, infinities, NaN, and zeros with a sign.
TEST_P(SumByLabelTest, SpecialValues) {
  ForElement([]<class T>(T) {
    if constexpr (FloatElement<T>) {
      std::vector<T> x;
      for (double value : {65504.0, 65504.0, -65504.0, kInfinity, 1.0, kInfinity, -kInfinity, -0.0,
                           -0.0, std::nan(""), 1.0, 0x1p-24})
        x.push_back(Element<T>(value));
      const std::vector<std::int32_t> labels = {0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5};
      Check(x, Whole({12}), labels, Whole({12}), 7);
    } else {
      const bool truth = GetParam().dtype == DType::kBool;
      const std::vector<T> x(100, truth ? T{1} : std::numeric_limits<T>::max());
      Check(x, Whole({100}), std::vector<std::int32_t>(100, 1), Whole({100}), 2);
    }
  });
}

TEST_P(SumByLabelTest, RandomProblems) {
  ForElement([]<class T>(T) {
    Random random(31);
    for (int i = 0; i < (WatchedClosely() ? 5 : 40); ++i) {
      const std::int64_t inner = 1 + random.Below(i % 2 == 0 ? 300 : 4);
      const std::int64_t length = 1 + random.Below(i % 3 == 0 ? 3 : 2000);
      CheckShape<T>(1 + random.Below(30'000 / inner), inner, length, kAllTakeModes[i % 3],
                    static_cast<std::size_t>(i % 7));
    }
  });
}

TESSERA_STRATEGIES(SumByLabelTest, kAny, kArrayDTypes);

TEST(SumByLabelErrors, OperandsThatDoNotFit) {
  const auto view = [](DType dtype, std::initializer_list<std::int64_t> shape) {
    return WholeView({dtype, MakeShape(shape)}, nullptr);
  };
  const auto reason = [](const View& x, const View& labels, std::int64_t length = 9) {
    return ErrorReason(TypeOf(SumByLabelSpec{.length = length}, {x, labels}).status());
  };
  const View x = view(DType::kF32, {3, 5}), labels = view(DType::kI64, {3});
  EXPECT_EQ(reason(x, labels), "");
  for (DType dtype : kArrayDTypes) {
    EXPECT_EQ(reason(view(dtype, {3, 5}), labels), "") << Name(dtype);
    const bool fits = dtype == DType::kI32 || dtype == DType::kI64;
    EXPECT_EQ(reason(x, view(dtype, {3})), fits ? "" : "BAD_DTYPE") << Name(dtype);
  }
  for (const auto& shape : {std::initializer_list<std::int64_t>{}, {4}, {3, 1}, {1}})
    EXPECT_EQ(reason(x, view(DType::kI64, shape)), "BAD_SHAPE");
  EXPECT_EQ(reason(view(DType::kF32, {}), view(DType::kI64, {})), "BAD_SHAPE");
  for (std::int64_t length : {std::int64_t{-1}, INT64_MIN, INT64_MAX})
    EXPECT_EQ(reason(x, labels, length), "BAD_SHAPE") << length;
  // Labels of no row.
  EXPECT_EQ(reason(x, labels, 0), "BAD_INDEX");
  EXPECT_EQ(reason(view(DType::kF32, {0, 5}), view(DType::kI64, {0}), 0), "");
}

}  // namespace
}  // namespace tessera::test
