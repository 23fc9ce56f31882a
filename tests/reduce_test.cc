// Every strategy of Reduce and ReduceAxes in the table, compared with references in long double.
#include <iterator>
#include <optional>

#include "absl/types/span.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

struct Reference {
  long double value = 0;
  // |computed - value| <= roundoff * scale, plus the rounding of the output.
  long double scale = 0;
  std::int64_t index = 0;
  std::int64_t integer = 0;  // Exact integer results, which wrap at 64 bits.
};

template <class T>
Reference ReduceReference(ReduceOp op, const std::vector<T>& x) {
  Reference r;
  const auto n = static_cast<long double>(x.size());
  const auto before = [&](long double a, long double b) {  // Whether a beats an earlier b.
    if (std::isnan(b)) return false;
    if (std::isnan(a)) return true;
    return op == ReduceOp::kMin || op == ReduceOp::kArgMin ? a < b : a > b;
  };
  const auto bits = [](T v) { return static_cast<std::int64_t>(static_cast<ValueOf<T>>(v)); };
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kMean) {  // A 128-bit sum, rounded once, then divided.
      __extension__ __int128 all = 0;
      for (T v : x) all += v;
      r.value = static_cast<double>(all) / static_cast<double>(x.size());
      return r;
    }
    r.integer = op == ReduceOp::kProduct ? 1 : 0;
    for (T v : x) {
      const std::int64_t w = bits(v);
      if (op == ReduceOp::kSum) r.integer = WrapAdd(r.integer, w);
      if (op == ReduceOp::kProduct) r.integer = WrapMultiply(r.integer, w);
      if (op == ReduceOp::kNormL1)
        r.integer = WrapAdd(r.integer, w < 0 ? WrapMultiply<std::int64_t>(w, -1) : w);
      if (op == ReduceOp::kSumSquares) r.integer = WrapAdd(r.integer, WrapMultiply(w, w));
    }
  }
  switch (op) {
    case ReduceOp::kProduct:
      r.value = 1;
      for (T v : x) r.value *= Exact(v);
      r.scale = std::abs(r.value);
      return r;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
    case ReduceOp::kArgMin:
    case ReduceOp::kArgMax:
      for (std::size_t i = 1; i < x.size(); ++i)
        if (before(Exact(x[i]), Exact(At(x, r.index)))) r.index = static_cast<std::int64_t>(i);
      if (!x.empty()) r.value = Exact(At(x, r.index));
      if constexpr (std::is_integral_v<T>) r.integer = bits(At(x, r.index));
      return r;
    case ReduceOp::kAll:
    case ReduceOp::kAny:
      r.integer = op == ReduceOp::kAll;
      for (T v : x) {
        if (op == ReduceOp::kAll) r.integer &= Exact(v) != 0;
        if (op == ReduceOp::kAny) r.integer |= Exact(v) != 0;
      }
      r.value = static_cast<long double>(r.integer);
      return r;
    case ReduceOp::kVariance:
    case ReduceOp::kStd: {
      // Uses differences from the first element, because far from zero even a long double has too
      // few digits.
      const auto apart = [&](T v) { return Exact(v) - Exact(x[0]); };
      long double mean = 0;
      for (T v : x) mean += apart(v) / n;
      for (T v : x) r.value += (apart(v) - mean) * (apart(v) - mean) / n;
      if (op == ReduceOp::kStd) r.value = std::sqrt(r.value);
      r.scale = r.value;
      return r;
    }
    default:
      break;
  }
  for (T v : x) {
    const bool squares = op == ReduceOp::kNormL2 || op == ReduceOp::kSumSquares;
    const long double term = squares                   ? Exact(v) * Exact(v)
                             : op == ReduceOp::kNormL1 ? std::abs(Exact(v))
                                                       : Exact(v);
    r.value += term;
    r.scale += std::abs(term);
  }
  if (op == ReduceOp::kMean) {
    r.value /= n;
    r.scale /= n;
  }
  if (op == ReduceOp::kNormL2) r.scale = r.value = std::sqrt(r.value);  // halves the relative error
  return r;
}

// Products need values near 1 to stay in range.
template <class T>
std::vector<T> Data(ReduceOp op, std::int64_t n, std::uint64_t seed) {
  if (op != ReduceOp::kProduct) return NormalVector<T>(n, seed, 0.25);
  if (sizeof(T) > 2 && !std::is_integral_v<T>) return NormalVector<T>(n, seed, 1.0, 1e-3);
  // Near 1, f16 has too few values, and products of integers wrap, so both use ones and minus ones
  // with a few other values.
  std::vector<T> v(static_cast<std::size_t>(n));
  Random random(seed);
  for (T& x : v) x = static_cast<T>(static_cast<ValueOf<T>>(random.Bits() % 2 == 0 ? 1 : -1));
  for (std::int64_t i = 0; i < n; i += n / 7 + 1)
    At(v, i) = static_cast<T>(static_cast<ValueOf<T>>(3));
  return v;
}

// The elements of the first vector are so far from zero that their mean has no digits left for the
// differences. The other vectors have squares beyond the range of every type, even double, although
// the root is in range.
template <FloatElement T>
std::vector<std::vector<T>> HardDeviations(std::int64_t n) {
  using Limits = std::numeric_limits<ValueOf<T>>;
  constexpr bool kHalf = std::is_same_v<T, Half>;
  // Up to this value, the type has three consecutive integers.
  const double far = 0.25 / UnitRoundoff(DTypeOf<T>());
  constexpr int kMost = kHalf ? 15 : Limits::max_exponent - 10;
  constexpr int kLeast = kHalf ? -20 : Limits::min_exponent;
  std::vector<std::vector<T>> all(1);
  for (std::int64_t i = 0; i < n; ++i)
    all[0].push_back(Element<T>(far + static_cast<double>(i * i % 5 % 3)));
  for (int exponent : {kMost, kMost / 2 + 1, kLeast / 2 - 3, kLeast}) {
    all.emplace_back();
    for (std::int64_t i = 0; i < n; ++i)
      all.back().push_back(Element<T>(std::ldexp(i * i % 3 == 0 ? 1 : -0.5, exponent)));
  }
  return all;
}

// Calls check(ops, x) for rows of n elements that are special for these operations: ties, zeros,
// the ends of the type, elements that are not finite, and folds that wrap or overflow.
template <class T>
void ForSpecialRows(std::int64_t n, const auto& check) {
  using R = ReduceOp;
  using Ops = std::vector<ReduceOp>;
  const Ops orderings = {R::kMin, R::kMax, R::kArgMin, R::kArgMax};
  const auto all = [&](double x) {
    return std::vector<T>(static_cast<std::size_t>(n), Element<T>(x));
  };
  const auto with = [&](std::vector<T> row, double x, std::initializer_list<std::int64_t> places) {
    for (std::int64_t place : places) At(row, place) = Element<T>(x);
    return row;
  };
  for (double x : {3, -1, 9}) check(orderings, with(all(3), x, {n / 2, n - 1}));
  for (double x : {0.0, -0.0, 1.0})
    for (double last : {x, 1 - std::abs(x)})
      check(Ops{R::kAll, R::kAny}, with(all(x), last, {n - 1}));
  if constexpr (std::is_integral_v<T>) {
    constexpr T kMax = std::numeric_limits<T>::max(), kMin = std::numeric_limits<T>::min();
    const Ops ops = {R::kSum,        R::kProduct, R::kMean,  R::kNormL1,
                     R::kSumSquares, R::kMin,     R::kArgMax};
    std::vector<T> any(static_cast<std::size_t>(n)), high = any, both = any;
    Random random(15);
    for (T& x : any) x = static_cast<T>(random.Bits() | 1);
    for (T& x : high) x = static_cast<T>(kMax - static_cast<T>(random.Bits() & 0xff));
    for (T& x : both) x = random.Bits() % 3 == 0 ? kMin : kMax;
    for (const std::vector<T>& row :
         {any, high, both, std::vector<T>(any.size(), kMax), std::vector<T>(any.size(), kMin)})
      check(ops, row);
  } else {
    for (double x : {kInfinity, -kInfinity}) check(orderings, all(x));
    const std::vector<T> normal = NormalVector<T>(n, 14);
    check(Ops{R::kMin, R::kMax, R::kArgMin, R::kArgMax, R::kSum, R::kProduct, R::kMean, R::kNormL1,
              R::kNormL2, R::kVariance},
          with(normal, std::nan(""), {n / 3, n - 1}));
    // If one element is not finite, no deviation from the mean is finite.
    for (const auto& [x, place] :
         {std::pair(kInfinity, std::int64_t{0}), {-kInfinity, n / 2}, {std::nan(""), n - 1}})
      check(Ops{R::kVariance}, with(normal, x, {place}));
    for (const std::vector<T>& row : HardDeviations<T>(n)) check(Ops{R::kStd, R::kNormL2}, row);
    check(Ops{R::kVariance}, HardDeviations<T>(n)[0]);
    if constexpr (std::is_same_v<T, double>) {
      for (double last : {0.0, -1e200}) {
        std::vector<T> beyond = with(with(all(0), 1e200, {0}), 1, {n * 7 / 10});
        check(Ops{R::kVariance}, with(beyond, last, {n - 1}));
      }
    }
  }
}

class ReduceTest : public StrategyTest<ReduceProblem> {
 protected:
  // Whether the strategy takes the operation. If it does not, it must say why.
  bool Takes(ReduceOp op, const View& x) {
    const std::string refusal =
        Refusal(strategy(), ReduceProblem{.dtype = x.dtype, .op = op, .n = x.elements()});
    if (refusal.empty()) return true;
    const absl::Status status = RunReduce(stream(), x, op, options()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(ErrorReason(status), "STRATEGY_UNSUPPORTED");
    EXPECT_EQ(ErrorMetadata(status)["needs"], refusal);
    return false;
  }

  static ScalarResult Run(const View& x, ReduceOp op, Launch launch = {}) {
    return Get(RunReduce(stream(), x, op, options(launch)));
  }

  template <class T>
  void Check(ReduceOp op, const std::vector<T>& x, Launch launch = {}, std::size_t offset = 0,
             const Reference* want = nullptr) {
    DeviceArray<T> array(stream(), x, offset);
    SCOPED_TRACE(absl::StrCat("block ", launch.block_size, " grid ", launch.grid_size, " items ",
                              launch.items_per_thread, " offset ", offset));
    CheckResident(want != nullptr ? *want : ReduceReference(op, x), op, array.view(), launch);
    array.ExpectUnchanged(x);
  }

  void CheckResident(const Reference& want, ReduceOp op, const View& x, Launch launch = {}) {
    if (!Takes(op, x)) return;
    SCOPED_TRACE(absl::StrCat(Absl(Name(op)), " of ", x.elements()));
    const DType dtype = GetParam().dtype;
    const ScalarResult result = Run(x, op, launch);
    for (int i = 0; strategy().deterministic && x.elements() > 4000 && i < 3; ++i)
      EXPECT_EQ(Bits(Run(x, op, launch)), Bits(result));
    const bool integer = IsInteger(IsArg(op) ? dtype : ResultDType(op, dtype));
    const bool exact = IsExact(op, dtype), mean = op == ReduceOp::kMean && IsInteger(dtype);
    EXPECT_EQ(result.integer, integer);
    EXPECT_LE(result.stats.roundoff, exact ? 0 : mean ? 0x1p-52 : 1e-3);
    if (IsArg(op)) {
      EXPECT_EQ(result.value.index, want.index);
    }
    if (integer) {
      EXPECT_EQ(result.value.integer, want.integer);
    } else if (const auto rounded = static_cast<double>(want.value); !std::isfinite(rounded)) {
      EXPECT_TRUE(std::isnan(rounded) ? std::isnan(result.value.real)
                                      : result.value.real == rounded)
          << "got " << result.value.real << " want " << rounded;
    } else if (exact || mean) {
      EXPECT_EQ(result.value.real, rounded);
    } else {
      EXPECT_LE(std::abs(static_cast<double>(result.value.real - want.value)),
                (result.stats.roundoff + 2 * kRoundoffF64) * static_cast<double>(want.scale))
          << "got " << result.value.real << " want " << rounded;
    }
  }
};

// All operations, or one operation for each number of values that a strategy carries.
absl::Span<const ReduceOp> OpsToTry() {
  static constexpr ReduceOp kOfEachKind[] = {ReduceOp::kSum, ReduceOp::kArgMax,
                                             ReduceOp::kVariance};
  return WatchedClosely() ? absl::MakeConstSpan(kOfEachKind) : absl::MakeConstSpan(kAllReduceOps);
}

TESSERA_TYPED_TEST(ReduceTest, AwkwardSizes) {
  static auto& references = *new std::map<std::pair<ReduceOp, std::int64_t>, Reference>;
  for (ReduceOp op : OpsToTry()) {
    for (std::int64_t n : AwkwardSizes()) {
      if (n == 0 && NeedsElements(op)) continue;
      const std::vector<T> x = Data<T>(op, n, 1);
      const auto [known, fresh] = references.try_emplace({op, n});
      if (fresh) known->second = ReduceReference(op, x);
      Check<T>(op, x, {}, n % 4, &known->second);
    }
  }
}

TESSERA_TYPED_TEST(ReduceTest, LaunchesAndAlignments) {
  for (const Launch& launch : Launches(limits()))
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kArgMax, ReduceOp::kNormL2, ReduceOp::kVariance})
      for (std::int64_t n : Sizes({1, 33, 4099, 70001}))
        if (!WatchedClosely() || (op == ReduceOp::kArgMax && n == 4099))
          Check<T>(op, Data<T>(op, n, 2), launch, n % 4);
}

bool HasVariance(const Strategy<ReduceProblem>& strategy, DType dtype) {
  return !IsInteger(dtype) &&
         Refusal(strategy, {.dtype = dtype, .op = ReduceOp::kVariance, .n = 1}).empty();
}

// Only strategies that compute variances allow norms whose squares overflow a double.
TESSERA_TYPED_TEST(ReduceTest, SpecialRows) {
  const bool has_variance = HasVariance(strategy(), GetParam().dtype);
  for (std::int64_t n : Sizes({1, 2, 5, 257, 4099, 70001})) {
    ForSpecialRows<T>(n, [&](const std::vector<ReduceOp>& ops, const std::vector<T>& x) {
      if (ops[0] == ReduceOp::kStd && !has_variance) return;
      for (ReduceOp op : ops) Check<T>(op, x, {}, 1);
    });
  }
  // Even the differences of these elements overflow.
  if constexpr (std::is_same_v<T, double>)
    Check<T>(ReduceOp::kVariance, {1.7e308, -1.7e308, 1.7e308, -1.7e308});
}

TESSERA_STRATEGY_SUITE(ReduceOfF32Test, ReduceTest, kOf<DType::kF32>);

TEST_P(ReduceOfF32Test, SquaresLeaveTheRange) {
  Check<float>(ReduceOp::kNormL2, std::vector<float>(1000, 1e30f));
  Check<float>(ReduceOp::kNormL2, std::vector<float>(1000, 1e-30f));
  Check<float>(ReduceOp::kProduct, {1e30f, 1e30f, 1e-30f, 1e-30f, 2.0f});
}

TEST_P(ReduceTest, EmptyInputs) {
  const View empty = WholeView({GetParam().dtype, MakeShape({3, 0})}, nullptr);
  for (ReduceOp op : kAllReduceOps) {
    if (!NeedsElements(op) && !Takes(op, empty)) continue;
    const auto result = RunReduce(stream(), empty, op, options());
    if (NeedsElements(op)) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(ErrorReason(result.status()), "EMPTY_INPUT");
    } else {
      const ScalarResult zero = Get(result);
      EXPECT_EQ(zero.integer ? static_cast<double>(zero.value.integer) : zero.value.real,
                op == ReduceOp::kProduct || op == ReduceOp::kAll ? 1 : 0);
    }
  }
}

TESSERA_TYPED_TEST(ReduceTest, StridedViewKeepsRowMajorIndices) {
  const std::vector<T> values = NormalVector<T>(30 * 40, 6);
  DeviceArray<T> array(stream(), values);
  const auto view = Get(MakeView({GetParam().dtype, MakeShape({30, 40})}, array.data(),
                                 29 * 40 + 39, {40, 15}, {-1, -80}));
  std::vector<T> gathered;
  for (int i = 0; i < 40; ++i)
    for (int j = 0; j < 15; ++j) gathered.push_back(At(values, 29 * 40 + 39 - i - 80 * j));
  for (ReduceOp op : {ReduceOp::kArgMin, ReduceOp::kArgMax})
    CheckResident(ReduceReference(op, gathered), op, view);
}

TESSERA_TYPED_TEST(ReduceTest, Large) {
  // All elements are one except for one element. They are made once per type and device.
  static auto& inputs = *new std::map<Backend, DeviceArray<T>>;
  const std::int64_t n = LargeSize(GetParam().backend), odd = n - 2;
  if (!inputs.contains(GetParam().backend)) {
    std::vector<T> x(static_cast<std::size_t>(n), static_cast<T>(ValueOf<T>(1)));
    At(x, odd) = static_cast<T>(ValueOf<T>(-1));
    inputs.try_emplace(GetParam().backend, stream(), x);
  }
  const View x = inputs.at(GetParam().backend).view();
  // In the classic failure, a float counter stops at 2^24. Here, nothing is rounded.
  const auto count = static_cast<long double>(n);
  CheckResident({.value = count - 2, .integer = n - 2}, ReduceOp::kSum, x);
  CheckResident({.value = count, .integer = n}, ReduceOp::kSumSquares, x);
  CheckResident({.value = -1, .index = odd, .integer = -1}, ReduceOp::kArgMin, x);
}

TESSERA_STRATEGIES(ReduceTest);

using AxesCase = std::pair<std::vector<std::int64_t>, std::vector<int>>;

class ReduceAxesTest : public StrategyTest<ReduceAxesProblem> {
 protected:
  template <class Out>
  static std::vector<Out> Run(const View& x, ReduceOp op, int axis) {
    DeviceArray<Out> out(stream(), x.elements() / x.shape[axis]);
    Get(RunReduceAxes(stream(), x, op, {axis}, out.data(), options()));
    return out.Values();
  }

  // host and device are the same view of the same elements. The host's view is folded element by
  // element.
  template <class T>
  void Check(const View& host, const View& device, ReduceOp op, const std::vector<int>& axes) {
    SCOPED_TRACE(absl::StrCat(Absl(Name(op)), " of ", ToString(host.shape), " along ",
                              testing::PrintToString(axes)));
    const auto type = Get(ReduceAxesType(device, op, axes, false));
    bool folded[kMaxRank] = {};
    for (int a : axes) folded[a < 0 ? a + host.shape.rank : a] = true;

    std::vector<std::vector<T>> groups(static_cast<std::size_t>(type.shape.elements()));
    std::int64_t index[kMaxRank] = {};
    for (std::int64_t e = 0; e < host.elements(); ++e) {
      std::int64_t offset = 0, output = 0;
      for (int i = 0; i < host.shape.rank; ++i) {
        offset += index[i] * At(host.strides, i);
        if (!folded[i]) output = output * host.shape[i] + index[i];
      }
      At(groups, output).push_back(static_cast<const T*>(host.data)[offset]);
      for (int i = host.shape.rank; i-- > 0 && ++index[i] == host.shape[i];) index[i] = 0;
    }

    const auto run = [&](auto out_type) {
      using Out = decltype(out_type);
      DeviceArray<Out> out(stream(), type.shape.elements());
      RunOptions timed = options();
      timed.timing = true;
      const auto stats = Get(RunReduceAxes(stream(), device, op, axes, out.data(), timed));
      const std::vector<Out> got = out.Values();
      for (std::size_t i = 0; i < got.size(); ++i) {
        const Reference want = ReduceReference(op, groups[i]);
        double rounded = 0;
        if (!IsInteger(type.dtype))
          rounded =
              static_cast<double>(Exact(static_cast<Out>(static_cast<ValueOf<Out>>(want.value))));
        const auto value = static_cast<double>(Exact(got[i]));
        if (IsArg(op)) {
          ASSERT_EQ(static_cast<std::int64_t>(Exact(got[i])), want.index) << "output " << i;
        } else if (IsInteger(type.dtype)) {
          ASSERT_EQ(static_cast<std::int64_t>(Exact(got[i])), want.integer) << "output " << i;
        } else if (!std::isfinite(rounded)) {  // A NaN, or a value beyond the largest f16.
          ASSERT_EQ(std::isnan(value), std::isnan(rounded)) << i;
          ASSERT_EQ(std::isinf(value), std::isinf(rounded)) << i;
        } else if (op == ReduceOp::kMean && std::is_integral_v<T>) {
          ASSERT_EQ(value, rounded) << "output " << i;
        } else {
          // Below 2^-14, f16 values are 2^-24 apart.
          const double output_rounding =
              2 * static_cast<double>(std::abs(want.value)) * UnitRoundoff(type.dtype) +
              (type.dtype == DType::kF16 ? 0x1p-25 : 0);
          ASSERT_LE(std::abs(static_cast<double>(Exact(got[i]) - want.value)),
                    stats.roundoff * static_cast<double>(want.scale) * 1.01 + output_rounding)
              << "output " << i;
        }
      }
    };
    DispatchDType(type.dtype, run);
  }

  // Checks the array of these elements, which begins `offset` elements after an aligned address.
  template <class T>
  void CheckArray(const std::vector<std::int64_t>& shape, const std::vector<T>& values, ReduceOp op,
                  const std::vector<int>& axes, std::size_t offset = 0) {
    const ArrayType type = *MakeArrayType(GetParam().dtype, shape);
    DeviceArray<T> array(stream(), values, offset);
    Check<T>(WholeView(type, values.data()), WholeView(type, array.data()), op, axes);
  }
};

TESSERA_TYPED_TEST(ReduceAxesTest, ShapesAndAxes) {
  const AxesCase cases[] = {
      {{1, 1}, {0}},          {{7, 5}, {0}},          {{7, 5}, {1}},
      {{7, 5}, {0, 1}},       {{1000, 3}, {0}},       {{3, 1000}, {1}},
      {{3, 1000}, {0}},       {{1000, 3}, {1}},       {{33, 65, 17}, {1}},
      {{33, 65, 17}, {-1}},   {{33, 65, 17}, {0}},    {{33, 65, 17}, {0, 2}},
      {{5, 6, 7, 8}, {1, 2}}, {{5, 6, 7, 8}, {0, 3}}, {{5, 6, 7, 8}, {0, 2}},
      {{300, 301}, {0}},      {{2, 70001}, {1}},      {{70001, 2}, {0}},
      {{1, 200003}, {1}},     {{200003, 1}, {0}},     {{4, 0}, {0}},
      {{0, 4}, {1}},          {{9, 9}, {}},
  };
  for (const auto& [shape, axes] : cases) {
    const std::int64_t n = MakeArrayType(GetParam().dtype, shape)->shape.elements();
    for (ReduceOp op : OpsToTry()) CheckArray<T>(shape, Data<T>(op, n, 8), op, axes, 1);
  }
}

// Few long outputs, many short outputs, and both with extents that are not multiples of a vector.
TESSERA_TYPED_TEST(ReduceAxesTest, TallWideAndMiddle) {
  const AxesCase cases[] = {
      {{16, 300000}, {0}},   {{16, 300000}, {1}},  {{300000, 16}, {0}},  {{300000, 16}, {1}},
      {{1000, 1000}, {0}},   {{1000, 1000}, {1}},  {{3, 70001, 5}, {1}}, {{40, 333, 77}, {1}},
      {{70000, 4, 4}, {1}},  {{50001, 3, 3}, {1}}, {{4099, 257}, {0}},   {{257, 4099}, {1}},
      {{2, 5000, 256}, {1}}, {{64, 64}, {0}},      {{70001, 1}, {1}},    {{70001, 2}, {1}},
      {{40001, 3}, {1}},     {{20001, 7}, {1}},    {{9001, 3, 2}, {1}},
  };
  for (auto [shape, axes] : cases) {
    // From 2^16 elements on, a CPU uses all cores, so shorter arrays reach those paths as well.
    std::int64_t n = MakeArrayType(GetParam().dtype, shape)->shape.elements();
    const std::int64_t most = std::min(Largest(), std::int64_t{1} << 19);
    if (std::int64_t& longest = *std::ranges::max_element(shape);
        GetParam().backend == Backend::kCpu && n > most) {
      n /= longest;
      longest = std::max<std::int64_t>(1, most / n);
      n *= longest;
    }
    const std::vector<T> values = NormalVector<T>(n, 12, 0.25);
    for (std::size_t offset : {0u, 1u}) {
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kArgMax, ReduceOp::kVariance}) {
        if (op == ReduceOp::kVariance && offset == 1) continue;  // Its reference is slow.
        if (WatchedClosely() && (op != ReduceOp::kArgMax || offset == 1)) continue;
        CheckArray(shape, values, op, axes, offset);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TESSERA_STRATEGY_SUITE(DeterministicReduceAxesTest, ReduceAxesTest, kDeterministic);

// The order in which elements are folded depends on the shape and not on the address.
TESSERA_TYPED_TEST(DeterministicReduceAxesTest, AlignmentKeepsTheBits) {
  for (const auto& [rows, columns, axis] :
       {std::tuple{700, 1001, 0}, {700, 1001, 1}, {20001, 3, 1}}) {
    const ArrayType type{GetParam().dtype, MakeShape({rows, columns})};
    const std::vector<T> values = NormalVector<T>(rows * columns, 13, 0.25);
    std::vector<std::int64_t> first;
    for (std::size_t offset : {0u, 1u, 2u, 3u, 0u}) {
      if (WatchedClosely() && offset > 1) continue;
      DeviceArray<T> array(stream(), values, offset);
      // Results of any type fit in a 64-bit word.
      const auto got = Run<std::int64_t>(WholeView(type, array.data()), ReduceOp::kSum, axis);
      if (first.empty()) first = got;
      EXPECT_EQ(got, first) << columns << " columns, axis " << axis << ", offset " << offset;
    }
  }
}

TESSERA_TYPED_TEST(ReduceAxesTest, StridedViews) {
  const ArrayType type{GetParam().dtype, MakeShape({40, 50})};
  const std::vector<T> values = NormalVector<T>(40 * 50, 9);
  DeviceArray<T> array(stream(), values);
  for (const std::vector<int>& axes : {std::vector<int>{0}, {1}, {2}, {0, 2}}) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kArgMin}) {
      const auto view = [&](const T* data) {
        return Get(MakeView(type, data, 39 * 50, {5, 20, 10}, {1, -50, 3}));
      };
      Check<T>(view(values.data()), view(array.data()), op, axes);
    }
  }
}

// Folds the same vectors as three rows and as three columns.
TESSERA_TYPED_TEST(ReduceAxesTest, SpecialRows) {
  for (std::int64_t n : Sizes({1, 2, 9, 100, 1024, 3000, 70001})) {
    if (n > 3000 && !std::is_integral_v<T>) continue;  // The references are slow.
    ForSpecialRows<T>(n, [&](const std::vector<ReduceOp>& ops, const std::vector<T>& x) {
      std::vector<T> rows, columns;
      for (int copy = 0; copy < 3; ++copy) rows.insert(rows.end(), x.begin(), x.end());
      for (T v : x) columns.insert(columns.end(), 3, v);
      for (ReduceOp op : ops) {
        CheckArray({3, n}, rows, op, {1});
        CheckArray({n, 3}, columns, op, {0});
      }
    });
  }
}

TESSERA_STRATEGY_SUITE(ReduceAxesOf16BitsTest, ReduceAxesTest, kOf<DType::kF16, DType::kBF16>);

TESSERA_TYPED_TEST_OF(HalfElement, ReduceAxesOf16BitsTest, AreRoundedOnce) {
  const auto [terms, want] = HardToRound<T>();
  DeviceArray<T> array(stream(), terms);
  // Folds along a row, where no strategy adds these elements in f32.
  const T sum = Run<T>(array.view({1, 3}), ReduceOp::kSum, 1)[0];
  EXPECT_EQ(static_cast<double>(Exact(sum)), want);
}

TESSERA_STRATEGY_SUITE(ReduceAxesOfWideRangeTest, ReduceAxesTest, kOf<DType::kF32, DType::kBF16>);

TESSERA_TYPED_TEST_OF(FloatElement, ReduceAxesOfWideRangeTest, SumsMayLeaveTheRangeOnTheirWay) {
  for (const auto& [outputs, length] :
       {std::pair<std::int64_t, std::int64_t>{9, 700}, {64, 64}, {3, 70001}, {2000, 5}}) {
    for (int axis : {0, 1}) {
      const ArrayType type{GetParam().dtype,
                           axis == 1 ? MakeShape({outputs, length}) : MakeShape({length, outputs})};
      const auto at = [&](std::int64_t o, std::int64_t l) {
        return static_cast<std::size_t>(axis == 1 ? o * length + l : l * outputs + o);
      };
      std::vector<T> plain = NormalVector<T>(outputs * length, 17), values = plain;
      // The outputs are a mean of large elements, a sum that cancels, an infinity, and unchanged
      // finite values.
      for (std::int64_t o = 0; o < outputs; o += 3)
        for (std::int64_t l = 0; l < length; ++l)
          values[at(o, l)] = Element<T>(o % 2 == 0 || l < length / 2 ? 3e38 : -3e38);
      values[at(1, length - 1)] = Element<T>(-kInfinity);
      DeviceArray<T> array(stream(), values), before(stream(), plain);
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kNormL1}) {
        Check<T>(WholeView(type, values.data()), WholeView(type, array.data()), op, {axis});
        const std::vector<T> got = Run<T>(WholeView(type, array.data()), op, axis),
                             want = Run<T>(WholeView(type, before.data()), op, axis);
        for (std::size_t o = 2; o < got.size(); o += 3)
          EXPECT_EQ(Exact(got[o]), Exact(want[o])) << "output " << o;
      }
    }
  }
}

TESSERA_TYPED_TEST(ReduceAxesTest, NanAndTies) {
  std::vector<T> values(130 * 70);
  Random random(10);
  for (T& v : values) v = static_cast<T>(static_cast<ValueOf<T>>(random.Bits() % 4));
  for (int i = 0; i < 40 && !IsInteger(GetParam().dtype); ++i)
    values[random.Bits() % values.size()] = Element<T>(std::nan(""));
  for (int axis : {0, 1})
    for (ReduceOp op : {ReduceOp::kArgMin, ReduceOp::kArgMax})
      CheckArray({130, 70}, values, op, {axis});
}

TESSERA_STRATEGIES(ReduceAxesTest);

TEST(Int128, RoundsToTheNearestDouble) {
  Random random(18);
  for (int i = 0; i < 100000; ++i) {
    // The numbers have any length, and many have few bits set or a tie to round.
    std::uint64_t high = random.Bits() >> (random.Bits() % 64), low = random.Bits();
    if (i % 3 == 0) low &= random.Bits() & random.Bits() & random.Bits();
    if (i % 5 == 0) high >>= 63;
    if (i % 7 == 0) low = std::uint64_t{1} << (random.Bits() % 64);
    if (i % 11 == 0) high = 0x0020000000000001u;
    if (i % 2 == 0) {
      high = ~high;
      low = 0 - low;
    }
    Int128 x;
    x.high = static_cast<std::int64_t>(high);
    x.low = low;
    __extension__ const auto want = static_cast<__int128>(
        static_cast<unsigned __int128>(high) << 64 | static_cast<unsigned __int128>(low));
    ASSERT_EQ(static_cast<double>(x), static_cast<double>(want)) << high << " " << low;
    __extension__ const auto twice =
        static_cast<__int128>(2 * static_cast<unsigned __int128>(want));
    ASSERT_EQ(static_cast<double>(WrapAdd(x, x)), static_cast<double>(twice));
  }
}

TEST(ReduceAxesErrors, AxesAndEmptiness) {
  const View x = WholeView({DType::kF32, MakeShape({3, 4})}, nullptr);
  for (const std::vector<int>& axes : {std::vector<int>{2}, {-3}, {1, -1}})
    EXPECT_EQ(ErrorReason(ReduceAxesType(x, ReduceOp::kSum, axes, false).status()), "BAD_AXES");
  const View empty = WholeView({DType::kF32, MakeShape({3, 0})}, nullptr);
  EXPECT_EQ(ErrorReason(ReduceAxesType(empty, ReduceOp::kMin, {1}, false).status()), "EMPTY_INPUT");
  EXPECT_TRUE(ReduceAxesType(empty, ReduceOp::kMin, {0}, false).ok());
  EXPECT_TRUE(ReduceAxesType(empty, ReduceOp::kSum, {1}, false).ok());
  const auto kept = Get(ReduceAxesType(x, ReduceOp::kArgMax, {-1}, true));
  EXPECT_EQ(kept.dtype, DType::kI64);
  EXPECT_EQ(ToString(kept.shape), "[3, 1]");
}

}  // namespace
}  // namespace tessera::test
