// Every strategy of Histogram in the table, for every type, compared with a search among the edges
// on the host. Many elements lie on edges or next to them.
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

using Counts = std::vector<std::int64_t>;

// Returns the cases of all strategies in these types, on all devices or on a GPU only.
std::vector<StrategyCase> HistogramCases(DTypes dtypes, bool gpu) {
  std::vector<StrategyCase> cases;
  for (const Strategy<HistogramProblem>* strategy : Strategies<HistogramProblem>())
    for (DType dtype : kArrayDTypes)
      if (strategy->dtypes.Contains(dtype) && dtypes.Contains(dtype) && !IsLeftOut(dtype) &&
          (!gpu || strategy->backend == Backend::kCuda))
        cases.push_back({strategy->name, strategy->backend, dtype});
  return cases;
}

// Returns the edges of bins of equal width as numpy.linspace computes them, rounded to the type E.
template <class E>
std::vector<double> EvenEdges(const HistogramSpec& spec) {
  std::vector<double> edges;
  const double step = (spec.high - spec.low) / static_cast<double>(spec.bins);
  for (std::int64_t i = 0; i <= spec.bins; ++i) {
    const volatile double product = static_cast<double>(i) * step;  // is never fused
    double edge = i == spec.bins ? spec.high : product + spec.low;
    if constexpr (!std::is_integral_v<E>)
      edge = static_cast<double>(static_cast<ValueOf<E>>(ConvertElement<E>(edge)));
    edges.push_back(edge);
  }
  return edges;
}

// Counts elements, which are converted to the type of the edges.
template <class E, class C>
Counts Count(const std::vector<E>& x, const std::vector<C>& edges) {
  Counts counts(edges.size() - 1);
  for (const E element : x) {
    const auto value = static_cast<C>(static_cast<ValueOf<E>>(element));
    if (counts.empty() || !(value >= edges.front() && value <= edges.back())) continue;
    const auto above = std::upper_bound(edges.begin(), edges.end(), value) - edges.begin();
    ++counts[std::min(static_cast<std::size_t>(above), counts.size()) - 1];
  }
  return counts;
}

class HistogramTest : public testing::TestWithParam<StrategyCase> {
 public:
  using Problem = HistogramProblem;

 protected:
  void SetUp() override { TESSERA_NEED_STRATEGY(HistogramProblem, GetParam()); }
  static Stream& stream() { return TestStream(GetParam().backend); }

  // Calls f(E{}), where E is the type of the elements. Elements of BOOL are bytes, 0 or 1.
  template <class F>
  void ForType(F f) const {
    DispatchElement(GetParam().dtype, [&]<class Own>(Own) {
      f(std::conditional_t<std::is_same_v<Own, bool>, std::uint8_t, Own>{});
    });
  }
  template <class E>
  static E Element(double value) {
    return ConvertElement<E>(GetParam().dtype == DType::kBool && value != 0 ? 1.0 : value);
  }

  // Returns elements on edges, next to them, between them and outside all bins, and special values.
  template <class E>
  static std::vector<E> Elements(std::int64_t n, const std::vector<double>& edges,
                                 std::uint64_t seed = 1) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    std::vector<E> all(static_cast<std::size_t>(n));
    Random random(seed);
    const double range = edges.back() - edges.front();
    for (E& element : all) {
      const std::uint64_t bits = random.Bits();
      const double edge = edges[bits / 16 % edges.size()];
      const double part = static_cast<double>(random.Bits() >> 11) * 0x1p-53;
      double value = edges.front() + range * (part * 1.2 - 0.1);
      if (bits % 16 < 4) value = edge;
      if (bits % 16 == 4) value = std::nextafter(edge, kInfinity);
      if (bits % 16 == 5) value = std::nextafter(edge, -kInfinity);
      if (bits % 16 == 6) value = edge + 1;
      if (bits % 256 == 7) value = kInfinity;
      if (bits % 256 == 23) value = -kInfinity;
      if (bits % 256 == 39) value = std::numeric_limits<double>::quiet_NaN();
      element = Element<E>(value);
    }
    return all;
  }

  // Runs the operation and expects these counts. Strategies may refuse bins that do not fit in
  // shared memory, and a vendor's strategy may refuse all bins but integers.
  static void Expect(const HistogramSpec& spec, std::vector<View> operands, const Counts& want) {
    const ResultType type = Get(TypeOf(OperationSpec(spec), operands));
    const auto bins = static_cast<std::int64_t>(want.size());
    ASSERT_EQ(type.arrays.at(0).shape, MakeShape({bins}));
    EXPECT_EQ(type.arrays.at(0).dtype, DType::kI64);
    DeviceArray<std::int64_t> counts(stream(), bins);
    const auto run = tessera::Run(OperationSpec(spec), stream(), operands, {counts.data()},
                                  {.strategy = GetParam().name});
    if (ErrorReason(run.status()) == "STRATEGY_UNSUPPORTED") {
      const bool vendor = StrategyOf<HistogramProblem>(GetParam()).vendor;
      EXPECT_TRUE(bins > 12'288 || (vendor && spec.kind != BinKind::kIntegers)) << run.status();
      return;
    }
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->stats.strategy, GetParam().name);
    EXPECT_EQ(run->stats.roundoff, 0);
    const Counts got = counts.Values();
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got[i], want[i]) << "bin " << i << " of " << bins;
  }

  // Counts elements of a vector whose first element has an offset from an aligned address.
  template <class E>
  static void Check(const HistogramSpec& spec, const std::vector<E>& host, const Counts& want,
                    std::size_t offset = 0) {
    SCOPED_TRACE(testing::Message() << host.size() << " elements in " << spec.bins << " bins from "
                                    << spec.low << " to " << spec.high << ", offset " << offset);
    DeviceArray<E> x(stream(), host, offset);
    const auto n = static_cast<std::int64_t>(host.size());
    Expect(spec, {WholeView({GetParam().dtype, MakeShape({n})}, x.data())}, want);
    x.ExpectUnchanged(host);
  }

  template <class E>
  static void CheckEven(std::int64_t n, const HistogramSpec& spec, std::uint64_t seed = 1) {
    const std::vector<double> edges = EvenEdges<E>(spec);
    const std::vector<E> x = Elements<E>(n, edges, seed);
    Check(spec, x, Count(x, edges), seed % 5);
  }

  template <class E, class C>
  static void CheckEdges(const std::vector<E>& host, const std::vector<C>& edges) {
    SCOPED_TRACE(testing::Message() << host.size() << " elements, " << edges.size() << " edges");
    DeviceArray<E> x(stream(), host);
    DeviceArray<C> device_edges(stream(), edges);
    const auto n = static_cast<std::int64_t>(host.size());
    Expect({.kind = BinKind::kEdges},
           {WholeView({GetParam().dtype, MakeShape({n})}, x.data()), device_edges.view()},
           Count(host, edges));
    device_edges.ExpectUnchanged(edges);
  }
};

constexpr HistogramSpec kRanges[] = {
    {.low = 0, .high = 1},          {.low = -3, .high = 7.25},
    {.low = 0, .high = 100},        {.low = 1000, .high = 1000.5},
    {.low = -1, .high = 1e-9},      {.low = 1e-40, .high = 3e-40},
    {.low = -1e30, .high = 1e30},   {.low = 0, .high = 0x1p-1002},
    {.low = -60000, .high = 60000}, {.low = -1e300, .high = 1.7e300},
    {.low = 0, .high = 0x1p-20}};

TEST_P(HistogramTest, EvenBins) {
  ForType([]<class E>(E) {
    for (HistogramSpec spec : kRanges) {
      for (std::int64_t bins : {1, 2, 3, 10, 256, 1000, 12'288, 12'289}) {
        spec.bins = bins;
        for (std::int64_t n : Sizes({0, 1, 100, 5000})) CheckEven<E>(n, spec);
      }
    }
  });
}

TEST_P(HistogramTest, EverySize) {
  ForType([]<class E>(E) {
    for (std::int64_t n : Sizes({1, 15, 16, 17, 511, 512, 513, 8191, 8192, 8193, 65'535, 65'536,
                                 65'537, 300'001, 1'100'003}))
      CheckEven<E>(n, {.bins = 100, .low = -50, .high = 50}, static_cast<std::uint64_t>(n));
  });
}

TEST_P(HistogramTest, ManyBins) {
  ForType([]<class E>(E) {
    if (WatchedClosely()) return;
    for (std::int64_t bins : {1 << 16, Watched() ? 1 << 17 : 1 << 20})
      CheckEven<E>(200'000, {.bins = bins, .low = -1000, .high = 1e6});
  });
}

// Each integer has its own bin.
TEST_P(HistogramTest, Integers) {
  ForType([]<class E>(E) {
    if constexpr (std::is_integral_v<E>) {
      for (std::int64_t bins : {1, 2, 128, 256, 1000, 4096, 16'384, 16'385, 1 << 20}) {
        std::vector<std::int64_t> edges;
        for (std::int64_t i = 0; i < bins; ++i) edges.push_back(i);
        for (std::int64_t n : Sizes({0, 1, 77, 10'001, 300'000})) {
          std::vector<E> x =
              Elements<E>(n, EvenEdges<E>({.bins = bins, .low = 0, .high = 1.0 * bins}));
          Counts want(static_cast<std::size_t>(bins));
          for (const E element : x)
            if (static_cast<std::int64_t>(element) >= 0 &&
                static_cast<std::int64_t>(element) < bins)
              ++At(want, static_cast<std::int64_t>(element));
          Check({.kind = BinKind::kIntegers, .bins = bins}, x, want,
                static_cast<std::size_t>(n % 7));
        }
      }
    }
  });
}

TEST_P(HistogramTest, Edges) {
  ForType([]<class E>(E) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const std::vector<std::vector<double>> all = {
        {1},
        {0, 1},
        {2, 2},
        {-kInfinity, kInfinity},
        {-kInfinity, -1, -1, -1, 0, 0.5, kInfinity},
        {-3, 0, 0, 5, 5},
        {-1e300, 1e-300, 1, 1.5, 2, 1e300},
        EvenEdges<double>({.bins = 1000, .low = -5, .high = 90})};
    std::vector<double> uneven = {-10};
    for (int i = 0; i < 3000; ++i) uneven.push_back(uneven.back() + (i % 7 == 0 ? 0 : 0.01 * i));
    for (std::int64_t n : Sizes({0, 3, 1000, 30'000})) {
      for (const std::vector<double>& edges : all)
        CheckEdges(Elements<E>(n, edges.size() == 2 ? std::vector<double>{-2, 2} : edges), edges);
      CheckEdges(Elements<E>(n, uneven), uneven);
    }
    if constexpr (std::is_integral_v<E>) {
      constexpr std::int64_t kTop = std::numeric_limits<std::int64_t>::max();
      const std::vector<std::int64_t> wide = {-kTop - 1, -5, -5, 0, 1, 7, 1 << 20, kTop - 1, kTop};
      std::vector<E> x = Elements<E>(3000, {-10, 0, 1, 10});
      x.push_back(Element<E>(static_cast<double>(std::numeric_limits<E>::max())));
      x.push_back(Element<E>(static_cast<double>(std::numeric_limits<E>::min())));
      CheckEdges(x, wide);
    }
  });
}

// Tests elements that are all in one bin, alternate between two bins, or are sorted.
TEST_P(HistogramTest, Distributions) {
  ForType([]<class E>(E) {
    const std::int64_t n = std::min<std::int64_t>(Largest(), 200'000);
    for (std::int64_t bins : {2, 300, 1000, 5000}) {
      const HistogramSpec spec{.bins = bins, .low = 0, .high = 2};
      std::vector<E> one(static_cast<std::size_t>(n), Element<E>(1.0)), two = one, sorted = one;
      for (std::int64_t i = 0; i < n; ++i) {
        if (i % 2 == 0) At(two, i) = Element<E>(0.0);
        At(sorted, i) = Element<E>(2.0 * static_cast<double>(i) / static_cast<double>(n));
      }
      for (const auto& x : {one, two, sorted}) Check(spec, x, Count(x, EvenEdges<E>(spec)));
    }
  });
}

TEST_P(HistogramTest, EveryAlignment) {
  ForType([]<class E>(E) {
    const HistogramSpec spec{.bins = 7, .low = 0, .high = 1};
    const std::vector<double> edges = EvenEdges<E>(spec);
    for (std::int64_t n : {1, 14, 40, 3000})
      for (std::size_t offset = 0; offset < 17; offset += WatchedClosely() ? 5 : 1) {
        const std::vector<E> x = Elements<E>(n, edges, offset);
        Check(spec, x, Count(x, edges), offset);
      }
  });
}

TEST_P(HistogramTest, StridedViews) {
  ForType([]<class E>(E) {
    const std::int64_t rows = 37, columns = 53, all = rows * columns;
    const HistogramSpec spec{.bins = 20, .low = -1, .high = 1};
    const std::vector<double> edges = EvenEdges<E>(spec);
    const std::vector<E> host = Elements<E>(all, edges);
    const DeviceArray<E> x(stream(), host);
    struct Walk {
      std::int64_t first, row, column;
    };
    for (const Walk& of : {Walk{0, 1, rows}, Walk{all - 1, -columns, -1}, Walk{5, 0, 2}}) {
      std::vector<E> seen;
      for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t j = 0; j < columns; ++j)
          seen.push_back(At(host, of.first + i * of.row + j * of.column));
      const View view =
          StridedView(x.data() + of.first, GetParam().dtype, {rows, columns}, {of.row, of.column});
      Expect(spec, {view}, Count(seen, edges));
      // The same edges in descending order, read backwards.
      const std::vector<double> falling(edges.rbegin(), edges.rend());
      const DeviceArray<double> device_edges(stream(), falling);
      const View backwards = StridedView(device_edges.data() + 20, DType::kF64, {21}, {-1});
      Expect({.kind = BinKind::kEdges}, {view, backwards}, Count(seen, edges));
    }
  });
}

TEST_P(HistogramTest, RandomProblems) {
  ForType([]<class E>(E) {
    Random random(31);
    for (std::uint64_t i = 0; i < (WatchedClosely() ? 5 : Watched() ? 40 : 200); ++i) {
      const double low = static_cast<double>(random.Bits() % 2000) / 16 - 60;
      const double range = std::ldexp(1.0 + static_cast<double>(random.Bits() % 1000) / 1000,
                                      static_cast<int>(random.Bits() % 24) - 12);
      const auto bins = static_cast<std::int64_t>(1 + random.Bits() % (i % 4 == 0 ? 20'000 : 300));
      const auto n = static_cast<std::int64_t>(random.Bits() % (i % 10 == 0 ? 100'000 : 3000));
      CheckEven<E>(std::min(n, Largest()), {.bins = bins, .low = low, .high = low + range}, i);
    }
  });
}

// Edges out of order give arbitrary counts, but nothing beyond the arrays is read or written.
TEST_P(HistogramTest, EdgesOutOfOrder) {
  ForType([]<class E>(E) {
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    for (const std::vector<double>& edges :
         {std::vector<double>{3, 1, 2, 0}, {kNan, 0, 1}, {0, 1, kNan}, {0, kNan, 1, 5}, {kNan}}) {
      const std::vector<E> host = Elements<E>(3000, {0, 1, 2, 3});
      DeviceArray<E> x(stream(), host);
      DeviceArray<double> device_edges(stream(), edges);
      const auto bins = static_cast<std::int64_t>(edges.size()) - 1;
      DeviceArray<std::int64_t> counts(stream(), bins);
      const auto run = tessera::Run(
          HistogramSpec{.kind = BinKind::kEdges}, stream(),
          {WholeView({GetParam().dtype, MakeShape({3000})}, x.data()), device_edges.view()},
          {counts.data()}, {.strategy = GetParam().name});
      if (ErrorReason(run.status()) == "STRATEGY_UNSUPPORTED") continue;
      ASSERT_TRUE(run.ok()) << run.status();
      std::int64_t all = 0;
      for (std::int64_t count : counts.Values()) {
        EXPECT_GE(count, 0);
        all += count;
      }
      EXPECT_LE(all, 3000);
    }
  });
}

class HistogramLargeTest : public HistogramTest {};

// There are more elements than a 32-bit counter can count.
TEST_P(HistogramLargeTest, LargeArrays) {
  if (Watched()) return;
  const std::int64_t n = (std::int64_t{1} << 32) + 12'345;
  DeviceArray<std::uint8_t> x(stream(), std::vector<std::uint8_t>(static_cast<std::size_t>(n), 1));
  for (std::int64_t place : {std::int64_t{0}, std::int64_t{1} << 31, n - 1}) {
    const std::uint8_t three = 3;
    ASSERT_TRUE(CopyToDevice(stream(), x.data() + place, &three, 1).ok());
  }
  const View view = WholeView({DType::kU8, MakeShape({n})}, x.data());
  Expect({.kind = BinKind::kIntegers, .bins = 4}, {view}, {0, n - 3, 0, 3});
  Expect({.bins = 2, .low = 0, .high = 4}, {view}, {n - 3, 3});
}

INSTANTIATE_TEST_SUITE_P(Strategies, HistogramTest,
                         testing::ValuesIn(HistogramCases(ArrayDTypes(), false)), CaseName);
// A build without CUDA has no such case.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(HistogramLargeTest);
INSTANTIATE_TEST_SUITE_P(Strategies, HistogramLargeTest,
                         testing::ValuesIn(HistogramCases(DTypesOf(DType::kU8), true)), CaseName);

TEST(HistogramErrors, Bins) {
  const auto reason = [](const HistogramSpec& spec, DType dtype, DType edge_dtype = DType::kF64,
                         std::initializer_list<std::int64_t> edges = {3}) {
    return ErrorReason(
        TypeOf(OperationSpec(spec), {WholeView({dtype, MakeShape({2, 3})}, nullptr),
                                     WholeView({edge_dtype, MakeShape(edges)}, nullptr)})
            .status());
  };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (DType dtype : kArrayDTypes) {
    const bool integers = IsInteger(dtype) || dtype == DType::kBool;
    EXPECT_EQ(reason({.bins = 1}, dtype), "") << Name(dtype);
    EXPECT_EQ(reason({.kind = BinKind::kIntegers, .bins = 1}, dtype), integers ? "" : "BAD_DTYPE")
        << Name(dtype);
    EXPECT_EQ(reason({.kind = BinKind::kEdges}, dtype), "") << Name(dtype);
    EXPECT_EQ(reason({.kind = BinKind::kEdges}, dtype, DType::kI64), integers ? "" : "BAD_DTYPE")
        << Name(dtype);
    EXPECT_EQ(reason({.kind = BinKind::kEdges}, DType::kI64, dtype),
              dtype == DType::kF64 || dtype == DType::kI64 ? "" : "BAD_DTYPE")
        << Name(dtype);
  }
  for (std::int64_t bins : {std::int64_t{0}, std::int64_t{-1}, kMostBins + 1,
                            std::numeric_limits<std::int64_t>::min()}) {
    EXPECT_EQ(reason({.bins = bins}, DType::kI32), "BAD_BINS") << bins;
    EXPECT_EQ(reason({.kind = BinKind::kIntegers, .bins = bins}, DType::kI32), "BAD_BINS") << bins;
  }
  struct Range {
    double low, high;
  };
  for (const Range& range :
       {Range{0, 0}, Range{1, 0}, Range{0, kNan}, Range{kNan, 0}, Range{-kInfinity, 0},
        Range{0, kInfinity}, Range{-1.7e308, 1.7e308}, Range{0, 5e-324}})
    EXPECT_EQ(reason({.bins = 3, .low = range.low, .high = range.high}, DType::kF64), "BAD_BINS")
        << range.low << ' ' << range.high;
  const HistogramSpec edges{.kind = BinKind::kEdges};
  EXPECT_EQ(reason(edges, DType::kF32, DType::kF64, {}), "BAD_SHAPE");
  EXPECT_EQ(reason(edges, DType::kF32, DType::kF64, {2, 2}), "BAD_SHAPE");
  EXPECT_EQ(reason(edges, DType::kF32, DType::kF64, {0}), "BAD_BINS");
  EXPECT_EQ(reason(edges, DType::kF32, DType::kF64, {1}), "");
  EXPECT_EQ(reason(edges, DType::kF32, DType::kF64, {kMostBins + 2}), "BAD_BINS");
}

}  // namespace
}  // namespace tessera::test
