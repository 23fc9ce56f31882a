// Every strategy of Reduce and of reductions along axes, from the table, for every operation,
// against references in long double with the strategy's own bound, and NumPy's rules for NaN, ties
// and empty inputs.
#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
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
  std::int64_t integer = 0;  // of exact integer results, in 64 bits that wrap
};

template <class T>
Reference ReduceReference(ReduceOp op, const std::vector<T>& x) {
  Reference r;
  ExactSum sum;
  const auto n = static_cast<long double>(x.size());
  const auto before = [&](long double a, long double b) {  // whether a beats b, b standing earlier
    if (std::isnan(b)) return false;
    if (std::isnan(a)) return true;
    return op == ReduceOp::kMin || op == ReduceOp::kArgMin ? a < b : a > b;
  };
  const auto bits = [](T v) { return static_cast<std::int64_t>(static_cast<ValueOf<T>>(v)); };
  if constexpr (std::is_integral_v<T>) {
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
      // Differences from the first element: far from zero even a long double has too few digits.
      const auto apart = [&](T v) { return Exact(v) - Exact(x[0]); };
      long double mean = 0;
      for (T v : x) mean += apart(v) / n;
      for (T v : x) r.value += (apart(v) - mean) * (apart(v) - mean) / n;
      if (op == ReduceOp::kStd) r.value = std::sqrt(r.value);
      r.scale = r.value;
      return r;
    }
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      for (T v : x) {
        sum.Add(Exact(v));
        r.scale += std::abs(Exact(v));
      }
      break;
    case ReduceOp::kNormL1:
      for (T v : x) sum.Add(std::abs(Exact(v)));
      r.scale = sum.value();
      break;
    case ReduceOp::kNormL2:
    case ReduceOp::kSumSquares:
      for (T v : x) sum.Add(Exact(v) * Exact(v));
      r.scale = sum.value();
      break;
  }
  r.value = sum.value();
  if (op == ReduceOp::kMean) {
    r.value /= n;
    r.scale /= n;
  }
  if (op == ReduceOp::kNormL2) {
    r.value = std::sqrt(r.value);  // halves the relative error
    r.scale = r.value;
  }
  return r;
}

// Products need values near 1 to stay in range.
template <class T>
std::vector<T> Data(ReduceOp op, std::int64_t n, std::uint64_t seed) {
  if (op != ReduceOp::kProduct) return NormalVector<T>(n, seed, 0.25);
  if (sizeof(T) > 2 && !std::is_integral_v<T>) return NormalVector<T>(n, seed, 1.0, 1e-3);
  // Halves are too coarse for that, integers wrap: ones and minus ones, with a few other values.
  std::vector<T> v(static_cast<std::size_t>(n));
  Random random(seed);
  for (T& x : v) x = static_cast<T>(static_cast<ValueOf<T>>(random.Bits() % 2 == 0 ? 1 : -1));
  for (std::int64_t i = 0; i < n; i += n / 7 + 1)
    At(v, i) = static_cast<T>(static_cast<ValueOf<T>>(3));
  return v;
}

class ReduceTest : public StrategyTest<ReduceProblem> {
 protected:
  // Whether the strategy takes the operation. One that does not is asked all the same: it has to
  // say why.
  bool Takes(ReduceOp op, Stream& stream, const View& x) {
    const std::string refusal =
        Refusal(StrategyOf<ReduceProblem>(GetParam()),
                ReduceProblem{.dtype = x.dtype, .op = op, .n = x.elements()});
    if (refusal.empty()) return true;
    const absl::Status status = RunReduce(stream, x, op, options()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(ErrorReason(status), "STRATEGY_UNSUPPORTED");
    EXPECT_EQ(ErrorMetadata(status)["needs"], refusal);
    return false;
  }

  // The test fails where there is no result.
  static ScalarResult Run(const View& x, ReduceOp op, Launch launch = {}) {
    absl::StatusOr<ScalarResult> result = RunReduce(stream(), x, op, options(launch));
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : ScalarResult{};
  }
  template <class T>
  static ScalarResult Run(const std::vector<T>& x, ReduceOp op, std::size_t offset = 0) {
    const DeviceArray<T> array(stream(), x, offset);
    return Run(VectorView(array.data(), std::ssize(x)), op);
  }

  // want: what is known of it.
  template <class T>
  void Check(ReduceOp op, const std::vector<T>& x, Launch launch = {}, std::size_t offset = 0,
             const Reference* want = nullptr) {
    DeviceArray<T> array(stream(), x, offset);
    SCOPED_TRACE(absl::StrCat("block ", launch.block_size, " grid ", launch.grid_size, " items ",
                              launch.items_per_thread, " offset ", offset));
    CheckResident(want != nullptr ? *want : ReduceReference(op, x), op, array, std::ssize(x),
                  launch);
    array.ExpectUnchanged(x);
  }

  template <class T>
  void CheckResident(const Reference& want, ReduceOp op, const DeviceArray<T>& x, std::int64_t n,
                     Launch launch = {}) {
    const View view = VectorView(x.data(), n);
    if (!Takes(op, stream(), view)) return;
    SCOPED_TRACE(absl::StrCat("op ", static_cast<int>(op), " n ", n));
    const ScalarResult result = Run(view, op, launch);
    const bool integer =
        IsInteger(IsArg(op) ? GetParam().dtype : ResultDType(op, GetParam().dtype));
    EXPECT_EQ(result.integer, integer);
    if (IsExact(op, GetParam().dtype)) {
      EXPECT_EQ(result.stats.roundoff, 0);
      if (integer) {
        EXPECT_EQ(result.value.integer, want.integer);
      } else if (std::isnan(static_cast<double>(want.value))) {
        EXPECT_TRUE(std::isnan(result.value.real)) << result.value.real;
      } else {
        EXPECT_EQ(result.value.real, static_cast<double>(want.value));
      }
      if (IsArg(op)) {
        EXPECT_EQ(result.value.index, want.index);
      }
    } else {
      const double bound =
          (result.stats.roundoff + 2 * kRoundoffF64) * static_cast<double>(want.scale);
      EXPECT_LE(std::abs(static_cast<double>(result.value.real - want.value)), bound)
          << "got " << result.value.real << " want " << static_cast<double>(want.value);
      EXPECT_LT(result.stats.roundoff, 1e-3);
    }
  }
};

// All operations, or one for each number of values that a strategy carries along.
absl::Span<const ReduceOp> OpsToTry() {
  static constexpr ReduceOp kOfEachKind[] = {ReduceOp::kSum, ReduceOp::kArgMax,
                                             ReduceOp::kVariance};
  return WatchedClosely() ? absl::MakeConstSpan(kOfEachKind) : absl::MakeConstSpan(kAllReduceOps);
}

TEST_P(ReduceTest, AwkwardSizes) {
  ForType([&]<class T>(T) {
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
  });
}

TEST_P(ReduceTest, LaunchesAndAlignments) {
  ForType([&]<class T>(T) {
    for (const Launch& launch : Launches(limits()))
      for (ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kArgMax, ReduceOp::kNormL2, ReduceOp::kVariance})
        for (std::int64_t n : Sizes({1, 33, 4099, 70001}))
          if (!WatchedClosely() || (op == ReduceOp::kArgMax && n == 4099))
            Check<T>(op, Data<T>(op, n, 2), launch, n % 4);
  });
}

TEST_P(ReduceTest, NanTiesAndInfinities) {
  ForType([&]<class T>(T) {
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kArgMin, ReduceOp::kArgMax}) {
      for (std::int64_t n : Sizes({1, 5, 257, 70001})) {
        std::vector<T> ties(static_cast<std::size_t>(n), Element<T>(3));
        Check<T>(op, ties);
        At(ties, n / 2) = ties.back() =
            Element<T>(op == ReduceOp::kMin || op == ReduceOp::kArgMin ? -1 : 9);
        Check<T>(op, ties);
        if constexpr (std::is_integral_v<T>) {
          Check<T>(op, std::vector<T>(static_cast<std::size_t>(n), std::numeric_limits<T>::max()));
          Check<T>(op, std::vector<T>(static_cast<std::size_t>(n), std::numeric_limits<T>::min()));
        } else {
          const double inf = std::numeric_limits<double>::infinity();
          Check<T>(op, std::vector<T>(static_cast<std::size_t>(n), Element<T>(inf)));
          Check<T>(op, std::vector<T>(static_cast<std::size_t>(n), Element<T>(-inf)));
          std::vector<T> nans = Data<T>(op, n, 3);
          At(nans, n / 3) = At(nans, n - 1) = Element<T>(std::numeric_limits<double>::quiet_NaN());
          Check<T>(op, nans);
        }
      }
    }
  });
}

TESSERA_STRATEGY_SUITE(ReduceOfFloatsTest, ReduceTest, kFloats);

TEST_P(ReduceOfFloatsTest, NanPropagates) {
  ForType([&]<class T>(T) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMean, ReduceOp::kNormL1,
                        ReduceOp::kNormL2, ReduceOp::kVariance}) {
      std::vector<T> x = Data<T>(op, 4099, 4);
      x[4000] = Element<T>(std::numeric_limits<double>::quiet_NaN());
      DeviceArray<T> array(stream(), x);
      const View view = VectorView(array.data(), 4099);
      if (!Takes(op, stream(), view)) continue;
      EXPECT_TRUE(std::isnan(Run(view, op).value.real)) << static_cast<int>(op);
    }
  });
}

TESSERA_STRATEGY_SUITE(ReduceOfIntegersTest, ReduceTest, kIntegers);

TEST_P(ReduceOfIntegersTest, Wrap) {
  ForType([&]<std::integral T>(T) {
    std::vector<T> x(5001);
    Random random(11);
    for (T& v : x) v = static_cast<T>(random.Bits() | 1);
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kNormL1,
                        ReduceOp::kSumSquares, ReduceOp::kMin, ReduceOp::kArgMax})
      Check<T>(op, x);
    Check<T>(ReduceOp::kNormL1, {std::numeric_limits<T>::min()});
  });
}

TEST_P(ReduceTest, ZerosDecideAllAndAny) {
  ForType([&]<class T>(T) {
    for (ReduceOp op : {ReduceOp::kAll, ReduceOp::kAny}) {
      for (std::int64_t n : Sizes({1, 257, 70001})) {
        for (double value : {0.0, -0.0, 1.0}) {
          std::vector<T> x(static_cast<std::size_t>(n), Element<T>(value));
          Check<T>(op, x);
          At(x, n - 1) = Element<T>(1 - std::abs(value));
          Check<T>(op, x);
        }
      }
    }
  });
}

TESSERA_STRATEGY_SUITE(ReduceOfF32Test, ReduceTest, kOf<DType::kF32>);

TEST_P(ReduceOfF32Test, SquaresLeaveTheRange) {
  Check<float>(ReduceOp::kNormL2, std::vector<float>(1000, 1e30f));
  Check<float>(ReduceOp::kNormL2, std::vector<float>(1000, 1e-30f));
  Check<float>(ReduceOp::kProduct, {1e30f, 1e30f, 1e-30f, 1e-30f, 2.0f});
}

// Whether the strategy has a variance of this floating-point type.
bool HasVariance(const Strategy<ReduceProblem>& strategy, DType dtype) {
  return !IsInteger(dtype) &&
         Refusal(strategy, {.dtype = dtype, .op = ReduceOp::kVariance, .n = 1}).empty();
}

// Of floating-point types.
TESSERA_STRATEGY_SUITE(VarianceTest, ReduceTest, HasVariance);

// Far from zero the mean has no digits left for the differences.
TEST_P(VarianceTest, FarFromZero) {
  ForType([&]<class T>(T) {
    // Up to here the type has three consecutive integers.
    const double far = 0.25 / UnitRoundoff(GetParam().dtype);
    for (std::int64_t n : Sizes({3, 999, 15000, 70001})) {
      std::vector<T> x;
      for (std::int64_t i = 0; i < n; ++i)
        x.push_back(Element<T>(far + static_cast<double>(i % 3)));
      Check<T>(ReduceOp::kVariance, x, {}, 1);
      Check<T>(ReduceOp::kStd, x);
    }
  });
}

// The squares are beyond the range of every type, also of double; their root is not.
TEST_P(VarianceTest, RootsStayInTheRange) {
  ForType([&]<class T>(T) {
    const int most =
                  std::is_same_v<T, Half> ? 15 : std::numeric_limits<ValueOf<T>>::max_exponent - 10,
              least = std::is_same_v<T, Half> ? -20 : std::numeric_limits<ValueOf<T>>::min_exponent;
    for (int exponent : {most, most / 2 + 1, least / 2 - 3, least}) {
      for (std::int64_t n : Sizes({2, 1000, 5001})) {
        std::vector<T> x;
        for (std::int64_t i = 0; i < n; ++i)
          x.push_back(Element<T>(std::ldexp(i % 2 == 0 ? 1 : -0.5, exponent)));
        Check<T>(ReduceOp::kStd, x);
        if (Refusal(StrategyOf<ReduceProblem>(GetParam()),
                    {.dtype = GetParam().dtype, .op = ReduceOp::kNormL2, .n = n})
                .empty())
          Check<T>(ReduceOp::kNormL2, x);
      }
    }
  });
}

// One element that is not finite leaves no deviation from the mean that is.
TEST_P(VarianceTest, OfWhatIsNotFinite) {
  ForType([&]<FloatElement T>(T) {
    const double inf = std::numeric_limits<double>::infinity();
    for (double special : {inf, -inf, std::numeric_limits<double>::quiet_NaN()}) {
      for (std::int64_t n : Sizes({1, 2, 5, 257, 4099})) {
        for (std::int64_t at : {std::int64_t{0}, n / 2, n - 1}) {
          std::vector<T> x = NormalVector<T>(n, 14);
          At(x, at) = Element<T>(special);
          const double got = Run(x, ReduceOp::kVariance).value.real;
          EXPECT_TRUE(std::isnan(got)) << special << " at " << at << " of " << n << ": " << got;
        }
      }
    }
  });
}

TESSERA_STRATEGY_SUITE(VarianceOfF64Test, ReduceTest, [](const auto& strategy, DType dtype) {
  return dtype == DType::kF64 && HasVariance(strategy, dtype);
});

TEST_P(VarianceOfF64Test, BeyondTheRangeIsInfinite) {
  std::vector<std::vector<double>> inputs = {{1.7e308, -1.7e308, 1.7e308, -1.7e308}};
  for (std::int64_t n : Sizes({2, 1024, 4099, 70001})) {
    std::vector<double> x(static_cast<std::size_t>(n));
    x[0] = 1e200;
    At(x, n * 7 / 10) = 1;
    inputs.push_back(x);
    x.back() = -1e200;
    inputs.push_back(x);
  }
  for (const std::vector<double>& x : inputs)
    EXPECT_EQ(Run(x, ReduceOp::kVariance).value.real, std::numeric_limits<double>::infinity())
        << x.size();
}

// The sum in 128 bits, rounded once, and then the quotient: the same in every strategy.
template <class T>
double IntegerMean(const std::vector<T>& x) {
  __extension__ __int128 sum = 0;
  for (T v : x) sum += v;
  return static_cast<double>(sum) / static_cast<double>(x.size());
}

// Integers whose sums leave 64 bits, or lie around the ends of their type.
template <class T>
std::vector<std::vector<T>> IntegersToAverage() {
  constexpr T kMax = std::numeric_limits<T>::max(), kMin = std::numeric_limits<T>::min();
  std::vector<std::vector<T>> inputs = {
      {kMax}, {kMin}, {kMax, kMax}, {kMin, kMin, kMin}, {kMax, kMin, kMax, -1, kMax}};
  for (std::int64_t n : Sizes({33, 4099, 70001})) {
    const auto size = static_cast<std::size_t>(n);
    inputs.emplace_back(size, kMax);
    inputs.emplace_back(size, kMin);
    std::vector<T> x(size);
    Random random(15);
    for (T& v : x) v = static_cast<T>(random.Bits());
    inputs.push_back(x);
    for (T& v : x) v = static_cast<T>(kMax - (v & 0xff));
    inputs.push_back(x);
  }
  return inputs;
}

TEST_P(ReduceOfIntegersTest, MeansDoNotWrap) {
  ForType([&]<std::integral T>(T) {
    for (const std::vector<T>& x : IntegersToAverage<T>()) {
      const ScalarResult result = Run(x, ReduceOp::kMean, 1);
      EXPECT_EQ(result.value.real, IntegerMean(x)) << x.size() << " of " << x[0];
      EXPECT_EQ(result.stats.roundoff, 0x1p-52);
    }
  });
}

TEST_P(ReduceTest, EmptyInputs) {
  const View empty = WholeView({GetParam().dtype, MakeShape({3, 0})}, nullptr);
  for (ReduceOp op : kAllReduceOps) {
    if (!NeedsElements(op) && !Takes(op, stream(), empty)) continue;
    const auto result = RunReduce(stream(), empty, op, options());
    if (NeedsElements(op)) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(ErrorReason(result.status()), "EMPTY_INPUT");
    } else {
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->integer ? static_cast<double>(result->value.integer) : result->value.real,
                op == ReduceOp::kProduct || op == ReduceOp::kAll ? 1 : 0);
    }
  }
}

TESSERA_STRATEGY_SUITE(DeterministicReduceTest, ReduceTest, kDeterministic);

TEST_P(DeterministicReduceTest, RepeatsItsBits) {
  ForType([&]<class T>(T) {
    const std::int64_t n = Sizes({4099, 300007}).back();
    DeviceArray<T> x(stream(), NormalVector<T>(n, 5));
    const ScalarResult first = Run(VectorView(x.data(), n), ReduceOp::kSum);
    for (int i = 1; i < 10; ++i) {
      const ScalarResult result = Run(VectorView(x.data(), n), ReduceOp::kSum);
      EXPECT_EQ(result.value.real, first.value.real);
      EXPECT_EQ(result.value.integer, first.value.integer);
    }
  });
}

TEST_P(ReduceTest, StridedViewKeepsRowMajorIndices) {
  ForType([&]<class T>(T) {
    const std::vector<T> values = NormalVector<T>(30 * 40, 6);
    DeviceArray<T> array(stream(), values);
    const auto view = MakeView({GetParam().dtype, MakeShape({30, 40})}, array.data(), 29 * 40 + 39,
                               {40, 15}, {-1, -80});
    ASSERT_TRUE(view.ok()) << view.status();
    std::vector<T> gathered;
    for (int i = 0; i < 40; ++i)
      for (int j = 0; j < 15; ++j) gathered.push_back(At(values, 29 * 40 + 39 - i - 80 * j));
    for (ReduceOp op : {ReduceOp::kArgMin, ReduceOp::kArgMax}) {
      if (Takes(op, stream(), *view)) {
        EXPECT_EQ(Run(*view, op).value.index, ReduceReference(op, gathered).index);
      }
    }
  });
}

// Arrays of LargeSize and what they reduce to, which take longer than all the rows together: made
// once for each type and device.
template <class T>
struct LargeInput {
  DeviceArray<T> ones, x;
  Reference sum, arg_min, sum_squares;  // of x

  static const LargeInput& Of(Backend backend) {
    static auto& inputs = *new std::map<Backend, LargeInput>;
    if (const auto it = inputs.find(backend); it != inputs.end()) return it->second;
    const std::int64_t n = LargeSize(backend);
    Stream& stream = TestStream(backend);
    DeviceArray<T> ones(stream,
                        std::vector<T>(static_cast<std::size_t>(n), static_cast<T>(ValueOf<T>(1))));
    const std::vector<T> x = NormalVector<T>(n, 7, 0.25);
    LargeInput& input = inputs
                            .try_emplace(backend, std::move(ones), DeviceArray<T>(stream, x),
                                         Reference{}, Reference{}, Reference{})
                            .first->second;
    struct Piece {
      Reference sum, arg_min, sum_squares;
    };
    const auto pieces = ForPieces(n, [&](std::int64_t first, std::int64_t end) {
      const std::vector<T> part(x.begin() + first, x.begin() + end);
      Piece piece{ReduceReference(ReduceOp::kSum, part), ReduceReference(ReduceOp::kArgMin, part),
                  ReduceReference(ReduceOp::kSumSquares, part)};
      piece.arg_min.index += first;
      return piece;
    });
    input.arg_min = pieces[0].arg_min;
    for (const Piece& piece : pieces) {
      Add(piece.sum, input.sum);
      Add(piece.sum_squares, input.sum_squares);
      if (piece.arg_min.value < input.arg_min.value) input.arg_min = piece.arg_min;
    }
    return input;
  }

 private:
  static void Add(const Reference& piece, Reference& all) {
    all.value += piece.value;
    all.scale += piece.scale;
    all.integer = WrapAdd(all.integer, piece.integer);
  }
};

TEST_P(ReduceTest, Large) {
  ForType([&]<class T>(T) {
    const std::int64_t n = LargeSize(GetParam().backend);
    const auto& input = LargeInput<T>::Of(GetParam().backend);
    // The classic failure: a float that counts stops at 2^24.
    const ScalarResult sum = Run(VectorView(input.ones.data(), n), ReduceOp::kSum);
    EXPECT_EQ(sum.integer ? static_cast<double>(sum.value.integer) : sum.value.real,
              static_cast<double>(n));
    CheckResident(input.sum, ReduceOp::kSum, input.x, n);
    CheckResident(input.arg_min, ReduceOp::kArgMin, input.x, n);
    CheckResident(input.sum_squares, ReduceOp::kSumSquares, input.x, n);
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, ReduceTest, testing::ValuesIn(StrategyCases<ReduceProblem>()),
                         CaseName);

// --- Along axes ---------------------------------------------------------------------------------

struct AxesCase {
  std::vector<std::int64_t> shape;
  std::vector<int> axes;
};

class ReduceAxesTest : public StrategyTest<ReduceAxesProblem> {
 protected:
  // The test fails where there is no result.
  template <class Out>
  static std::vector<Out> Run(const View& x, ReduceOp op, int axis) {
    DeviceArray<Out> out(stream(), x.elements() / x.shape[axis]);
    const auto stats = RunReduceAxes(stream(), x, op, {axis}, out.data(), options());
    EXPECT_TRUE(stats.ok()) << stats.status();
    return out.Values();
  }

  // host and device: the same view of the same elements, folded on the host element by element.
  template <class T>
  void Check(const View& host, const View& device, ReduceOp op, const std::vector<int>& axes) {
    const auto type = ReduceAxesType(device, op, axes, false);
    ASSERT_TRUE(type.ok()) << type.status();
    bool folded[kMaxRank] = {};
    for (int a : axes) folded[a < 0 ? a + host.shape.rank : a] = true;

    // Every output's elements, in row-major order.
    std::vector<std::vector<T>> groups(static_cast<std::size_t>(type->shape.elements()));
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
      DeviceArray<Out> out(stream(), type->shape.elements());
      const auto stats = RunReduceAxes(stream(), device, op, axes, out.data(),
                                       {.strategy = GetParam().name, .timing = true});
      ASSERT_TRUE(stats.ok()) << stats.status();
      const std::vector<Out> got = out.Values();
      for (std::size_t i = 0; i < got.size(); ++i) {
        const Reference want = ReduceReference(op, groups[i]);
        if (IsArg(op)) {
          ASSERT_EQ(static_cast<std::int64_t>(Exact(got[i])), want.index) << "output " << i;
        } else if (IsInteger(type->dtype)) {
          ASSERT_EQ(static_cast<std::int64_t>(Exact(got[i])), want.integer) << "output " << i;
        } else if (const double rounded = static_cast<double>(
                       Exact(static_cast<Out>(static_cast<ValueOf<Out>>(want.value))));
                   !std::isfinite(rounded)) {  // a NaN, or beyond the largest f16
          ASSERT_EQ(std::isnan(static_cast<double>(Exact(got[i]))), std::isnan(rounded)) << i;
          ASSERT_EQ(std::isinf(static_cast<double>(Exact(got[i]))), std::isinf(rounded)) << i;
        } else {
          // Below 2^-14 the f16 lie 2^-24 apart.
          const double output_rounding =
              2 * static_cast<double>(std::abs(want.value)) * UnitRoundoff(type->dtype) +
              (type->dtype == DType::kF16 ? 0x1p-25 : 0);
          ASSERT_LE(std::abs(static_cast<double>(Exact(got[i]) - want.value)),
                    stats->roundoff * static_cast<double>(want.scale) * 1.01 + output_rounding)
              << "output " << i << " op " << static_cast<int>(op);
        }
      }
    };
    DispatchDType(type->dtype, run);
  }
};

TEST_P(ReduceAxesTest, ShapesAndAxes) {
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
  ForType([&]<class T>(T) {
    for (const AxesCase& c : cases) {
      const auto type = MakeArrayType(GetParam().dtype, c.shape);
      ASSERT_TRUE(type.ok());
      for (ReduceOp op : OpsToTry()) {
        SCOPED_TRACE(absl::StrCat("shape ", ToString(type->shape), " op ", static_cast<int>(op),
                                  " first axis ", c.axes.empty() ? -99 : c.axes[0]));
        const std::vector<T> values = Data<T>(op, type->shape.elements(), 8);
        DeviceArray<T> array(stream(), values, 1);
        Check<T>(WholeView(*type, values.data()), WholeView(*type, array.data()), op, c.axes);
      }
    }
  });
}

// Shapes that take every layout of a block: few long outputs, many short ones, and both kinds with
// extents that no vector divides.
TEST_P(ReduceAxesTest, TallWideAndMiddle) {
  const AxesCase cases[] = {
      {{16, 300000}, {0}},   {{16, 300000}, {1}},  {{300000, 16}, {0}},  {{300000, 16}, {1}},
      {{1000, 1000}, {0}},   {{1000, 1000}, {1}},  {{3, 70001, 5}, {1}}, {{40, 333, 77}, {1}},
      {{70000, 4, 4}, {1}},  {{50001, 3, 3}, {1}}, {{4099, 257}, {0}},   {{257, 4099}, {1}},
      {{2, 5000, 256}, {1}}, {{64, 64}, {0}},      {{70001, 1}, {1}},    {{70001, 2}, {1}},
      {{40001, 3}, {1}},     {{20001, 7}, {1}},    {{9001, 3, 2}, {1}},
  };
  ForType([&]<class T>(T) {
    for (AxesCase c : cases) {
      // A GPU picks its layouts by these lengths. Shorter ones reach a CPU's paths, too: of more
      // than 2^16 elements it uses all cores, and every 1024 steps it looks whether to stop.
      if (GetParam().backend == Backend::kCpu)
        ShrinkTo(std::min(Largest(), std::int64_t{1} << 19), c.shape);
      const auto type = MakeArrayType(GetParam().dtype, c.shape);
      ASSERT_TRUE(type.ok());
      const std::vector<T> values = NormalVector<T>(type->shape.elements(), 12, 0.25);
      for (std::size_t offset : {0u, 1u}) {
        DeviceArray<T> array(stream(), values, offset);
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kArgMax, ReduceOp::kVariance}) {
          if (op == ReduceOp::kVariance && offset == 1) continue;  // its reference is slow
          if (WatchedClosely() && (op != ReduceOp::kArgMax || offset == 1)) continue;
          SCOPED_TRACE(absl::StrCat("shape ", ToString(type->shape), " axis ", c.axes[0], " op ",
                                    static_cast<int>(op), " offset ", offset));
          Check<T>(WholeView(*type, values.data()), WholeView(*type, array.data()), op, c.axes);
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

TESSERA_STRATEGY_SUITE(DeterministicReduceAxesTest, ReduceAxesTest, kDeterministic);

// The order of a fold is the shape's, not the address's.
TEST_P(DeterministicReduceAxesTest, AlignmentKeepsTheBits) {
  ForType([&]<class T>(T) {
    for (const auto& [rows, columns, axis] :
         {std::tuple{700, 1001, 0}, {700, 1001, 1}, {20001, 3, 1}}) {
      const ArrayType type{GetParam().dtype, MakeShape({rows, columns})};
      const std::vector<T> values = NormalVector<T>(rows * columns, 13, 0.25);
      std::vector<std::int64_t> first;
      for (std::size_t offset : {0u, 1u, 2u, 3u, 0u}) {
        if (WatchedClosely() && offset > 1) continue;
        DeviceArray<T> array(stream(), values, offset);
        // Words of 64 bits, which hold a result of any type.
        const auto got = Run<std::int64_t>(WholeView(type, array.data()), ReduceOp::kSum, axis);
        if (first.empty()) first = got;
        EXPECT_EQ(got, first) << columns << " columns, axis " << axis << ", offset " << offset;
      }
    }
  });
}

TEST_P(ReduceAxesTest, StridedViews) {
  ForType([&]<class T>(T) {
    const ArrayType type{GetParam().dtype, MakeShape({40, 50})};
    const std::vector<T> values = NormalVector<T>(40 * 50, 9);
    DeviceArray<T> array(stream(), values);
    for (const std::vector<int>& axes : {std::vector<int>{0}, {1}, {2}, {0, 2}}) {
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kArgMin}) {
        const auto host = MakeView(type, values.data(), 39 * 50, {5, 20, 10}, {1, -50, 3});
        const auto device = MakeView(type, array.data(), 39 * 50, {5, 20, 10}, {1, -50, 3});
        ASSERT_TRUE(host.ok() && device.ok()) << host.status();
        Check<T>(*host, *device, op, axes);
      }
    }
  });
}

TESSERA_STRATEGY_SUITE(ReduceAxesOfFloatsTest, ReduceAxesTest, kFloats);

TEST_P(ReduceAxesOfFloatsTest, VarianceOfWhatIsNotFinite) {
  ForType([&]<FloatElement T>(T) {
    const double inf = std::numeric_limits<double>::infinity();
    for (const std::vector<std::int64_t>& shape :
         std::vector<std::vector<std::int64_t>>{{1, 9}, {9, 1}, {40, 30}, {3, 3000}, {3000, 3}}) {
      const ArrayType type = *MakeArrayType(GetParam().dtype, shape);
      std::vector<T> values = NormalVector<T>(type.shape.elements(), 16);
      for (std::size_t i = 1; i < values.size(); i += values.size() / 3)
        values[i] = Element<T>(i % 2 == 0 ? inf : i % 3 == 0 ? -inf : inf - inf);
      DeviceArray<T> array(stream(), values);
      for (int axis : {0, 1})
        Check<T>(WholeView(type, values.data()), WholeView(type, array.data()), ReduceOp::kVariance,
                 {axis});
    }
  });
}

TEST_P(ReduceAxesOfFloatsTest, DeviationsFarFromZeroAndBeyondTheRange) {
  ForType([&]<FloatElement T>(T) {
    const double far = 0.25 / UnitRoundoff(GetParam().dtype);
    const bool half = std::is_same_v<T, Half>;
    const int most = half ? 15 : std::numeric_limits<ValueOf<T>>::max_exponent - 10,
              least = half ? -20 : std::numeric_limits<ValueOf<T>>::min_exponent;
    for (const std::vector<std::int64_t>& shape :
         std::vector<std::vector<std::int64_t>>{{1, 9}, {40, 30}, {3, 3000}, {3000, 3}}) {
      const ArrayType type = *MakeArrayType(GetParam().dtype, shape);
      std::vector<T> apart, large, small;
      for (std::int64_t i = 0; i < type.shape.elements(); ++i) {
        apart.push_back(Element<T>(far + static_cast<double>(i * i % 5 % 3)));
        large.push_back(Element<T>(std::ldexp(i * i % 3 == 0 ? 1 : -0.5, most)));
        small.push_back(Element<T>(std::ldexp(i * i % 3 == 0 ? 1 : -0.5, least)));
      }
      for (const std::vector<T>* values : {&apart, &large, &small}) {
        DeviceArray<T> array(stream(), *values);
        for (int axis : {0, 1}) {
          for (ReduceOp op : {ReduceOp::kStd, ReduceOp::kNormL2})
            Check<T>(WholeView(type, values->data()), WholeView(type, array.data()), op, {axis});
          if (values == &apart)
            Check<T>(WholeView(type, values->data()), WholeView(type, array.data()),
                     ReduceOp::kVariance, {axis});
        }
      }
    }
  });
}

TESSERA_STRATEGY_SUITE(ReduceAxesOfF64Test, ReduceAxesTest, kOf<DType::kF64>);

TEST_P(ReduceAxesOfF64Test, VarianceBeyondTheRangeIsInfinite) {
  for (std::int64_t n : {2, 100, 1024}) {
    std::vector<double> values(static_cast<std::size_t>(2 * n));
    values[0] = 1e200;
    At(values, n / 2) = 1;
    At(values, n) = -1e200;
    DeviceArray<double> array(stream(), values);
    for (int axis : {0, 1}) {
      // [2, n], or its columns: neither has a strategy without one of the large elements.
      const auto view =
          MakeView({DType::kF64, MakeShape({2 * n})}, array.data(), 0,
                   {axis == 1 ? 2 : n, axis == 1 ? n : 2}, {axis == 1 ? n : 1, axis == 1 ? 1 : n});
      ASSERT_TRUE(view.ok()) << view.status();
      EXPECT_EQ(Run<double>(*view, ReduceOp::kVariance, axis),
                std::vector<double>(2, std::numeric_limits<double>::infinity()));
    }
  }
}

TESSERA_STRATEGY_SUITE(ReduceAxesOfIntegersTest, ReduceAxesTest, kIntegers);

TEST_P(ReduceAxesOfIntegersTest, MeansDoNotWrap) {
  ForType([&]<std::integral T>(T) {
    for (const std::vector<T>& x : IntegersToAverage<T>()) {
      const std::int64_t n = std::ssize(x);
      // Three of them side by side, as rows and as columns.
      std::vector<T> rows, columns;
      for (int copy = 0; copy < 3; ++copy) rows.insert(rows.end(), x.begin(), x.end());
      for (T v : x) columns.insert(columns.end(), 3, v);
      DeviceArray<T> r(stream(), rows), c(stream(), columns);
      for (int axis : {0, 1}) {
        const View view = axis == 1 ? WholeView({DTypeOf<T>(), MakeShape({3, n})}, r.data())
                                    : WholeView({DTypeOf<T>(), MakeShape({n, 3})}, c.data());
        EXPECT_EQ(Run<double>(view, ReduceOp::kMean, axis), std::vector<double>(3, IntegerMean(x)))
            << n << " of " << x[0];
      }
    }
  });
}

TESSERA_STRATEGY_SUITE(ReduceAxesOf16BitsTest, ReduceAxesTest, kOf<DType::kF16, DType::kBF16>);

// Just above the middle between two values of 16 bits, by less than an f32 holds.
TEST_P(ReduceAxesOf16BitsTest, AreRoundedOnce) {
  ForType([&]<HalfElement T>(T) {
    const bool half = std::is_same_v<T, Half>;
    const std::vector<T> terms = {Element<T>(half ? 2048 : 256), Element<T>(1),
                                  Element<T>(half ? 0x1p-24 : 0x1p-40)};
    const double want = half ? 2050 : 258;
    DeviceArray<T> array(stream(), terms);
    // Along a strategy, where no strategy of the table adds these in f32.
    const View view = WholeView({DTypeOf<T>(), MakeShape({1, 3})}, array.data());
    EXPECT_EQ(static_cast<double>(Exact(Run<T>(view, ReduceOp::kSum, 1)[0])), want);
  });
}

// Types whose elements nearly fill the range of f32.
TESSERA_STRATEGY_SUITE(ReduceAxesOfWideRangeTest, ReduceAxesTest, kOf<DType::kF32, DType::kBF16>);

// Sums that leave the range of f32 on their way, beside sums that do not.
TEST_P(ReduceAxesOfWideRangeTest, SumsMayLeaveTheRangeOnTheirWay) {
  ForType([&]<class T>(T) {
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, BFloat16>) {
      const double inf = std::numeric_limits<double>::infinity();
      for (const auto& [outputs, length] :
           {std::pair<std::int64_t, std::int64_t>{9, 700}, {64, 64}, {3, 70001}, {2000, 5}}) {
        for (int axis : {0, 1}) {
          const ArrayType type = *MakeArrayType(
              GetParam().dtype, axis == 1 ? std::vector<std::int64_t>{outputs, length}
                                          : std::vector<std::int64_t>{length, outputs});
          const auto at = [&](std::int64_t o, std::int64_t l) {
            return static_cast<std::size_t>(axis == 1 ? o * length + l : l * outputs + o);
          };
          std::vector<T> plain = NormalVector<T>(outputs * length, 17), values = plain;
          // By output: a mean of large elements, a sum that cancels, an infinity, finite as before.
          for (std::int64_t o = 0; o < outputs; o += 3) {
            for (std::int64_t l = 0; l < length; ++l) {
              const double large = o % 2 == 0 || l < length / 2 ? 3e38 : -3e38;
              values[at(o, l)] = Element<T>(large);
            }
          }
          values[at(1, length - 1)] = Element<T>(-inf);
          DeviceArray<T> array(stream(), values), before(stream(), plain);
          for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kNormL1}) {
            SCOPED_TRACE(
                absl::StrCat(ToString(type.shape), " axis ", axis, " op ", static_cast<int>(op)));
            Check<T>(WholeView(type, values.data()), WholeView(type, array.data()), op, {axis});
            const std::vector<T> got = Run<T>(WholeView(type, array.data()), op, axis),
                                 want = Run<T>(WholeView(type, before.data()), op, axis);
            for (std::size_t o = 2; o < got.size(); o += 3)
              EXPECT_EQ(Exact(got[o]), Exact(want[o])) << "output " << o;
          }
        }
      }
    }
  });
}

TEST_P(ReduceAxesTest, NanAndTies) {
  ForType([&]<class T>(T) {
    const ArrayType type{GetParam().dtype, MakeShape({130, 70})};
    std::vector<T> values(130 * 70);
    Random random(10);
    for (T& v : values) v = static_cast<T>(static_cast<ValueOf<T>>(random.Bits() % 4));
    for (int i = 0; i < 40 && !IsInteger(GetParam().dtype); ++i)
      values[random.Bits() % values.size()] = Element<T>(std::numeric_limits<double>::quiet_NaN());
    DeviceArray<T> array(stream(), values);
    for (int axis : {0, 1})
      for (ReduceOp op : {ReduceOp::kArgMin, ReduceOp::kArgMax})
        Check<T>(WholeView(type, values.data()), WholeView(type, array.data()), op, {axis});
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, ReduceAxesTest,
                         testing::ValuesIn(StrategyCases<ReduceAxesProblem>()), CaseName);

TEST(Int128, RoundsToTheNearestDouble) {
  Random random(18);
  for (int i = 0; i < 100000; ++i) {
    // Of any length, many with few bits set or a tie to round.
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
  EXPECT_EQ(ErrorReason(ReduceAxesType(x, ReduceOp::kSum, {2}, false).status()), "BAD_AXES");
  EXPECT_EQ(ErrorReason(ReduceAxesType(x, ReduceOp::kSum, {-3}, false).status()), "BAD_AXES");
  EXPECT_EQ(ErrorReason(ReduceAxesType(x, ReduceOp::kSum, {1, -1}, false).status()), "BAD_AXES");
  const View empty = WholeView({DType::kF32, MakeShape({3, 0})}, nullptr);
  EXPECT_EQ(ErrorReason(ReduceAxesType(empty, ReduceOp::kMin, {1}, false).status()), "EMPTY_INPUT");
  EXPECT_TRUE(ReduceAxesType(empty, ReduceOp::kMin, {0}, false).ok());
  EXPECT_TRUE(ReduceAxesType(empty, ReduceOp::kSum, {1}, false).ok());
  const auto kept = ReduceAxesType(x, ReduceOp::kArgMax, {-1}, true);
  ASSERT_TRUE(kept.ok());
  EXPECT_EQ(kept->dtype, DType::kI64);
  EXPECT_EQ(ToString(kept->shape), "[3, 1]");
}

}  // namespace
}  // namespace tessera::test
