// Every strategy of Take in the table, for every type, compared with a walk over the host's copy of
// x and of the indices. Elements must keep their bits.
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/problem/take.h"
#include "kernels/run/operation.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kHighest = std::numeric_limits<std::int64_t>::max();

using Window = StridedWindow;

std::int64_t ElementsOf(const std::vector<std::int64_t>& shape) {
  std::int64_t elements = 1;
  for (std::int64_t extent : shape) elements *= extent;
  return elements;
}

struct How {
  std::optional<int> axis;
  TakeMode mode = TakeMode::kError;
  bool along = false;
};

// The expected outcome of Take: the elements, or the position of the first bad index.
template <class U>
struct Wanted {
  std::vector<std::int64_t> shape;
  std::vector<U> elements;
  std::int64_t bad = -1;
};

// Returns the index that NumPy would use, or nothing. Written with 128 bits, so that nothing wraps.
std::optional<std::int64_t> NumpyIndex(std::int64_t index, std::int64_t length, TakeMode mode) {
  __extension__ typedef __int128 Wide;
  const Wide wide = index, extent = length;
  switch (mode) {
    case TakeMode::kWrap:
      return static_cast<std::int64_t>((wide % extent + extent) % extent);
    case TakeMode::kClip:
      return wide < 0 ? 0 : wide >= extent ? length - 1 : index;
    default:
      if (wide < -extent || wide >= extent) return std::nullopt;
      return static_cast<std::int64_t>(wide < 0 ? wide + extent : wide);
  }
}

template <class U, class I>
Wanted<U> Want(const std::vector<U>& x, const Window& of, const std::vector<I>& indices,
               const Window& at, const How& how) {
  const auto rank = static_cast<std::int64_t>(of.shape.size());
  const std::int64_t axis = how.axis.has_value() ? (*how.axis + rank) % rank : 0;
  std::int64_t outer = 1, length = 1, inner = 1;
  Wanted<U> want;
  for (std::int64_t i = 0; i < rank; ++i) {
    const bool is_axis = !how.axis.has_value() || i == axis;
    (is_axis ? length : i < axis ? outer : inner) *= At(of.shape, i);
    if (!is_axis && i < axis && !how.along) want.shape.push_back(At(of.shape, i));
  }
  want.shape.insert(want.shape.end(), at.shape.begin(), at.shape.end());
  if (how.axis.has_value() && !how.along)
    want.shape.insert(want.shape.end(), of.shape.begin() + axis + 1, of.shape.end());
  const std::int64_t count = how.along ? At(at.shape, axis) : ElementsOf(at.shape),
                     all = outer * count * inner;
  for (std::int64_t e = 0; e < all; ++e) {
    const std::int64_t o = e / inner / count, j = e / inner % count, i = e % inner;
    const std::int64_t position = how.along ? e : j;
    const auto index =
        NumpyIndex(static_cast<std::int64_t>(At(indices, PlaceIn(at, position))), length, how.mode);
    if (!index.has_value()) {
      if (want.bad < 0 || position < want.bad) want.bad = position;
      continue;
    }
    want.elements.push_back(At(x, PlaceIn(of, (o * length + *index) * inner + i)));
  }
  return want;
}

class TakeTest : public MovingTest<TakeProblem> {
 protected:
  // Returns indices that are valid in every mode, or, unless the mode is kError, any indices.
  template <class I>
  static std::vector<I> Indices(std::int64_t n, std::int64_t length, TakeMode mode,
                                std::uint64_t seed = 2) {
    std::vector<I> all(static_cast<std::size_t>(n));
    Random random(seed);
    for (I& index : all) {
      index = static_cast<I>(random.Below(2 * length) - length);
      if (mode == TakeMode::kError || random.Bits() % 4 != 0) continue;
      const std::uint64_t pick = random.Bits();
      index = pick % 4 == 0   ? std::numeric_limits<I>::min()
              : pick % 4 == 1 ? std::numeric_limits<I>::max()
                              : static_cast<I>(pick);
    }
    return all;
  }

  // Takes, and checks the result or the error. Does nothing for problems that the strategy refuses.
  template <class U, class I>
  static void Check(const std::vector<U>& host, const Window& of, const std::vector<I>& indices,
                    const Window& at, const How& how, std::size_t offset = 0, Launch launch = {}) {
    SCOPED_TRACE(testing::Message()
                 << "x " << testing::PrintToString(of.shape) << " by "
                 << testing::PrintToString(of.strides) << " indices "
                 << testing::PrintToString(at.shape) << " axis " << how.axis.value_or(-99)
                 << (how.along ? " along " : " ") << Name(how.mode) << " offset " << offset);
    DeviceArray<U> x(stream(), host, offset);
    DeviceArray<I> places(stream(), indices, offset % 2);
    const View view = of.Of(x.data(), GetParam().dtype);
    const View where = at.Of(places.data(), DTypeOf<I>());
    const OperationSpec spec = TakeSpec{.axis = how.axis, .mode = how.mode, .along = how.along};
    const absl::StatusOr<ResultType> type = TypeOf(spec, {view, where});
    ASSERT_TRUE(type.ok()) << type.status();
    const Wanted<U> want = Want(host, of, indices, at, how);
    const ArrayType& result = type->arrays.at(0);
    EXPECT_EQ(result.dtype, GetParam().dtype);
    EXPECT_EQ(std::vector<std::int64_t>(result.shape.dims.begin(),
                                        result.shape.dims.begin() + result.shape.rank),
              want.shape);
    DeviceArray<U> out(stream(), result.shape.elements());
    const auto run = tessera::Run(spec, stream(), {view, where}, {out.data()}, options(launch));
    if (ErrorReason(run.status()) == "STRATEGY_UNSUPPORTED") {
      EXPECT_NE(strategy().refuses, nullptr);
      return;
    }
    const std::vector<U> got = out.Values();
    x.ExpectUnchanged(host);
    places.ExpectUnchanged(indices);
    if (want.bad >= 0) {
      ExpectBad(run.status(), want.bad, At(indices, PlaceIn(at, want.bad)));
      return;
    }
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->stats.strategy, GetParam().name);
    EXPECT_EQ(run->stats.roundoff, 0);
    ASSERT_EQ(got.size(), want.elements.size());
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(got[i], want.elements[i]) << "element " << i;
  }

  static void ExpectBad(const absl::Status& status, std::int64_t position, std::int64_t value) {
    EXPECT_EQ(ErrorReason(status), "BAD_INDEX") << status;
    EXPECT_EQ(ErrorMetadata(status)["position"], absl::StrCat(position));
    EXPECT_EQ(ErrorMetadata(status)["value"], absl::StrCat(value));
  }

  // Takes from an array without gaps along its middle axis, with `count` indices.
  template <class U, class I = std::int64_t>
  static void CheckShape(std::int64_t outer, std::int64_t length, std::int64_t inner,
                         std::int64_t count, const How& how, std::size_t offset = 0,
                         Launch launch = {}) {
    const std::vector<std::int64_t> at =
        how.along ? std::vector<std::int64_t>{outer, count, inner} : std::vector{count};
    Check(Elements<U>(outer * length * inner), Whole({outer, length, inner}),
          Indices<I>(ElementsOf(at), length, how.mode), Whole(at), how, offset, launch);
  }
};

constexpr TakeMode kModes[] = {TakeMode::kError, TakeMode::kWrap, TakeMode::kClip};

// Rows of each size from 1 to 70 bytes, and of sizes around those of warps and blocks, at every
// alignment that the element size allows.
TESSERA_SIZED_TEST(TakeTest, RowsOfEverySize) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t bytes = sizeof(U); bytes <= 70; bytes += sizeof(U)) sizes.push_back(bytes);
  for (std::int64_t bytes : {128, 136, 256, 496, 504, 512, 520, 528, 1024, 1040, 2048, 4096, 4104})
    sizes.push_back(bytes);
  for (std::int64_t bytes : sizes) {
    const auto row = bytes / static_cast<std::int64_t>(sizeof(U));
    for (std::size_t offset = 0; offset < 16 / sizeof(U); offset += Watched() ? 3 : 1)
      CheckShape<U>(1, 23, row, 37, {.axis = 1}, offset);
    CheckShape<U, std::int32_t>(3, 7, row, 5, {.axis = 1}, 1);
  }
}

TESSERA_SIZED_TEST(TakeTest, ModesAndShapes) {
  for (TakeMode mode : kModes) {
    for (bool along : {false, true}) {
      for (std::int64_t inner : {1, 2, 7, 16, 100}) {
        for (std::int64_t outer : {1, 3}) {
          for (std::int64_t count : {1, 2, 31, 257}) {
            if (WatchedClosely() && count > 2) continue;
            const How how{.axis = 1, .mode = mode, .along = along};
            CheckShape<U>(outer, 11, inner, count, how);
            CheckShape<U, std::int32_t>(outer, 1, inner, count, how, 1);
          }
        }
      }
    }
  }
}

// Takes from vectors, which `library` accepts too.
TESSERA_SIZED_TEST(TakeTest, Vectors) {
  for (std::int64_t n : Sizes({1, 2, 100, 1023, 1024, 1025, 70'000})) {
    const auto x = Elements<U>(n);
    for (TakeMode mode : kModes) {
      for (const How& how : {How{.axis = {}, .mode = mode}, How{.axis = 0, .mode = mode}})
        Check(x, Whole({n}), Indices<std::int64_t>(777, n, mode), Whole({7, 111}), how);
      Check(x, Whole({n}), Indices<std::int32_t>(n, n, mode), Whole({n}),
            {.axis = {}, .mode = mode, .along = true}, 3);
    }
  }
}

TESSERA_SIZED_TEST(TakeTest, Launches) {
  for (const Launch& launch : tessera::test::Launches(limits()))
    for (std::int64_t inner : {1, 48}) CheckShape<U>(2, 50, inner, 333, {.axis = 1}, 0, launch);
}

TESSERA_SIZED_TEST(TakeTest, AxesAndStridedViews) {
  const auto x = Elements<U>(6000);
  std::vector<Window> windows = StridedWindows();
  windows.insert(windows.end(), {{0, {20, 50}, {100, 1}},
                                 {40, {20, 2, 25}, {100, 25, 1}},
                                 {5900, {20, 64}, {-128, 1}},
                                 {3, {}, {}}});
  const auto indices = Indices<std::int64_t>(600, 1, TakeMode::kWrap);
  for (const Window& window : windows) {
    const int rank = static_cast<int>(window.shape.size());
    for (const Window& at : {Whole({}), Whole({6}), Whole({3, 5}), Window{599, {4, 6}, {-9, -2}},
                             Window{7, {9}, {0}}, Window{0, {5, 7}, {1, 5}}}) {
      for (TakeMode mode : {TakeMode::kWrap, TakeMode::kClip}) {
        if (Watched() && mode == TakeMode::kClip) continue;
        Check(x, window, indices, at, {{}, mode}, 1);
        for (int axis = -rank; axis < rank; ++axis)
          Check(x, window, indices, at, {axis, mode}, axis < 0 ? 0 : 1);
      }
    }
  }
}

TESSERA_SIZED_TEST(TakeTest, AlongStridedViews) {
  const auto x = Elements<U>(4000);
  const auto indices = Indices<std::int32_t>(4000, 1, TakeMode::kWrap);
  for (int axis : {0, 1, 2, -1}) {
    std::vector<std::int64_t> shape = {4, 6, 8};
    At(shape, axis < 0 ? axis + 3 : axis) = 11;
    for (const Window& of : {Whole({4, 6, 8}), Window{3999, {4, 6, 8}, {-1, -100, -7}},
                             Window{0, {4, 6, 8}, {0, 8, 1}}}) {
      for (const Window& at :
           {Whole(shape), Window{9, shape, {3, 80, 1}}, Window{0, shape, {0, 0, 0}}})
        Check(x, of, indices, at, {axis, TakeMode::kWrap, true}, 1);
    }
  }
}

// The first of several bad indices is named, wherever they are. Nothing is read outside of x.
TESSERA_SIZED_TEST(TakeTest, BadIndices) {
  const std::int64_t length = 40, count = Watched() ? 500 : 5000;
  for (std::int64_t inner : {1, 3, 32, 100}) {
    for (bool along : {false, true}) {
      if (along && inner > 3) continue;
      const auto x = Elements<U>(2 * length * inner);
      const Window of = Whole({2, length, inner});
      const Window at = along ? Whole({2, count, inner}) : Whole({count});
      const std::int64_t all = ElementsOf(at.shape);
      for (std::int64_t value : {length, -length - 1, kLowest, kHighest}) {
        for (std::int64_t place : {std::int64_t{0}, all / 2, all - 1}) {
          auto indices = Indices<std::int64_t>(all, length, TakeMode::kError);
          At(indices, all - 1) = kHighest;
          At(indices, place) = value;
          Check(x, of, indices, at, {.axis = 1, .along = along});
        }
      }
      const std::vector<std::int64_t> garbage(static_cast<std::size_t>(all), kHighest / 3);
      Check(x, of, garbage, at, {.axis = 1, .along = along});
      const std::vector<std::int32_t> narrow(static_cast<std::size_t>(all), INT32_MIN);
      Check(x, of, narrow, at, {.axis = 1, .along = along});
    }
  }
  // An error leaves no trace in the next result.
  CheckShape<U>(1, 40, 1, 100, {.axis = 1});
}

TESSERA_SIZED_TEST(TakeTest, EmptyArrays) {
  const std::vector<std::int64_t> none, bad = {77, -77};
  Check(Elements<U>(12), Whole({3, 4}), none, Whole({0}), {.axis = 0});
  Check(Elements<U>(12), Whole({3, 4}), none, Whole({2, 0}), {});
  Check(Elements<U>(0), Whole({3, 0}), bad, Whole({2}), {.axis = 0});
  Check(Elements<U>(0), Whole({0, 4}), none, Whole({0}), {.axis = 0});
  Check(Elements<U>(0), Whole({0, 3, 4}), std::vector<std::int64_t>{1}, Whole({1}), {.axis = 1});
  Check(Elements<U>(0), Whole({2, 0}), none, Whole({2, 0}), {.axis = 0, .along = true});
}

TESSERA_SIZED_TEST(TakeTest, RandomProblems) {
  Random random(31);
  for (int i = 0; i < (WatchedClosely() ? 5 : 150); ++i) {
    const std::int64_t inner = 1 + random.Below(i % 2 == 0 ? 600 : 4);
    const std::int64_t outer = 1 + random.Below(4), length = 1 + random.Below(60);
    const std::int64_t count = 1 + random.Below(i % 3 == 0 ? 3000 / inner + 1 : 20);
    const How how{.axis = 1, .mode = kModes[i % 3], .along = i % 5 == 0};
    CheckShape<U>(outer, length, inner, count, how, static_cast<std::size_t>(i % 7));
  }
}

class TakeLargeTest : public TakeTest {};

// Takes many rows at offsets beyond 2^31 elements: the last rows of a large array.
TESSERA_SIZED_TEST(TakeLargeTest, LargeArrays) {
  if (Watched()) return;
  const std::int64_t row = 512 / static_cast<std::int64_t>(sizeof(U));
  const std::int64_t rows = (std::int64_t{5} << 29) / row;
  const DeviceArray<U> x(stream(), rows * row);
  const std::int64_t count = 1 << 16;
  std::vector<std::int64_t> indices(static_cast<std::size_t>(count));
  for (std::int64_t j = 0; j < count; ++j) At(indices, j) = j % 2 == 0 ? -1 - j : j;
  const std::vector<U> marked = Elements<U>(row);
  ASSERT_TRUE(CopyToDevice(stream(), x.data() + (rows - 1) * row, marked.data(), 512).ok());
  const DeviceArray<std::int64_t> places(stream(), indices);
  DeviceArray<U> out(stream(), count * row);
  const auto run = tessera::Run(TakeSpec{.axis = 0}, stream(),
                                {Whole({rows, row}).Of(x.data(), GetParam().dtype), places.view()},
                                {out.data()}, options());
  if (ErrorReason(run.status()) == "STRATEGY_UNSUPPORTED") return;
  ASSERT_TRUE(run.ok()) << run.status();
  const std::vector<U> got = out.Values();
  for (std::int64_t i = 0; i < row; ++i) ASSERT_EQ(At(got, i), At(marked, i)) << i;
  EXPECT_EQ(At(got, 2 * row), At(got, row)) << "an element of the rest, which has one value";
}

// The result has more than 2^32 elements.
TESSERA_SIZED_TEST(TakeLargeTest, LargeResults) {
  if (Watched()) return;
  if constexpr (sizeof(U) == 1) {
    const std::int64_t n = (std::int64_t{1} << 32) + 12'345;
    for (std::int64_t inner : {1, 16}) {
      const auto host = Elements<U>(3 * inner);
      const DeviceArray<U> x(stream(), host);
      const std::vector<std::int32_t> one = {1};
      const DeviceArray<std::int32_t> index(stream(), one);
      DeviceArray<U> out(stream(), n / inner * inner);
      // A view that repeats an index is gathered, so the indices have 2^32 / inner elements.
      const View where = StridedView(index.data(), DType::kI32, {n / inner}, {0});
      const auto run = tessera::Run(TakeSpec{.axis = 0}, stream(),
                                    {Whole({3, inner}).Of(x.data(), GetParam().dtype), where},
                                    {out.data()}, options());
      if (ErrorReason(run.status()) == "STRATEGY_UNSUPPORTED") continue;
      ASSERT_TRUE(run.ok()) << run.status();
      const std::vector<U> got = out.Values();
      for (std::int64_t e : {std::int64_t{0}, n / 2, n / inner * inner - 1})
        EXPECT_EQ(At(got, e), At(host, inner + e % inner)) << e;
    }
  }
}

TESSERA_STRATEGIES(TakeTest, kAny, kArrayDTypes);
// A build without CUDA has no such case.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TakeLargeTest);
TESSERA_STRATEGIES(
    TakeLargeTest, [](const auto& strategy, DType) { return strategy.backend == Backend::kCuda; },
    std::array{DType::kU8, DType::kF32});

// If x is copied first, the time includes the whole copy, even for few indices.
TEST(TakeTimes, CopiesCount) {
  const OperationSpec spec = TakeSpec{};
  const View places = WholeView({DType::kI64, MakeShape({1})}, nullptr);
  const View x = WholeView({DType::kF32, MakeShape({1000, 1000})}, nullptr);
  const View columns = StridedView(nullptr, DType::kF32, {1000, 1000}, {1, 1000});
  const double copied = LeastMicroseconds(spec, {columns, places}, Backend::kCpu);
  EXPECT_GT(copied, 10 * LeastMicroseconds(spec, {x, places}, Backend::kCpu));
}

TEST(TakeErrors, OperandsThatDoNotFit) {
  const auto view = [](DType dtype, std::initializer_list<std::int64_t> shape) {
    return WholeView({dtype, MakeShape(shape)}, nullptr);
  };
  const auto reason = [&](const TakeSpec& spec, const View& x, const View& indices) {
    return ErrorReason(TypeOf(spec, {x, indices}).status());
  };
  const View x = view(DType::kF32, {3, 5}), some = view(DType::kI64, {4});
  EXPECT_EQ(reason({}, x, some), "");
  for (int axis : {-3, 2, 100}) EXPECT_EQ(reason({.axis = axis}, x, some), "BAD_AXES") << axis;
  EXPECT_EQ(reason({.axis = 0}, view(DType::kF32, {}), some), "BAD_AXES");
  EXPECT_EQ(reason({}, view(DType::kF32, {}), some), "");
  for (DType dtype : kArrayDTypes) {
    const bool fits = dtype == DType::kI32 || dtype == DType::kI64;
    EXPECT_EQ(reason({}, x, view(dtype, {4})), fits ? "" : "BAD_DTYPE") << Name(dtype);
    EXPECT_EQ(reason({}, view(dtype, {3}), some), "") << Name(dtype);
  }
  // An axis without elements, and a result without elements.
  const View none = view(DType::kF32, {0, 5});
  for (TakeMode mode : kAllTakeModes) {
    EXPECT_EQ(reason({.axis = 0, .mode = mode}, none, some), "BAD_INDEX");
    EXPECT_EQ(reason({.mode = mode}, none, some), "BAD_INDEX");
    EXPECT_EQ(reason({.axis = 1, .mode = mode}, none, some), "");
    EXPECT_EQ(reason({.axis = 0, .mode = mode}, none, view(DType::kI32, {0})), "");
  }
  // The rank of the result.
  const View deep = view(DType::kF32, {1, 1, 1, 1, 1});
  EXPECT_EQ(reason({.axis = 2}, deep, view(DType::kI64, {1, 1, 1, 1})), "");
  EXPECT_EQ(reason({.axis = 2}, deep, view(DType::kI64, {1, 1, 1, 1, 1})), "BAD_SHAPE");
  // The number of elements of the result.
  const View repeated = StridedView(nullptr, DType::kI64, {1 << 30, 1 << 30}, {0, 0});
  EXPECT_EQ(reason({.axis = 0}, view(DType::kF32, {3, 5}), repeated), "BAD_SHAPE");
}

TEST(TakeErrors, ShapesOfTakeAlong) {
  const auto reason = [](std::optional<int> axis, std::initializer_list<std::int64_t> x,
                         std::initializer_list<std::int64_t> indices) {
    return ErrorReason(TypeOf(TakeSpec{.axis = axis, .along = true},
                              {WholeView({DType::kI8, MakeShape(x)}, nullptr),
                               WholeView({DType::kI32, MakeShape(indices)}, nullptr)})
                           .status());
  };
  EXPECT_EQ(reason(1, {3, 5}, {3, 9}), "");
  EXPECT_EQ(reason(-2, {3, 5}, {0, 5}), "");
  EXPECT_EQ(reason({}, {3, 5}, {20}), "");
  for (const auto& indices : {std::initializer_list<std::int64_t>{3}, {1, 9}, {3, 9, 1}, {5, 3}})
    EXPECT_EQ(reason(1, {3, 5}, indices), "BAD_SHAPE");
  EXPECT_EQ(reason({}, {3, 5}, {3, 5}), "BAD_SHAPE");
}

// The default strategy reads rows in place, without scratch memory, if strides can express them.
TEST(TakeOnTheCpu, CopiesOnlyWhatStridesCannotExpress) {
  Stream& stream = TestStream(Backend::kCpu);
  const DeviceArray<float> x(stream, 6000);
  const DeviceArray<std::int64_t> indices(stream, std::vector<std::int64_t>{1, 0});
  const auto scratch = [&](const Window& window, std::optional<int> axis) {
    return Get(tessera::Run(TakeSpec{.axis = axis}, stream,
                            {window.Of(x.data(), DType::kF32), indices.view()}, {nullptr},
                            {.check_only = true}))
        .stats.scratch_bytes;
  };
  EXPECT_EQ(scratch({0, {20, 50}, {100, 1}}, 0), 0u);
  EXPECT_EQ(scratch({0, {20, 50}, {1, 100}}, 1), 0u);
  EXPECT_EQ(scratch({5, {4, 20, 3}, {100, 3, 1}}, 0), 0u);
  EXPECT_EQ(scratch({0, {20, 50}, {100, 1}}, std::nullopt), 20u * 50 * 4);
  EXPECT_EQ(scratch({0, {4, 5, 6}, {100, 10, 1}}, 0), 4u * 5 * 6 * 4);
}

}  // namespace
}  // namespace tessera::test
