// Every strategy of WindowSum in the table, compared with exact sums within the strategy's own
// bound.
#include "kernels/run/operation.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

__extension__ typedef __int128 Wide;

// Elements, and their exact sums. Integers wrap. Sums of other types are in units of 2^-95, or in
// larger units if elements are large.
template <class T>
class Array {
 public:
  using Sum = std::conditional_t<std::is_integral_v<T>, std::int64_t, long double>;
  struct Result {
    Sum sum, magnitude;
  };

  Array(const std::vector<T>& x)  // NOLINT(google-explicit-constructor)
      : values(x), sums_(x.size() + 1), magnitudes_(x.size() + 1) {
    long double largest = 0;
    for (T element : x) largest = std::max(largest, std::abs(Exact(element)));
    // The number of bits, out of 127, that the sum of all absolute values leaves free.
    const int room = 124 - std::ilogb(std::max(largest, 1.0L)) - std::ilogb(x.size() + 1.0);
    unit_ = std::ldexp(1.0L, -std::min(95, room));
    for (std::size_t i = 0; i < x.size(); ++i) {
      Wide element = 0;
      if constexpr (std::is_integral_v<T>) {
        element = x[i];
      } else {
        element = static_cast<Wide>(Exact(x[i]) / unit_);
      }
      sums_[i + 1] = sums_[i] + element;
      magnitudes_[i + 1] = magnitudes_[i] + (element < 0 ? -element : element);
    }
  }
  Result Of(std::int64_t first, std::int64_t end) const {
    const auto between = [&](const std::vector<Wide>& all) {
      const Wide sum = At(all, end) - At(all, first);
      if constexpr (std::is_integral_v<T>) {
        return static_cast<std::int64_t>(sum);
      } else {
        return static_cast<long double>(sum) * unit_;
      }
    };
    return {between(sums_), between(magnitudes_)};
  }

  const std::vector<T> values;

 private:
  long double unit_ = 1;
  std::vector<Wide> sums_, magnitudes_;
};

class WindowSumTest : public StrategyTest<WindowSumProblem> {
 protected:
  // Whether the strategy takes many seconds. In the first lessons, the number of additions grows
  // with the radius.
  bool TooSlow(std::int64_t n, std::int64_t radius) {
    const WindowSumProblem problem{.dtype = GetParam().dtype,
                                   .n = n,
                                   .radius = std::min(radius, std::max<std::int64_t>(0, n - 1))};
    return strategy().cost(problem).flops > std::uint64_t{1} << 34;
  }

  // x is a view of device memory whose elements are `host`.
  template <class T>
  void Check(const Array<T>& host, const View& x, std::int64_t radius, Launch launch = {}) {
    using O = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>;
    const auto n = std::ssize(host.values);
    SCOPED_TRACE(absl::StrCat("n ", n, " radius ", radius, " block ", launch.block_size));
    if (TooSlow(n, radius)) return;
    const auto type = Get(TypeOf(WindowSumSpec{radius}, {x})).arrays.at(0);
    ASSERT_EQ(type.dtype, DTypeOf<O>());
    ASSERT_EQ(type.shape, x.shape);
    DeviceArray<O> out(stream(), n);
    const auto stats =
        Get(tessera::Run(WindowSumSpec{radius}, stream(), {x}, {out.data()}, options(launch)))
            .stats;
    EXPECT_EQ(stats.strategy, GetParam().name);
    EXPECT_LE(stats.roundoff, std::is_integral_v<T> ? 0 : 1e-3);
    const std::vector<O> got = out.Values();

    // Checks all sums, or, for the largest arrays, both ends and random places.
    const std::int64_t checks = std::min<std::int64_t>(n, 1 << 22);
    Random random(42);
    for (std::int64_t check = 0; check < checks; ++check) {
      std::int64_t i = check;
      if (checks < n && check >= 4) {
        i = check < 8 ? n - 1 - (check - 4) : random.Below(n);
      }
      const std::int64_t first = std::max<std::int64_t>(0, i - std::min(radius, n));
      const std::int64_t end = std::min(n, i + std::min(radius, n) + 1);
      const O value = At(got, i);
      if constexpr (std::is_integral_v<T>) {
        ASSERT_EQ(value, host.Of(first, end).sum) << "element " << i;
      } else {
        const auto [want, magnitude] = host.Of(first, end);
        ASSERT_LE(static_cast<double>(std::abs(Exact(value) - want)),
                  stats.roundoff * static_cast<double>(magnitude) +
                      UnitRoundoff(GetParam().dtype) * static_cast<double>(std::abs(want)))
            << "element " << i << " got " << static_cast<double>(Exact(value)) << " want "
            << static_cast<double>(want);
      }
    }
  }

  template <class T>
  void CheckVector(const Array<T>& host, std::int64_t radius, Launch launch = {},
                   std::size_t offset = 0) {
    DeviceArray<T> x(stream(), host.values, offset);
    Check(host, x.view(), radius, launch);
    x.ExpectUnchanged(host.values);
  }
};

std::vector<std::int64_t> Radii(std::int64_t n) {
  if (WatchedClosely()) return {0, 31, n / 2};
  return {0, 1, 2, 31, 32, 1000, std::max<std::int64_t>(0, n - 1), n, 10 * n};
}

TESSERA_TYPED_TEST(WindowSumTest, SizesAndRadii) {
  for (std::int64_t n : AwkwardSizes()) {
    const Array<T> x = NormalVector<T>(n, 1);
    for (std::int64_t radius : Radii(n))
      CheckVector(x, radius, {}, static_cast<std::size_t>(n % 4));
  }
}

// Tests radii around the extents by which strategies divide work: warps, blocks, chunks, pieces.
TESSERA_TYPED_TEST(WindowSumTest, RadiiAroundTiles) {
  for (std::int64_t n : Sizes({4095, 4096, 8191, 20000})) {
    const Array<T> x = NormalVector<T>(n, 2);
    for (std::int64_t radius :
         {3, 4, 7, 8, 15, 16, 127, 128, 255, 256, 2047, 2048, 4095, 4096, 8191, 8192, 10000})
      if (!WatchedClosely() || radius % 128 == 127) CheckVector(x, radius, {}, 1);
  }
}

TESSERA_TYPED_TEST(WindowSumTest, Launches) {
  const Array<T> x = NormalVector<T>(std::min<std::int64_t>(70001, Largest()), 3);
  for (const Launch& launch : Launches(limits()))
    for (std::int64_t radius : {0, 5, 500, 30000})
      if (!WatchedClosely() || radius == 500) CheckVector(x, radius, launch, 3);
}

TESSERA_TYPED_TEST(WindowSumTest, StridedViews) {
  const auto values = NormalVector<T>(3000, 4);
  DeviceArray<T> array(stream(), values, 1);
  for (const StridedWindow& w :
       {StridedWindow{5, {900}, {3}}, {2999, {900}, {-3}}, {7, {900}, {0}}, {11, {900}, {1}}}) {
    const View view = w.Of(array.data(), DTypeOf<T>());
    const std::vector<T> host = Lines(view, 0).Elements(values, w.first, 0);
    for (std::int64_t radius : {0, 2, 40, 2000}) Check<T>(host, view, radius);
  }
}

TESSERA_STRATEGY_SUITE(WindowSumOfFloatsTest, WindowSumTest, kFloats);

// A running sum that adds and subtracts would keep an error from the large element.
TESSERA_TYPED_TEST(WindowSumOfFloatsTest, LargeElementsLeaveNoTrace) {
  std::vector<T> x = NormalVector<T>(9000, 5);
  for (T& element : x)  // Array holds the rounded numbers exactly.
    element = Element<T>(std::round(static_cast<double>(Exact(element)) * 256) / 256);
  const double large = GetParam().dtype == DType::kF16 ? 3e4 : 1e30;
  x[3000] = Element<T>(large);
  x[3001] = Element<T>(-large);
  for (std::int64_t radius : {1, 8, 100, 2500}) CheckVector<T>(x, radius);
}

// A NaN reaches only the windows that contain it.
TESSERA_TYPED_TEST(WindowSumOfFloatsTest, NanStaysInItsWindows) {
  std::vector<T> x(9000, Element<T>(1));
  x[4321] = Element<T>(std::nan(""));
  DeviceArray<T> dx(stream(), x), out(stream(), 9000);
  for (std::int64_t radius : {0, 1, 8, 100, 2500}) {
    Get(tessera::Run(WindowSumSpec{radius}, stream(), {dx.view()}, {out.data()}, options()));
    const std::vector<T> got = out.Values();
    for (std::int64_t i = 0; i < 9000; ++i)
      ASSERT_EQ(std::isnan(Exact(At(got, i))), std::abs(i - 4321) <= radius)
          << "element " << i << " radius " << radius;
  }
}

TESSERA_STRATEGY_SUITE(WindowSumOfIntegersTest, WindowSumTest, kIntegers);

TESSERA_TYPED_TEST_OF(std::integral, WindowSumOfIntegersTest, Wrap) {
  std::vector<T> x(5000);
  Random random(6);
  for (T& e : x) e = static_cast<T>(random.Bits());
  for (std::int64_t radius : {1, 20, 3000}) CheckVector<T>(x, radius);
}

TESSERA_TYPED_TEST(WindowSumTest, Large) {
  const std::int64_t n = (std::int64_t{1} << (GetParam().backend == Backend::kCuda ? 25 : 21)) + 3;
  const Array<T> x = NormalVector<T>(n, 7);
  for (std::int64_t radius : {std::int64_t{8}, std::int64_t{5000}, n / 3, n - 1})
    CheckVector(x, radius, {}, 1);
}

// Covers only the CPU, because CUDA strategies add 16-bit values in f32.
TESSERA_STRATEGY_SUITE(WindowSumOf16BitsTest, WindowSumTest, [](const auto& row, DType dtype) {
  return row.backend == Backend::kCpu && SizeOf(dtype) == 2;
});

TESSERA_TYPED_TEST_OF(HalfElement, WindowSumOf16BitsTest, AreRoundedOnce) {
  const auto [terms, want] = HardToRound<T>();
  DeviceArray<T> array(stream(), terms), out(stream(), 3);
  ASSERT_TRUE(
      tessera::Run(WindowSumSpec{1}, stream(), {array.view()}, {out.data()}, options()).ok());
  EXPECT_EQ(static_cast<double>(Exact(out.Values()[1])), want);
}

TESSERA_STRATEGIES(WindowSumTest);

TEST(WindowSumErrors, OperandsAndRadiiThatDoNotFit) {
  const View x = WholeView({DType::kF32, MakeShape({5})}, nullptr);
  const View matrix = WholeView({DType::kF32, MakeShape({5, 2})}, nullptr);
  const View scalar = WholeView({DType::kF32, MakeShape({})}, nullptr);
  EXPECT_EQ(ErrorReason(TypeOf(WindowSumSpec{1}, {matrix}).status()), "BAD_SHAPE");
  EXPECT_EQ(ErrorReason(TypeOf(WindowSumSpec{1}, {scalar}).status()), "BAD_SHAPE");
  EXPECT_EQ(ErrorReason(TypeOf(WindowSumSpec{-1}, {x}).status()), "BAD_RADIUS");
  EXPECT_TRUE(TypeOf(WindowSumSpec{INT64_MAX}, {x}).ok());
  Stream& stream = TestStream(Backend::kCpu);
  DeviceArray<float> values(stream, {1, 2, 4}), out(stream, 3);
  ASSERT_TRUE(
      tessera::Run(WindowSumSpec{INT64_MAX}, stream, {values.view()}, {out.data()}, {}).ok());
  EXPECT_EQ(out.Values(), (std::vector<float>{7, 7, 7}));
}

}  // namespace
}  // namespace tessera::test
