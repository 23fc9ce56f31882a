// Every strategy of SearchSorted in the table, for every type, compared with std::lower_bound and
// std::upper_bound.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/run/operation.h"
#include "kernels/same_bits/convert.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

using Places = std::vector<std::int64_t>;

// Returns the cases of all strategies in these types, on all devices or on a GPU only.
std::vector<StrategyCase> SearchCases(DTypes dtypes, bool gpu) {
  std::vector<StrategyCase> cases;
  for (const Strategy<SearchSortedProblem>* strategy : Strategies<SearchSortedProblem>())
    for (DType dtype : kArrayDTypes)
      if (dtypes.Contains(dtype) && (!gpu || strategy->backend == Backend::kCuda))
        cases.push_back({strategy->name, strategy->backend, dtype});
  return cases;
}

// Whether a comes before b in NumPy's order.
template <class T>
bool Before(T a, T b) {
  const auto x = static_cast<ValueOf<T>>(a), y = static_cast<ValueOf<T>>(b);
  if (x != x) return false;
  return y != y || x < y;
}

class SearchSortedTest : public testing::TestWithParam<StrategyCase> {
 public:
  using Problem = SearchSortedProblem;

 protected:
  void SetUp() override { TESSERA_NEED_STRATEGY(SearchSortedProblem, GetParam()); }
  static Stream& stream() { return TestStream(GetParam().backend); }
  static const Strategy<SearchSortedProblem>& strategy() {
    return StrategyOf<SearchSortedProblem>(GetParam());
  }

  // Calls f(T{}), where T is the type of the elements. Elements of BOOL are bytes, 0 or 1.
  template <class F>
  void ForType(F f) const {
    DispatchElement(GetParam().dtype, [&]<class Own>(Own) {
      f(std::conditional_t<std::is_same_v<Own, bool>, std::uint8_t, Own>{});
    });
  }
  template <class T>
  static T Element(double value) {
    return ConvertElement<T>(GetParam().dtype == DType::kBool && value != 0 ? 1.0 : value);
  }

  // Returns whole numbers from -spread to spread and special values, in no order.
  template <class T>
  static std::vector<T> Elements(std::int64_t n, double spread, std::uint64_t seed) {
    std::vector<T> all(static_cast<std::size_t>(n));
    Random random(seed);
    for (T& element : all) {
      double value = std::floor((2 * random.Uniform() - 1) * spread);
      const std::uint64_t pick = random.Bits() % 64;
      if (pick == 0) value = std::numeric_limits<double>::infinity();
      if (pick == 1) value = -std::numeric_limits<double>::infinity();
      if (pick == 2) value = std::numeric_limits<double>::quiet_NaN();
      if (pick == 3) value = -0.0;
      element = Element<T>(value);
    }
    return all;
  }
  template <class T>
  static std::vector<T> Sorted(std::int64_t n, double spread, std::uint64_t seed) {
    std::vector<T> all = Elements<T>(n, spread, seed);
    std::stable_sort(all.begin(), all.end(), Before<T>);
    return all;
  }

  template <class T>
  static Places Want(const std::vector<T>& x, const std::vector<T>& keys, bool right) {
    Places places;
    for (const T key : keys) {
      const auto place = right ? std::upper_bound(x.begin(), x.end(), key, Before<T>)
                               : std::lower_bound(x.begin(), x.end(), key, Before<T>);
      places.push_back(place - x.begin());
    }
    return places;
  }

  static void Expect(const View& x, const View& keys, bool right, const Places& want,
                     Launch launch = {}) {
    const OperationSpec spec = SearchSortedSpec{.right = right};
    const ResultType type = Get(TypeOf(spec, {x, keys}));
    ASSERT_EQ(type.arrays.at(0).shape, keys.shape);
    EXPECT_EQ(type.arrays.at(0).dtype, DType::kI64);
    DeviceArray<std::int64_t> out(stream(), keys.elements());
    const auto run = tessera::Run(spec, stream(), {x, keys}, {out.data()},
                                  {.strategy = GetParam().name, .launch = launch});
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->stats.strategy, GetParam().name);
    EXPECT_EQ(run->stats.roundoff, 0);
    const Places got = out.Values();
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], want[i]) << "key " << i;
  }

  template <class T>
  static void Check(const std::vector<T>& sorted, const std::vector<T>& sought,
                    std::size_t offset = 0, Launch launch = {}) {
    SCOPED_TRACE(testing::Message() << sought.size() << " in " << sorted.size());
    DeviceArray<T> x(stream(), sorted, offset), keys(stream(), sought, offset / 2);
    const auto view = [](const DeviceArray<T>& array, const std::vector<T>& host) {
      return WholeView({GetParam().dtype, MakeShape({static_cast<std::int64_t>(host.size())})},
                       array.data());
    };
    for (bool right : {false, true})
      Expect(view(x, sorted), view(keys, sought), right, Want(sorted, sought, right), launch);
    x.ExpectUnchanged(sorted);
    keys.ExpectUnchanged(sought);
  }
};

// Lengths around the lengths of samples and around powers of two.
TEST_P(SearchSortedTest, EverySize) {
  ForType([]<class T>(T) {
    for (std::int64_t length : Sizes(
             {0, 1, 2, 3, 4, 5, 31, 64, 100, 2047, 2048, 2049, 4096, 4097, 6001, 70'000, 300'001}))
      for (std::int64_t n : Sizes({0, 1, 15, 16, 17, 1000, 70'001}))
        for (double spread : {3.0, 1e4, 1e9}) {
          if (n * length > 1'000'000'000) continue;
          Check(Sorted<T>(length, spread, 1), Elements<T>(n, spread, 2),
                static_cast<std::size_t>(n % 5));
        }
  });
}

// Each element is looked up, and the numbers next to it.
TEST_P(SearchSortedTest, EveryElement) {
  ForType([]<class T>(T) {
    for (std::int64_t length = 1; length < 70; ++length) {
      const std::vector<T> x = Sorted<T>(length, 20, static_cast<std::uint64_t>(length));
      std::vector<T> keys = x;
      for (const T element : x) {
        const auto value = static_cast<double>(static_cast<ValueOf<T>>(element));
        keys.push_back(Element<T>(value - 1));
        keys.push_back(Element<T>(value + 1));
      }
      Check(x, keys);
    }
  });
}

// Tests elements that are all equal, all NaN, or the ends of integer types.
TEST_P(SearchSortedTest, Ties) {
  ForType([]<class T>(T) {
    for (double value : {0.0, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
      const std::vector<T> x(5000, Element<T>(value));
      Check(x, Elements<T>(300, 3, 7));
    }
    if constexpr (std::is_integral_v<T>) {
      const std::vector<T> ends = {Element<T>(static_cast<double>(std::numeric_limits<T>::min())),
                                   0,
                                   Element<T>(static_cast<double>(std::numeric_limits<T>::max()))};
      Check(ends, ends);
    }
  });
}

TEST_P(SearchSortedTest, Launches) {
  ForType([]<class T>(T) {
    for (const Launch& launch : tessera::test::Launches(strategy().limits))
      Check(Sorted<T>(1000, 500, 3), Elements<T>(3333, 600, 4), 1, launch);
  });
}

TEST_P(SearchSortedTest, StridedViews) {
  ForType([]<class T>(T) {
    const std::vector<T> sorted = Sorted<T>(3000, 1000, 5), sought = Elements<T>(600, 1000, 6);
    const std::vector<T> falling(sorted.rbegin(), sorted.rend());
    const DeviceArray<T> x(stream(), falling), keys(stream(), sought);
    std::vector<T> some, turned;
    for (std::int64_t i = 0; i < 1000; ++i) some.push_back(At(sorted, 3 * i));
    for (std::int64_t i = 0; i < 20; ++i)
      for (std::int64_t j = 0; j < 30; ++j) turned.push_back(At(sought, j * 20 + i));
    const View in = StridedView(x.data() + 2999, GetParam().dtype, {1000}, {-3});
    const View what = StridedView(keys.data(), GetParam().dtype, {20, 30}, {1, 20});
    for (bool right : {false, true}) Expect(in, what, right, Want(some, turned, right));
  });
}

TEST_P(SearchSortedTest, RandomProblems) {
  ForType([]<class T>(T) {
    Random random(31);
    for (std::uint64_t i = 0; i < (WatchedClosely() ? 5 : 150); ++i) {
      const auto length = static_cast<std::int64_t>(random.Bits() % (i % 10 == 0 ? 100'000 : 5000));
      const auto n = static_cast<std::int64_t>(random.Bits() % 2000);
      const double spread = std::ldexp(1.0, static_cast<int>(random.Bits() % 30));
      Check(Sorted<T>(std::min(length, Largest()), spread, i), Elements<T>(n, spread, i + 1),
            random.Bits() % 16);
    }
  });
}

// Elements out of order give arbitrary positions, but nothing beyond the arrays is read.
TEST_P(SearchSortedTest, ElementsOutOfOrder) {
  ForType([]<class T>(T) {
    const std::vector<T> some = Elements<T>(5000, 100, 8);
    const DeviceArray<T> x(stream(), some);
    DeviceArray<std::int64_t> out(stream(), 5000);
    const View view = WholeView({GetParam().dtype, MakeShape({5000})}, x.data());
    const auto run = tessera::Run(SearchSortedSpec(), stream(), {view, view}, {out.data()},
                                  {.strategy = GetParam().name});
    ASSERT_TRUE(run.ok()) << run.status();
    for (std::int64_t place : out.Values()) ASSERT_TRUE(place >= 0 && place <= 5000) << place;
  });
}

class SearchSortedLargeTest : public SearchSortedTest {};

// Tests positions beyond 2^32.
TEST_P(SearchSortedLargeTest, LargeArrays) {
  if (Watched()) return;
  const std::int64_t n = (std::int64_t{1} << 32) + 12'345;
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(n), 5);
  At(bytes, 0) = 1;
  At(bytes, n - 1) = 9;
  const DeviceArray<std::uint8_t> x(stream(), bytes);
  const std::vector<std::uint8_t> sought = {0, 1, 5, 6, 9, 10};
  const DeviceArray<std::uint8_t> keys(stream(), sought);
  const View in = WholeView({DType::kU8, MakeShape({n})}, x.data());
  Expect(in, keys.view(), false, {0, 0, 1, n - 1, n - 1, n});
  Expect(in, keys.view(), true, {0, 1, n - 1, n - 1, n, n});
}

INSTANTIATE_TEST_SUITE_P(Strategies, SearchSortedTest,
                         testing::ValuesIn(SearchCases(ArrayDTypes(), false)), CaseName);
// A build without CUDA has no such case.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SearchSortedLargeTest);
INSTANTIATE_TEST_SUITE_P(Strategies, SearchSortedLargeTest,
                         testing::ValuesIn(SearchCases(DTypesOf(DType::kU8), true)), CaseName);

TEST(SearchSortedErrors, OperandsThatDoNotFit) {
  const auto reason = [](DType dtype, std::initializer_list<std::int64_t> x, DType of_keys,
                         std::initializer_list<std::int64_t> keys) {
    return ErrorReason(TypeOf(SearchSortedSpec(), {WholeView({dtype, MakeShape(x)}, nullptr),
                                                   WholeView({of_keys, MakeShape(keys)}, nullptr)})
                           .status());
  };
  for (DType dtype : kArrayDTypes) {
    EXPECT_EQ(reason(dtype, {3}, dtype, {2, 2}), "") << Name(dtype);
    EXPECT_EQ(reason(DType::kF32, {3}, dtype, {4}), dtype == DType::kF32 ? "" : "BAD_DTYPE")
        << Name(dtype);
  }
  EXPECT_EQ(reason(DType::kF32, {0}, DType::kF32, {}), "");
  for (const auto& x : {std::initializer_list<std::int64_t>{}, {1, 3}, {0, 0}})
    EXPECT_EQ(reason(DType::kF32, x, DType::kF32, {4}), "BAD_SHAPE");
}

}  // namespace
}  // namespace tessera::test
