// Every strategy of TopK in the table, compared with a sort by values and indices.
#include "tests/orders.h"

namespace tessera::test {
namespace {

class TopKTest : public StrategyTest<TopKProblem> {
 protected:
  // Whether the strategy would take more than a second, because a single thread or block reads a
  // long row.
  bool TooSlow(std::int64_t rows, std::int64_t n, std::int64_t k) {
    const TopKProblem problem{.dtype = GetParam().dtype, .rows = rows, .n = n, .k = k};
    return GetParam().backend == Backend::kCuda && strategy().cost(problem).depth > 400'000;
  }

  // x is a view of device memory whose element [0, ..., 0] is host[first].
  template <class T>
  void Check(const std::vector<T>& host, const View& x, std::int64_t first, std::int64_t k,
             int axis, bool smallest, Launch launch = {}) {
    const ArrayType type = Get(TopKType(x, k, axis));
    EXPECT_EQ(type.dtype, x.dtype);
    const Lines lines(x, axis);
    SCOPED_TRACE(absl::StrCat("rows ", lines.count(), " n ", lines.length, " k ", k, " axis ", axis,
                              smallest ? " smallest" : " largest", " block ", launch.block_size));
    if (TooSlow(lines.count(), lines.length, k)) return;
    DeviceArray<T> values(stream(), lines.count() * k);
    DeviceArray<std::int64_t> indices(stream(), lines.count() * k);
    const auto stats = Get(
        RunTopK(stream(), x, k, axis, smallest, values.data(), indices.data(), options(launch)));
    EXPECT_EQ(stats.strategy, GetParam().name);
    EXPECT_EQ(stats.roundoff, 0);
    const std::vector<T> got = values.Values();
    const std::vector<std::int64_t> places = indices.Values();
    ExpectSorted(host, x, first, axis, k, !smallest, &got, &places);
  }

  // Checks rows without gaps, `offset` elements after an aligned address.
  template <class T>
  void CheckRows(const std::vector<T>& host, std::int64_t rows, std::int64_t k, bool smallest,
                 std::size_t offset = 0, Launch launch = {}) {
    DeviceArray<T> array(stream(), host, offset);
    Check(host, array.view({rows, std::ssize(host) / rows}), 0, k, 1, smallest, launch);
    array.ExpectUnchanged(host);
  }
};

struct Shape2 {
  std::int64_t rows, n;
};

std::vector<std::int64_t> SomeK(std::int64_t n) {
  std::vector<std::int64_t> all = {1,   2,   10,  31,   32,   33,   100,  128,
                                   129, 256, 257, 1000, 1025, 2048, 4095, 4096};
  if (WatchedClosely()) all = {1, 33, 300, 1100};
  std::erase_if(all, [n](std::int64_t k) { return k > n; });
  if (n <= kMostTopK) all.push_back(n);
  return all;
}

TESSERA_TYPED_TEST(TopKTest, ShapesAndK) {
  constexpr Shape2 kShapes[] = {{1, 1},    {3, 2},    {70, 7},   {5, 31},   {33, 32},
                                {4, 33},   {3, 255},  {2, 1023}, {2, 1024}, {3, 1025},
                                {2, 4095}, {1, 4096}, {3, 4099}, {2, 16387}};
  std::uint64_t seed = 0;
  for (const Shape2& shape : kShapes) {
    if (shape.rows * shape.n > Largest()) continue;
    ++seed;
    const auto x = MakeValues<T>(Values::kNormal, shape.rows * shape.n, seed);
    for (std::int64_t k : SomeK(shape.n))
      CheckRows(x, shape.rows, k, (seed + static_cast<std::uint64_t>(k)) % 2 == 0, seed % 5);
  }
}

TESSERA_TYPED_TEST(TopKTest, RandomShapes) {
  Random random(17);
  for (int i = 0; i < (WatchedClosely() ? 4 : 40); ++i) {
    const std::int64_t n =
        1 + random.Below(std::min<std::int64_t>(Largest(), i % 2 == 0 ? 300 : 9000));
    const std::int64_t rows = 1 + random.Below(std::min<std::int64_t>(Largest(), 20000) / n + 1);
    const std::int64_t k =
        1 + random.Below(std::min(n, i % 3 == 0 ? kMostTopK : std::int64_t{150}));
    const auto x =
        MakeValues<T>(kAllValues[random.Bits() % kAllValues.size()], rows * n, random.Bits());
    CheckRows(x, rows, k, random.Bits() % 2 == 0, random.Bits() % 9);
  }
}

// Nearly every element is better than all previous elements, or equal to many. Rows are one tile or
// many.
TESSERA_TYPED_TEST(TopKTest, OrdersAndTies) {
  for (Values values : kAllValues) {
    SCOPED_TRACE(absl::StrCat("values ", static_cast<int>(values)));
    for (std::int64_t n : {100, 3001, 50021}) {
      n = std::min(n, Largest() / 2);
      const auto x = MakeValues<T>(values, 2 * n, 5);
      for (std::int64_t k : {1, 10, 100, 700, 4096}) {
        if (k > n || (WatchedClosely() && k > 10)) continue;
        for (bool smallest : {false, true}) CheckRows(x, 2, k, smallest, 3);
      }
    }
  }
}

TESSERA_TYPED_TEST(TopKTest, Launches) {
  const std::int64_t n = std::min<std::int64_t>(700, Largest() / 9);
  const auto x = MakeValues<T>(Values::kNormal, 9 * n, 9);
  for (const Launch& launch : Launches(limits()))
    CheckRows(x, 9, std::min<std::int64_t>(n, 60), true, 3, launch);
}

TESSERA_TYPED_TEST(TopKTest, AxesAndStridedViews) {
  const auto values = MakeValues<T>(Values::kFew, 6000, 10);
  DeviceArray<T> array(stream(), values, 1);
  for (const StridedWindow& w : StridedWindows()) {
    const View view = w.Of(array.data(), GetParam().dtype);
    for (int axis = -view.shape.rank; axis < view.shape.rank; ++axis) {
      const std::int64_t n = Lines(view, axis).length;
      for (std::int64_t k : {std::int64_t{1}, (n + 1) / 2, std::min(n, kMostTopK)})
        Check(values, view, w.first, k, axis, axis % 2 == 0);
    }
  }
}

// Tests rows that are split into as many parts as fit on the device at the same time, or fewer.
TESSERA_TYPED_TEST(TopKTest, Large) {
  const bool cuda = GetParam().backend == Backend::kCuda;
  for (const Shape2& shape :
       cuda ? std::vector<Shape2>{{1, (1 << 22) + 3}, {3, 500003}, {40, 70001}, {300, 33001}}
            : std::vector<Shape2>{{1, (1 << 19) + 3}, {3, 100003}}) {
    const std::int64_t n = std::min(shape.n, std::max<std::int64_t>(1, Largest() / shape.rows));
    if (n < shape.n && shape.rows > 3) continue;
    for (Values values : {Values::kNormal, Values::kFew, Values::kAscending}) {
      const auto x = MakeValues<T>(values, shape.rows * n, 11);
      for (std::int64_t k : {10, 100, 4096})
        if (k <= n && (shape.rows <= 3 || k == 100)) CheckRows(x, shape.rows, k, k == 100, 1);
    }
  }
}

TESSERA_STRATEGY_SUITE(TopKPartsTest, TopKTest, kOf<DType::kF64>);

// The shortest row that all strategies with several parts split, for any TESSERA_LARGEST.
TEST_P(TopKPartsTest, OneRowOfSeveralBlocks) {
  for (Values values : {Values::kNormal, Values::kFew})
    CheckRows(MakeValues<double>(values, 32768, 12), 1, 33, values == Values::kFew);
}

TESSERA_STRATEGIES(TopKTest);

TEST(TopKErrors, AxesAndKThatDoNotFit) {
  const View x = WholeView({DType::kF32, MakeShape({3, 5000, 2})}, nullptr);
  const View none = WholeView({DType::kF32, MakeShape({3, 0})}, nullptr);
  const View scalar = WholeView({DType::kF32, MakeShape({})}, nullptr);
  for (int axis : {-4, 3, 100}) EXPECT_EQ(ErrorReason(TopKType(x, 1, axis).status()), "BAD_AXES");
  EXPECT_EQ(ErrorReason(TopKType(scalar, 1, 0).status()), "BAD_AXES");
  for (std::int64_t k : {std::int64_t{-1}, std::int64_t{0}, kMostTopK + 1, std::int64_t{1} << 62})
    EXPECT_EQ(ErrorReason(TopKType(x, k, 1).status()), "BAD_K") << k;
  EXPECT_EQ(ErrorReason(TopKType(x, 4, 0).status()), "BAD_K");
  EXPECT_EQ(ErrorReason(TopKType(none, 1, 1).status()), "BAD_K");
  const auto type = Get(TopKType(x, kMostTopK, -2));
  EXPECT_EQ(type.shape, MakeShape({3, kMostTopK, 2}));
  EXPECT_EQ(type.dtype, DType::kF32);
  Get(TopKType(none, 2, 0));
  EXPECT_TRUE(RunTopK(TestStream(Backend::kCpu), none, 2, 0, false, nullptr, nullptr, {}).ok());
}

}  // namespace
}  // namespace tessera::test
