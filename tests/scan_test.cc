// Every strategy of Scan in the table, compared with exact running folds within the strategy's own
// bound, and the order of `fixed_order`, stated a second time.
#include <array>
#include <concepts>

#include "kernels/run/operation.h"
#include "kernels/same_bits/convert.h"
#include "tests/expressions.h"

namespace tessera::test {
namespace {

constexpr ReduceOp kFolds[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax};

// The result's type.
template <class T>
using SumOf = std::conditional_t<std::is_integral_v<T>, std::int64_t, T>;

struct How {
  ReduceOp op = ReduceOp::kSum;
  bool exclusive = false, reverse = false;
};
std::string ToText(const How& how) {
  return absl::StrCat(Absl(Name(how.op)), how.exclusive ? " exclusive" : "",
                      how.reverse ? " reverse" : "");
}
std::vector<How> AllHows() {
  std::vector<How> all;
  for (ReduceOp op : kFolds)
    for (int flags = 0; flags < 4; ++flags) all.push_back({op, flags % 2 != 0, flags / 2 != 0});
  return all;
}
// Returns another combination at each call, so that many shapes together have all of them.
How NextHow() {
  static const auto& all = *new std::vector<How>(AllHows());
  static std::size_t next = 0;
  next += 5;
  return all[next % all.size()];
}

// The exact fold of the elements so far. Sums are in units of 2^-90. If there are many elements,
// their absolute values are below 2^14.
template <class T>
class Running {
 public:
  explicit Running(ReduceOp op) : op_(op) {
    if (op == ReduceOp::kMin) extreme_ = Limits::has_infinity ? INFINITY : Exact(Top());
    if (op == ReduceOp::kMax) extreme_ = Limits::has_infinity ? -INFINITY : Exact(Bottom());
  }

  void Add(T element) {
    const long double x = Exact(element);
    if constexpr (std::is_integral_v<T>) {
      const auto word = static_cast<Word>(element);
      wrapped_ = op_ == ReduceOp::kProduct ? wrapped_ * word : wrapped_ + word;
    } else if (std::isfinite(x)) {
      const auto count = static_cast<Count>(x * 0x1p90L);
      sum_ += count;
      magnitude_ += count < 0 ? -count : count;
    } else {
      special_ += x;
    }
    product_ *= x;
    all_ &= x != 0;
    any_ |= x != 0;
    if (std::isnan(extreme_)) return;
    const bool better = op_ == ReduceOp::kMin ? x < extreme_ : x > extreme_;
    if (better || std::isnan(x)) extreme_ = x;
  }

  // Checks a result. roundoff: the bound of the strategy.
  template <class O>
  testing::AssertionResult Is(O result, double roundoff) const {
    const long double got = Exact(result);
    if (IsLogical(op_)) return Equal(got, op_ == ReduceOp::kAll ? all_ : any_);
    if (IsOrdering(op_)) return Equal(got, extreme_);
    if constexpr (std::is_integral_v<O>) {
      const auto want = static_cast<std::int64_t>(wrapped_);
      if (result == want) return testing::AssertionSuccess();
      return testing::AssertionFailure() << "got " << result << " want " << want;
    } else {
      const bool product = op_ == ReduceOp::kProduct;
      const long double want = product ? product_ : Number(sum_);
      if (!product && special_ != 0) return Equal(got, special_);
      if (!std::isfinite(want)) return Equal(got, want);
      const long double magnitude = product ? std::abs(want) : Number(magnitude_);
      // Half of the smallest number, which is the most that rounding near 0 loses.
      const long double tiny = sizeof(T) == 2 ? 0x1p-25L : sizeof(T) == 4 ? 0x1p-150L : 0;
      const long double bound =
          roundoff * magnitude + UnitRoundoff(DTypeOf<T>()) * std::abs(want) + tiny;
      const long double top = Exact(Top());
      const bool over = std::isinf(got) && (got > 0) == (want > 0) && std::abs(want) + bound > top;
      if (over || std::abs(got - want) <= bound) return testing::AssertionSuccess();
      return testing::AssertionFailure()
             << "got " << static_cast<double>(got) << " want " << static_cast<double>(want)
             << " within " << static_cast<double>(bound);
    }
  }

 private:
  __extension__ typedef __int128 Count;
  using Word = std::uint64_t;
  using Limits = std::numeric_limits<ValueOf<T>>;

  static T Top() {
    if constexpr (std::is_same_v<T, Half>) return Element<T>(65504);
    if constexpr (std::is_same_v<T, BFloat16>) return Element<T>(0x1.fep127);
    if constexpr (std::is_integral_v<T> || sizeof(T) > 2) return Limits::max();
  }
  static T Bottom() { return std::is_integral_v<T> ? static_cast<T>(Limits::lowest()) : Top(); }
  static long double Number(Count count) { return static_cast<long double>(count) * 0x1p-90L; }
  static testing::AssertionResult Equal(long double got, long double want) {
    if (got == want || (std::isnan(got) && std::isnan(want))) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << "got " << static_cast<double>(got) << " want " << static_cast<double>(want);
  }

  ReduceOp op_;
  Count sum_ = 0, magnitude_ = 0;
  Word wrapped_ = op_ == ReduceOp::kProduct ? 1 : 0;
  long double product_ = 1, special_ = 0, extreme_ = 0;
  bool all_ = true, any_ = false;
};

// Elements whose folds stay in the range of their types. Folds of integers wrap.
template <class T>
std::vector<T> Factors(ReduceOp op, std::int64_t n, std::uint64_t seed) {
  if (op != ReduceOp::kProduct && !std::is_integral_v<T>) return NormalVector<T>(n, seed);
  Random random(seed);
  std::vector<T> all;
  for (std::int64_t i = 0; i < n; ++i) {
    if constexpr (std::is_integral_v<T>) {
      // A product of odd factors is not 0.
      all.push_back(static_cast<T>(random.Bits() | (op == ReduceOp::kProduct ? 1 : 0)));
    } else {
      const double size = 1 + 0.002 * random.Normal();
      all.push_back(Element<T>(random.Bits() % 2 == 0 ? size : -size));
    }
  }
  return all;
}

class ScanTest : public StrategyTest<ScanProblem> {
 protected:
  // Whether the strategy would take more than a second, because a single thread or block reads a
  // long row.
  static bool TooSlow(const ScanProblem& p) {
    return GetParam().backend == Backend::kCuda && strategy().cost(p).depth > 400'000;
  }

  static ScanProblem ProblemOf(const View& x, int axis, const How& how, Launch launch = {}) {
    const Lines lines(x, axis);
    return {.dtype = x.dtype,
            .op = how.op,
            .outer = lines.outer,
            .length = lines.length,
            .inner = lines.inner,
            .exclusive = how.exclusive,
            .reverse = how.reverse,
            .launch = launch};
  }

  // Returns the scan of x along an axis, or nothing if the strategy refuses it.
  template <class O>
  std::vector<O> Scan(const View& x, int axis, const How& how, Launch launch = {},
                      double* roundoff = nullptr) {
    const OperationSpec spec =
        ScanSpec{.op = how.op, .axis = axis, .exclusive = how.exclusive, .reverse = how.reverse};
    const ArrayType type = Get(TypeOf(spec, {x})).arrays.at(0);
    EXPECT_EQ(type.dtype, DTypeOf<O>());
    EXPECT_EQ(type.shape, x.shape);
    DeviceArray<O> out(stream(), x.elements());
    const auto result = tessera::Run(spec, stream(), {x}, {out.data()}, options(launch));
    if (!Refusal(strategy(), ProblemOf(x, axis, how)).empty()) {
      EXPECT_EQ(ErrorReason(result.status()), "STRATEGY_UNSUPPORTED") << result.status();
      return {};
    }
    const Stats stats = Get(result).stats;
    EXPECT_EQ(stats.strategy, GetParam().name);
    EXPECT_LE(stats.roundoff, IsExact(how.op, x.dtype) ? 0 : 1);
    if (roundoff != nullptr) *roundoff = stats.roundoff;
    return out.Values();
  }

  // x is a view of device memory whose element [0, ..., 0] is host[first].
  template <class T>
  void Check(const std::vector<T>& host, const View& x, std::int64_t first, int axis,
             const How& how, Launch launch = {}) {
    const ScanProblem problem = ProblemOf(x, axis, how, launch);
    SCOPED_TRACE(absl::StrCat(ToText(how), " of ", problem.outer, "x", problem.length, "x",
                              problem.inner, " block ", launch.block_size));
    if (TooSlow(problem)) return;
    if (IsLogical(how.op)) {
      CheckLines<T, std::int32_t>(host, x, first, axis, how, launch);
    } else if (IsOrdering(how.op)) {
      CheckLines<T, T>(host, x, first, axis, how, launch);
    } else {
      CheckLines<T, SumOf<T>>(host, x, first, axis, how, launch);
    }
  }

  // Checks [outer, length, inner] without gaps, `offset` elements after an aligned address.
  template <class T>
  void CheckArray(const std::vector<T>& host, std::int64_t outer, std::int64_t length,
                  std::int64_t inner, const How& how, std::size_t offset = 0, Launch launch = {}) {
    DeviceArray<T> array(stream(), host, offset);
    Check(host, array.view({outer, length, inner}), 0, 1, how, launch);
    array.ExpectUnchanged(host);
  }
  template <class T>
  void CheckShape(std::int64_t outer, std::int64_t length, std::int64_t inner, const How& how,
                  std::size_t offset = 0) {
    CheckArray(Factors<T>(how.op, outer * length * inner, 1), outer, length, inner, how, offset);
  }

 private:
  template <class T, class O>
  void CheckLines(const std::vector<T>& host, const View& x, std::int64_t first, int axis,
                  const How& how, Launch launch) {
    double roundoff = 0;
    const std::vector<O> got = Scan<O>(x, axis, how, launch, &roundoff);
    if (got.empty()) return;
    const Lines lines(x, axis);
    for (std::int64_t line = 0; line < lines.count(); ++line) {
      const std::vector<T> elements = lines.Elements(host, first, line);
      Running<T> fold(how.op);
      for (std::int64_t step = 0; step < lines.length; ++step) {
        const std::int64_t i = how.reverse ? lines.length - 1 - step : step;
        if (!how.exclusive) fold.Add(At(elements, i));
        ASSERT_TRUE(fold.Is(At(got, lines.Place(line, i, lines.length)), roundoff))
            << "line " << line << " element " << i;
        if (how.exclusive) fold.Add(At(elements, i));
      }
    }
  }
};

// Lengths around the size of each unit of `fixed_order`, and lengths that no unit divides.
std::vector<std::int64_t> Lengths() {
  return Sizes({1,   2,    15,   16,   17,   31,   33,   255,  257,   511,    512,    513,
                700, 1023, 4095, 4096, 4097, 4607, 8192, 8193, 65537, 131071, 131072, 131073});
}

TESSERA_TYPED_TEST(ScanTest, Rows) {
  for (std::int64_t n : Lengths()) {
    if (n > 20'000 || WatchedClosely()) {
      CheckShape<T>(1, n, 1, NextHow(), static_cast<std::size_t>(n % 5));
      continue;
    }
    for (const How& how : AllHows()) CheckShape<T>(3, n, 1, how, static_cast<std::size_t>(n % 5));
  }
}

TESSERA_TYPED_TEST(ScanTest, ManyRows) {
  for (std::int64_t n : {1, 3, 16, 32, 33, 48, 64, 100, 128, 256, 300, 512, 600, 4096, 5000}) {
    const std::int64_t rows = WatchedClosely() ? 3 : 1 + 40'000 / n;
    if (rows * n > Largest()) continue;
    for (int i = 0; i < 3; ++i) CheckShape<T>(rows, n, 1, NextHow(), n % 2 == 0 ? 0 : 3);
  }
}

TESSERA_TYPED_TEST(ScanTest, Columns) {
  for (std::int64_t inner : {2, 7, 8, 9, 16, 17, 100}) {
    for (std::int64_t n : {1, 16, 17, 100, 512, 513, 4096, 4097, 9000}) {
      for (std::int64_t outer : {1, 3}) {
        if (inner * n * outer > std::min<std::int64_t>(Largest(), 200'000)) continue;
        CheckShape<T>(outer, n, inner, NextHow(), static_cast<std::size_t>(n % 3));
      }
    }
  }
}

TESSERA_TYPED_TEST(ScanTest, RandomShapes) {
  Random random(17);
  for (int i = 0; i < (WatchedClosely() ? 4 : 60); ++i) {
    const std::int64_t n =
        1 + random.Below(std::min<std::int64_t>(Largest(), i % 2 == 0 ? 300 : 9000));
    const std::int64_t left = std::min<std::int64_t>(Largest(), 30'000) / n;
    const std::int64_t inner =
        i % 3 == 0 ? 1 : 1 + random.Below(std::min<std::int64_t>(left, 40) + 1);
    CheckShape<T>(1 + random.Below(left / inner + 1), n, inner, NextHow(),
                  static_cast<std::size_t>(random.Below(9)));
  }
}

TESSERA_TYPED_TEST(ScanTest, Launches) {
  const std::int64_t n = std::min<std::int64_t>(7001, Largest() / 3);
  for (const Launch& launch : Launches(limits())) {
    for (std::int64_t inner : {1, 3}) {
      const How how = NextHow();
      CheckArray(Factors<T>(how.op, n / inner * inner * 3, 2), 3, n / inner, inner, how, 3, launch);
    }
  }
}

TESSERA_TYPED_TEST(ScanTest, AxesAndStridedViews) {
  const auto values = NormalVector<T>(6000, 10);
  DeviceArray<T> array(stream(), values, 1);
  for (const StridedWindow& w : StridedWindows()) {
    const View view = w.Of(array.data(), GetParam().dtype);
    for (int axis = -view.shape.rank; axis < view.shape.rank; ++axis)
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax})
        Check(values, view, w.first, axis, {op, axis % 2 == 0, axis < 0});
  }
  array.ExpectUnchanged(values);
}

// Rows of more than 1024 chunks, columns and rows of more than one group, and columns of several
// chunks, in numbers that keep a GPU busy and in numbers that do not.
TESSERA_TYPED_TEST(ScanTest, Long) {
  for (std::int64_t n : Sizes({1 << 22, (1 << 22) + 5001}))
    CheckShape<T>(1, n, 1, NextHow(), static_cast<std::size_t>(n % 4));
  if (Watched()) return;
  CheckShape<T>(1, 300'000, 3, NextHow());
  CheckShape<T>(2, 300'001, 1, NextHow(), 1);
  CheckShape<T>(300, 4100, 2, NextHow());
  CheckShape<T>(40, 8200, 3, NextHow());
}

// Scans an array without elements, and lines without elements.
TESSERA_TYPED_TEST(ScanTest, EmptyArrays) {
  DeviceArray<T> nothing(stream(), 0);
  for (const View& x : {nothing.view({0}), nothing.view({3, 0}), nothing.view({0, 3})})
    for (int axis = 0; axis < x.shape.rank; ++axis)
      EXPECT_TRUE(Scan<SumOf<T>>(x, axis, {}).empty());
}

TESSERA_STRATEGY_SUITE(ScanOfFloatsTest, ScanTest, kFloats);

// From the first NaN on, results are NaN. Sums are also NaN after infinities of both signs.
TESSERA_TYPED_TEST(ScanOfFloatsTest, NansAndInfinities) {
  const std::int64_t n = std::min<std::int64_t>(9000, Largest());
  const std::vector<T> ones(static_cast<std::size_t>(n), Element<T>(1));
  for (const How& how : AllHows()) {
    for (std::int64_t place : {std::int64_t{0}, n / 2, n - 1}) {
      for (double value : {std::nan(""), kInfinity, -kInfinity}) {
        std::vector<T> x = ones;
        At(x, place) = Element<T>(value);
        if (place > 0) x[0] = Element<T>(how.op == ReduceOp::kProduct ? -1 : -kInfinity);
        CheckArray(x, 1, n, 1, how);
        CheckArray(x, 1, n / 2, 2, how);
      }
    }
    if (WatchedClosely()) break;
  }
}

// Sums may exceed the range of the type and return to it, because they are kept in a wider type.
TESSERA_TYPED_TEST_OF(std::same_as<Half>, ScanOfFloatsTest, SumsBeyondTheRange) {
  std::vector<T> x(9000, Element<T>(60'000));
  std::fill(x.begin() + 4500, x.end(), Element<T>(-60'000));
  for (bool reverse : {false, true}) CheckArray(x, 1, 9000, 1, {.reverse = reverse});
  CheckArray(x, 1, 4500, 2, {});
}

// --- The order of `fixed_order` ---

// A line in the order that kernels/same_bits/fixed_scan.h describes: the fold of a part is stated
// by recursion, from the folds of its own parts.
template <ReduceOp kOp, class T>
class FixedLine {
  static constexpr bool kInteger = std::is_integral_v<T>;
  static constexpr bool kExtreme = IsOrdering(kOp);

 public:
  // The types in which values are combined, within a chunk and beyond.
  using Wide =
      std::conditional_t<kExtreme, ValueOf<T>, std::conditional_t<kInteger, std::int64_t, double>>;
  using Value = std::conditional_t<std::is_same_v<T, Half> && kOp == ReduceOp::kSum, float, Wide>;
  using Out = std::conditional_t<kExtreme, T, SumOf<T>>;

  explicit FixedLine(const std::vector<T>& elements) {
    for (T element : elements)
      values_.push_back(static_cast<Value>(static_cast<ValueOf<T>>(element)));
    segments_ = Folds<Value>(values_, 16);
    const std::int64_t stripes = (std::ssize(segments_) + 31) / 32;
    std::vector<Value> of_stripes;
    for (std::int64_t i = 0; i < stripes; ++i) of_stripes.push_back(Doubled(32 * i, 31, 32));
    stripes_ = of_stripes;
    std::vector<Wide> chunks;
    for (Value chunk : Folds<Value>(stripes_, 8)) chunks.push_back(static_cast<Wide>(chunk));
    chunks_ = chunks;
    parts_ = Folds<Wide>(chunks_, 8);
    groups_ = Folds<Wide>(parts_, 32);
    regions_ = Folds<Wide>(groups_, 32);
  }

  std::vector<Out> Scan(bool exclusive) const {
    std::vector<Out> out;
    Value start{}, before{};
    for (std::int64_t i = 0; i < std::ssize(values_); ++i) {
      const std::int64_t segment = i / 16, stripe = segment / 32, chunk = stripe / 8;
      const std::int64_t part = chunk / 8, group = part / 32, region = group / 32;
      if (i % 16 == 0) {
        const Wide chunks = Join(Fold(parts_, group * 32, part), Fold(chunks_, part * 8, chunk));
        const Wide base =
            Join(Fold(regions_, 0, region), Join(Fold(groups_, region * 32, group), chunks));
        const Value segments =
            segment % 32 == 0 ? Nothing<Value>() : Doubled(stripe * 32, segment % 32 - 1, 32);
        start = Join(static_cast<Value>(base), Join(Fold(stripes_, chunk * 8, stripe), segments));
        before = start;
      }
      const Value with = Join(start, Fold(values_, segment * 16, i + 1));
      out.push_back(ConvertElement<Out>(exclusive ? before : with));
      before = with;
    }
    return out;
  }

 private:
  template <class A>
  static A Nothing() {
    if (kOp == ReduceOp::kSum) return 0;
    if (kOp == ReduceOp::kProduct) return 1;
    using Limits = std::numeric_limits<A>;
    if (kOp == ReduceOp::kMin) return kInteger ? Limits::max() : Limits::infinity();
    return kInteger ? Limits::lowest() : -Limits::infinity();
  }
  template <class A>
  static A Join(A a, A b) {
    if constexpr (kOp == ReduceOp::kMin) {
      return std::isnan(Exact(a)) || a <= b ? a : b;
    } else if constexpr (kOp == ReduceOp::kMax) {
      return std::isnan(Exact(a)) || a >= b ? a : b;
    } else if constexpr (kInteger) {
      const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
      return static_cast<A>(kOp == ReduceOp::kSum ? x + y : x * y);
    } else {
      return kOp == ReduceOp::kSum ? a + b : a * b;
    }
  }
  // Returns the fold of parts [first, end), one after the other.
  template <class A>
  static A Fold(const std::vector<A>& parts, std::int64_t first, std::int64_t end) {
    A sum = Nothing<A>();
    for (std::int64_t i = first; i < end; ++i) sum = Join(sum, At(parts, i));
    return sum;
  }
  // Returns the fold of each group of `size` parts.
  template <class A>
  static std::vector<A> Folds(const std::vector<A>& parts, std::int64_t size) {
    std::vector<A> folds;
    for (std::int64_t i = 0; i < std::ssize(parts); i += size)
      folds.push_back(Fold(parts, i, std::min(std::ssize(parts), i + size)));
    return folds;
  }
  // Returns what Kogge and Stone's scan has for segment i of the stripe that begins with segment
  // `first`, after the steps with distances below `width`: the fold of the last `width` segments.
  Value Doubled(std::int64_t first, std::int64_t i, std::int64_t width) const {
    if (width == 1)
      return first + i < std::ssize(segments_) ? At(segments_, first + i) : Nothing<Value>();
    const std::int64_t half = width / 2;
    const Value own = Doubled(first, i, half);
    return i < half ? own : Join(Doubled(first, i - half, half), own);
  }

  std::vector<Value> values_, segments_, stripes_;
  std::vector<Wide> chunks_, parts_, groups_, regions_;
};

TESSERA_STRATEGY_SUITE(FixedScanTest, ScanTest,
                       [](const auto& strategy, DType) { return strategy.name == "fixed_order"; });

// Elements of very different sizes, so that every order of additions gives different bits.
template <class T>
std::vector<T> Uneven(ReduceOp op, std::int64_t n) {
  std::vector<T> x = Factors<T>(op, n, 21);
  Random random(22);
  for (T& element : x) {
    if constexpr (!std::is_integral_v<T>) {
      if (op == ReduceOp::kSum)
        element = Element<T>(static_cast<double>(Exact(element)) *
                             std::exp2(-static_cast<double>(random.Bits() % 9)));
      if (op != ReduceOp::kProduct && random.Bits() % 50 == 0) element = Element<T>(-0.0);
    }
  }
  return x;
}

// The bits are the same on each device, for a row alone or among others, for a row read backwards,
// and for columns. Among other lines, this line is the last.
TESSERA_TYPED_TEST(FixedScanTest, HasTheBitsOfItsOrder) {
  const auto check = [&]<ReduceOp kOp>(std::integral_constant<ReduceOp, kOp>, std::int64_t n,
                                       bool exclusive) {
    using Line = FixedLine<kOp, T>;
    using Out = typename Line::Out;
    SCOPED_TRACE(absl::StrCat(Absl(Name(kOp)), " of ", n, exclusive ? " exclusive" : ""));
    const std::vector<T> x = Uneven<T>(kOp, n);
    const std::vector<Out> want = Line(x).Scan(exclusive);
    for (const auto& [outer, inner] :
         std::vector<std::array<std::int64_t, 2>>{{1, 1}, {1, 2}, {1, 19}, {40, 1}}) {
      if (outer * inner > 2 && n > 10'000) continue;
      for (bool reverse : {false, true}) {
        if (n > 1'000'000 && (inner > 1 || reverse)) continue;
        const std::int64_t all = outer * n * inner;
        std::vector<T> lines(static_cast<std::size_t>(all), Element<T>(0.5));
        const auto place = [&](std::int64_t i) {
          return all - 1 - (reverse ? i : n - 1 - i) * inner;
        };
        for (std::int64_t i = 0; i < n; ++i) At(lines, place(i)) = At(x, i);
        const DeviceArray<T> array(stream(), lines, 1);
        const std::vector<Out> got =
            Scan<Out>(array.view({outer, n, inner}), 1, {kOp, exclusive, reverse});
        ASSERT_EQ(std::ssize(got), all);
        for (std::int64_t i = 0; i < n; ++i) {
          const Out is = At(got, place(i)), should = At(want, i);
          ASSERT_EQ(std::memcmp(&is, &should, sizeof is), 0)
              << "element " << i << " of " << outer << " x " << inner
              << (reverse ? " reversed" : "") << " got " << static_cast<double>(Exact(is))
              << " want " << static_cast<double>(Exact(should));
        }
      }
    }
  };
  using R = ReduceOp;
  for (std::int64_t n : Sizes({1, 16, 17, 100, 511, 512, 513, 4095, 4096, 4097, 9001, 131073,
                               140'000, (1 << 22) + 140'001, (1 << 25) + 9001})) {
    // The reference takes long for these lengths. Sums of f32, which are rounded only once,
    // hardly show the order. Only the last length has more than one region.
    const bool cuda = GetParam().backend == Backend::kCuda;
    if (n > 1'000'000 && !cuda && !std::is_same_v<T, double> && !std::is_same_v<T, Half>) continue;
    if (n > 1 << 24 && !(cuda && std::is_same_v<T, double>)) continue;
    check(std::integral_constant<R, R::kSum>(), n, n % 2 == 0);
    if (n > 1'000'000) continue;
    check(std::integral_constant<R, R::kProduct>(), n, n % 2 == 0);
    check(std::integral_constant<R, R::kMin>(), n, n % 2 != 0);
    check(std::integral_constant<R, R::kMax>(), n, n % 2 == 0);
  }
}

// Elements that are not 0 are true, among them NaN.
TESSERA_TYPED_TEST(FixedScanTest, AllAndAny) {
  std::vector<T> all(5000, Element<T>(-1)), any(5000, Element<T>(0));
  if constexpr (FloatElement<T>) all[10] = Element<T>(std::nan(""));
  if constexpr (FloatElement<T>) any[10] = Element<T>(-0.0);
  all[3000] = Element<T>(0);
  any[3000] = all[10];
  for (bool exclusive : {false, true}) {
    for (bool reverse : {false, true}) {
      CheckArray(all, 2, 2500, 1, {ReduceOp::kAll, exclusive, reverse});
      CheckArray(any, 1, 2500, 2, {ReduceOp::kAny, exclusive, reverse});
    }
  }
}

TESSERA_STRATEGY_SUITE(ScanTwiceTest, ScanTest, kDeterministic);

TESSERA_TYPED_TEST(ScanTwiceTest, GivesTheSameBits) {
  const std::int64_t n = std::min<std::int64_t>(Largest(), 300'001);
  const DeviceArray<T> x(stream(), Uneven<T>(ReduceOp::kSum, n));
  if (TooSlow(ProblemOf(x.view(), 0, {}))) return;
  const auto first = Scan<SumOf<T>>(x.view(), 0, {});
  for (int i = 0; i < (WatchedClosely() ? 1 : 5); ++i) {
    const auto again = Scan<SumOf<T>>(x.view(), 0, {});
    ASSERT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(SumOf<T>)), 0);
  }
}

TESSERA_STRATEGIES(ScanTest);

TEST(ScanErrors, OperationsAndAxesThatDoNotFit) {
  const View x = WholeView({DType::kF32, MakeShape({3, 5})}, nullptr);
  const View scalar = WholeView({DType::kF32, MakeShape({})}, nullptr);
  const View none = WholeView({DType::kF32, MakeShape({3, 0})}, nullptr);
  for (int axis : {-3, 2, 100})
    EXPECT_EQ(ErrorReason(TypeOf(ScanSpec{.axis = axis}, {x}).status()), "BAD_AXES") << axis;
  for (int axis : {-1, 0})
    EXPECT_EQ(ErrorReason(TypeOf(ScanSpec{.axis = axis}, {scalar}).status()), "BAD_AXES") << axis;
  for (ReduceOp op : kAllReduceOps) {
    const absl::Status status = TypeOf(ScanSpec{.op = op}, {x}).status();
    const bool scans = IsLogical(op) || std::ranges::find(kFolds, op) != std::end(kFolds);
    EXPECT_EQ(ErrorReason(status), scans ? "" : "BAD_OPERATION") << Name(op);
    if (!scans) {
      EXPECT_EQ(ErrorMetadata(status)["value"], Name(op));
    }
    EXPECT_EQ(TypeOf(ScanSpec{.op = op}, {none}).ok(), scans) << Name(op);
  }
  // The operands of an expression.
  const auto sum = [&](ReduceOp op, const std::vector<View>& operands) {
    const Nodes nodes = {In(0), In(1), Op(MapOp::kAdd, {0, 1})};
    return ErrorReason(TypeOf(ScanSpec{.op = op, .expression = nodes}, operands).status());
  };
  const View wrong = WholeView({DType::kF32, MakeShape({4})}, nullptr);
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAny}) {
    EXPECT_EQ(sum(op, {x}), "BAD_EXPRESSION");
    EXPECT_EQ(sum(op, {x, wrong}), "BAD_SHAPE");
    EXPECT_EQ(sum(op, {x, scalar}), "");
  }
}

}  // namespace
}  // namespace tessera::test
