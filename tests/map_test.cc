// Every strategy of Map in the table, compared with extended precision, and the code of compiled
// expressions.
#include <array>
#include <functional>
#include <iterator>
#include <numeric>

#ifdef TESSERA_WITH_CUDA
#include "kernels/cuda/compile/compiler.h"
#endif
#include "kernels/choose/map_range.h"
#include "kernels/expression/map_math.h"
#include "kernels/run/stage.h"
#include "kernels/team/share_out.h"
#include "tests/expressions.h"

namespace tessera::test {
namespace {

using Kind = ExpressionNode::Kind;

ExpressionNode Integer(std::int64_t value) { return {.kind = Kind::kInteger, .integer = value}; }
std::vector<std::int64_t> Iota(std::int64_t n) {
  std::vector<std::int64_t> values(static_cast<std::size_t>(n));
  std::iota(values.begin(), values.end(), 0);
  return values;
}
// Returns an expression that applies the operation to as many operands as it takes.
Nodes Alone(MapOp op) {
  Nodes nodes;
  std::vector<std::uint32_t> args;
  for (int i = 0; i < InfoOf(op)->arguments; ++i) {
    args.push_back(static_cast<std::uint32_t>(i));
    nodes.push_back(In(args.back()));
  }
  nodes.push_back(Op(op, args));
  return nodes;
}

// (a - b) * a.
Nodes ReferenceNodes() {
  return {In(0), In(1), Op(MapOp::kSubtract, {0, 1}), Op(MapOp::kMultiply, {2, 0})};
}

class MapTest : public StrategyTest<MapProblem> {
 protected:
#ifdef TESSERA_WITH_CUDA
  void SetUp() override {
    StrategyTest::SetUp();
    compiled::CompileBeforeUse(true);
  }
#endif
  // Returns whether the strategy takes the expression.
  bool Takes(const std::vector<View>& views, const Nodes& nodes) {
    std::vector<DType> dtypes;
    for (const View& view : views) dtypes.push_back(view.dtype);
    const MapProgram program = Get(CompileExpression(nodes, dtypes));
    MapProblem problem;
    problem.program = &program;
    return Refusal(strategy(), problem).empty();
  }

  // Returns the elements, of type Out, of the expression's result.
  template <class Out>
  std::vector<Out> Run(const std::vector<View>& views, const Nodes& nodes,
                       const Launch& launch = {}) {
    const ArrayType type = Get(MapType(views, nodes));
    EXPECT_EQ(type.dtype, DTypeOf<Out>());
    DeviceArray<Out> out(stream(), type.shape.elements());
    Get(RunMap(stream(), views, nodes, out.data(), options(launch)));
    return out.Values();
  }

  // Applies the operation to as many of these operands as it takes.
  template <class T>
  std::vector<T> Run(MapOp op, const std::vector<T>& a, const std::vector<T>& b) {
    DeviceArray<T> da(stream(), a, 1), db(stream(), b, 2);
    std::vector<View> views = {da.view(), db.view()};
    views.resize(static_cast<std::size_t>(InfoOf(op)->arguments));
    const std::vector<T> got = Run<T>(views, Alone(op));
    da.ExpectUnchanged(a);
    db.ExpectUnchanged(b);
    return got;
  }
};

template <class T>
std::vector<T> SpecialValues() {
  using V = ValueOf<T>;
  using Limits = std::numeric_limits<V>;
  std::vector<T> values;
  for (double x : {0.0, 1.0, -1.0, 2.0, -3.0, 7.0, -10.0}) values.push_back(static_cast<T>(V(x)));
  if constexpr (std::is_integral_v<T>) {
    for (V x : {Limits::max(), Limits::min(), V(Limits::max() - 1)}) values.push_back(x);
  } else {
    for (V x : {V(-0.0), V(0.5), V(-2.5), V(1.5), Limits::infinity(), -Limits::infinity(),
                Limits::quiet_NaN(), Limits::denorm_min(), V(6e4), V(-6e-8)})
      values.push_back(static_cast<T>(x));
  }
  Random random(7);
  for (int i = 0; i < 30; ++i) values.push_back(Element<T>(3 * random.Normal()));
  return values;
}

// Returns all pairs of special values, as two vectors.
template <class T>
std::pair<std::vector<T>, std::vector<T>> SpecialPairs() {
  const std::vector<T> values = SpecialValues<T>();
  std::vector<T> a, b;
  for (T x : values) {
    for (T y : values) {
      a.push_back(x);
      b.push_back(y);
    }
  }
  return {a, b};
}

// Whether the values have the same bits. All NaNs count as equal.
template <class T>
bool Same(T a, T b) {
  const long double x = Exact(a), y = Exact(b);
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
  return x == y && std::signbit(x) == std::signbit(y);
}

template <class T>
void ExpectSame(const std::vector<T>& got, const std::vector<T>& want, std::string_view what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(Same(got[i], want[i]))
        << what << " of element " << i << ": " << static_cast<double>(Exact(got[i])) << ", not "
        << static_cast<double>(Exact(want[i]));
  }
}

// A type that holds every sum and product of integers.
__extension__ typedef __int128 Wide;

// The expected results are rounded once from long double or, for F64, computed in F64 on the host.
TESSERA_TYPED_TEST_OF(FloatElement, MapTest, ArithmeticIsRoundedOnce) {
  const auto [a, b] = SpecialPairs<T>();
  const auto check = [&](MapOp op, auto f) {
    std::vector<T> want;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if constexpr (std::is_same_v<T, double>) {
        want.push_back(f(a[i], b[i]));
      } else {
        want.push_back(T(static_cast<float>(f(Exact(a[i]), Exact(b[i])))));
      }
    }
    ExpectSame(Run(op, a, b), want, InfoOf(op)->name);
  };
  check(MapOp::kAdd, [](auto x, auto y) { return x + y; });
  check(MapOp::kSubtract, [](auto x, auto y) { return x - y; });
  check(MapOp::kMultiply, [](auto x, auto y) { return x * y; });
  check(MapOp::kDivide, [](auto x, auto y) { return x / y; });
  check(MapOp::kSqrt, [](auto x, auto) { return std::sqrt(x); });
  check(MapOp::kFloor, [](auto x, auto) { return std::floor(x); });
  check(MapOp::kRound, [](auto x, auto) { return std::nearbyint(x); });
  check(MapOp::kNegate, [](auto x, auto) { return -x; });
  check(MapOp::kMaximum, [](auto x, auto y) { return std::isnan(x) || x >= y ? x : y; });
}

TESSERA_TYPED_TEST_OF(std::integral, MapTest, IntegersWrapAndDivideAsNumPy) {
  const auto [a, b] = SpecialPairs<T>();
  const auto check = [&](MapOp op, auto f) {
    std::vector<T> want;
    // 128 bits hold every product, and the cast keeps the low bits.
    for (std::size_t i = 0; i < a.size(); ++i)
      want.push_back(static_cast<T>(f(static_cast<Wide>(a[i]), static_cast<Wide>(b[i]))));
    ExpectSame(Run(op, a, b), want, InfoOf(op)->name);
  };
  const auto floor_divide = [](Wide x, Wide y) {
    if (y == 0) return Wide{0};
    const Wide q = x / y;
    return q * y != x && (x < 0) != (y < 0) ? q - 1 : q;
  };
  check(MapOp::kAdd, [](Wide x, Wide y) { return x + y; });
  check(MapOp::kMultiply, [](Wide x, Wide y) { return x * y; });
  check(MapOp::kFloorDivide, floor_divide);
  check(MapOp::kRemainder,
        [&](Wide x, Wide y) { return y == 0 ? Wide{0} : x - y * floor_divide(x, y); });
  check(MapOp::kMinimum, [](Wide x, Wide y) { return std::min(x, y); });
  check(MapOp::kAnd, [](Wide x, Wide y) { return x & y; });
  check(MapOp::kOr, [](Wide x, Wide y) { return x | y; });
  check(MapOp::kXor, [](Wide x, Wide y) { return x ^ y; });
  constexpr Wide kBits = 8 * sizeof(T);
  check(MapOp::kShiftLeft,
        [](Wide x, Wide y) { return y < 0 || y >= kBits ? Wide{0} : x * (Wide{1} << y); });
  check(MapOp::kShiftRight, [&](Wide x, Wide y) {
    return y < 0 || y >= kBits ? Wide{x < 0 ? -1 : 0} : floor_divide(x, Wide{1} << y);
  });
  std::vector<T> places = a;
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<T>(i % (kBits + 1));
  const std::vector<T> shifted = Run(MapOp::kShiftRight, a, places);
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_EQ(shifted[i], static_cast<T>(static_cast<Wide>(a[i]) >> places[i]));
  std::vector<T> inverse;
  for (T x : a) inverse.push_back(static_cast<T>(~x));
  ExpectSame(Run(MapOp::kNot, a, {}), inverse, "not");
}

// The digits and exponents of an element type, like those in std::numeric_limits.
template <class T>
struct Format {
  static constexpr bool kHalf = std::is_same_v<T, Half>;
  using Limits = std::numeric_limits<ValueOf<T>>;
  static inline const int kDigits = -std::ilogb(UnitRoundoff(DTypeOf<T>()));
  static constexpr int kLeast = kHalf ? -13 : Limits::min_exponent;
  static constexpr int kMost = kHalf ? 16 : Limits::max_exponent;

  // Returns a unit in the last place of the value. Subnormal values have fewer places.
  static long double Unit(long double value) {
    int exponent = kLeast;
    if (value != 0) std::frexp(value, &exponent);
    return std::ldexp(1.0L, std::max(exponent, kLeast) - kDigits);
  }
  static long double Largest() { return std::ldexp(1 - std::ldexp(1.0L, -kDigits), kMost); }
  static long double Smallest() { return std::ldexp(1.0L, kLeast - kDigits); }
};

// Whether the element is within this number of units in the last place of a value.
template <class T>
bool IsWithin(double units, T got, long double want) {
  const long double value = Exact(got), room = units * Format<T>::Unit(want);
  if (std::isinf(value)) {
    return std::abs(want) + room >= Format<T>::Largest() &&
           std::signbit(value) == std::signbit(want);
  }
  return std::abs(value - want) <= room;
}

// Floors and remainders are exact even if the quotient has more digits than the type, or is
// subnormal.
TESSERA_TYPED_TEST_OF(FloatElement, MapTest, FloorsAndRemaindersAreExact) {
  using V = ValueOf<T>;
  using Limits = std::numeric_limits<V>;
  std::vector<T> a, b;
  constexpr V kInf = Limits::infinity(), kNan = Limits::quiet_NaN(), kTiny = Limits::denorm_min();
  const V special[] = {0, 1, -1, 3, kInf, kNan, Limits::max(), Limits::min(), kTiny};
  for (V x : special) {
    for (V y : special) {
      a.insert(a.end(), {T(x), T(-x), T(x)});
      b.insert(b.end(), {T(y), T(y), T(-y)});
    }
  }
  Random random(17);
  const auto any = [&] {
    const std::uint64_t bits = random.Bits();
    T x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  };
  for (int i = 0; i < (WatchedClosely() ? 500 : 50000); ++i) {
    a.push_back(any());
    b.push_back(any());
    // Products of an integer and the divisor, and the numbers adjacent to these products.
    const auto y = static_cast<V>(random.Normal());
    const auto x = static_cast<V>(std::floor(std::exp2(60 * random.Uniform()))) * y;
    a.insert(a.end(), {T(x), T(std::nextafter(x, V{0})), T(std::nextafter(x, 2 * x))});
    b.insert(b.end(), 3, T(y));
  }
  a.insert(a.end(), {T(V(8404830)), T(V(9007199254740994))});
  b.insert(b.end(), {T(V(1.7446926832199097)), T(V(3))});
  const std::vector<T> floors = Run(MapOp::kFloorDivide, a, b);
  std::vector<T> rests;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto x = static_cast<V>(a[i]), y = static_cast<V>(b[i]);
    V rest = std::fmod(x, y);
    if (y != 0) rest = rest == 0 ? std::copysign(V{0}, y) : (rest < 0) != (y < 0) ? rest + y : rest;
    rests.push_back(T(rest));
    const double got = static_cast<double>(static_cast<V>(floors[i])), p = x, q = y;
    SCOPED_TRACE(testing::Message() << std::hexfloat << p << " // " << q << " is " << got);
    if (std::isnan(p) || std::isnan(q) || std::isinf(p) || y == 0) {
      ASSERT_TRUE(y == 0 && p != 0 && !std::isnan(p) ? std::isinf(got) : std::isnan(got));
    } else if (std::isinf(q)) {
      ASSERT_EQ(got, p != 0 && (p < 0) != (q < 0) ? -1 : 0);
    } else if (std::isinf(got)) {
      ASSERT_TRUE(IsWithin(1, floors[i], static_cast<long double>(p) / q));
    } else if (std::abs(got) < std::exp2(Format<T>::kDigits)) {
      // Checks that got <= p / q < got + 1. A fused multiply-add has the sign of the exact
      // difference.
      const double sign = std::copysign(1.0, q);
      ASSERT_GE(sign * std::fma(-got, q, p), 0);
      ASSERT_LT(sign * std::fma(-(got + 1), q, p), 0);
      ASSERT_TRUE(got != 0 || std::signbit(got) == std::signbit(p / q));
    } else {
      // The floor is at most half a unit away. 16-bit results have been rounded twice.
      const long double half = Format<T>::Unit(got) * (sizeof(T) == 2 ? 0.51L : 0.5L);
      const long double sign = std::signbit(q) ? -1 : 1, size = std::abs(q);
      ASSERT_GE(std::fma(half - got, size, sign * p), 0);
      ASSERT_LE(std::fma(-1 - half - got, size, sign * p), 0);
    }
  }
  ExpectSame(Run(MapOp::kRemainder, a, b), rests, "remainder");
}

// The bound is two units for F32 and F64. 16-bit results are F32 results, rounded.
TESSERA_TYPED_TEST_OF(FloatElement, MapTest, FunctionsAreWithinTwoUnits) {
  const double units = SizeOf(DTypeOf<T>()) == 2 ? 0.51 : 2;
  const std::size_t n = WatchedClosely() ? 300 : 100000;
  Random random(3);
  const auto between = [&](double low, double high) {
    return low + (high - low) * random.Uniform();
  };
  const auto check = [&](MapOp op, const std::vector<T>& a, auto f, const std::vector<T>& b = {}) {
    const std::vector<T> got = Run(op, a, b);
    for (std::size_t i = 0; i < got.size(); ++i) {
      const long double want = f(i);
      ASSERT_TRUE(IsWithin(units, got[i], want))
          << InfoOf(op)->name << " of " << static_cast<double>(Exact(a[i])) << ": "
          << static_cast<double>(Exact(got[i])) << ", not " << static_cast<double>(want);
    }
  };
  // The arguments range from those with the smallest subnormal result to those with the largest
  // result.
  const double smallest = static_cast<double>(std::log(Format<T>::Smallest())),
               largest = static_cast<double>(std::log(Format<T>::Largest()));
  std::vector<T> a, b;
  const auto push = [&](auto... x) { (a.push_back(Element<T>(x)), ...); };
  const auto any = [&] { return std::exp(between(smallest, largest)); };
  push(-104.0, -103.0, -87.5, 88.0, -745.0, -744.5, -709.0, 709.0);
  for (std::size_t i = 0; i < n; ++i) push(between(smallest - 1, largest));
  check(MapOp::kExp, a, [&](std::size_t i) { return std::exp(Exact(a[i])); });
  // Arguments of any size, and near 1.
  a.clear();
  for (std::size_t i = 0; i < n; ++i) push(any(), 1 + random.Normal() * std::exp(between(-40, -1)));
  check(MapOp::kLog, a, [&](std::size_t i) { return std::log(Exact(a[i])); });
  // For the first of these, the host's own F64 function is wrong by more than two units.
  a.clear();
  push(0x1.de7fac1c38acp-3, 0.5434871243764351, 0.5371285650691622);
  for (std::size_t i = 0; i < n; ++i)
    push(random.Normal() * std::exp(between(smallest, 3)), between(-1, 1), between(0.5, 0.7));
  check(MapOp::kTanh, a, [&](std::size_t i) { return std::tanh(Exact(a[i])); });
  a.clear();
  for (std::size_t i = 0; i < n; ++i) {
    push(std::exp(6 * random.Normal()), any(), 1 + random.Normal() * 0.1);
    for (double size : {4, 1, 1000}) b.push_back(Element<T>(size * random.Normal()));
  }
  check(
      MapOp::kPower, a, [&](std::size_t i) { return std::pow(Exact(a[i]), Exact(b[i])); }, b);
}

// Functions of the standard library are within four units for F32 and F64.
TESSERA_TYPED_TEST_OF(FloatElement, MapTest, LibraryFunctionsAreWithinFourUnits) {
  const double units = SizeOf(DTypeOf<T>()) == 2 ? 0.51 : SizeOf(DTypeOf<T>()) == 4 ? 1 : 4;
  const std::size_t n = WatchedClosely() ? 100 : 20000;
  Random random(4);
  const double smallest = static_cast<double>(std::log(Format<T>::Smallest())),
               largest = static_cast<double>(std::log(Format<T>::Largest()));
  // Calls f with elements of both signs from the smallest to the largest size, of usual size, and
  // with special elements.
  std::vector<T> a, b;
  const auto any = [&] {
    const double size = std::exp(smallest + (largest - smallest) * random.Uniform());
    const double usual = 3 * random.Normal();
    return Element<T>(Below(random, 2) == 0 ? std::copysign(size, usual) : usual);
  };
  for (double special : {0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 710.0, -745.0, kInfinity, -kInfinity,
                         kInfinity - kInfinity})
    a.push_back(Element<T>(special));
  while (a.size() < n) a.push_back(any());
  while (b.size() < a.size()) b.push_back(any());
  const auto check = [&](MapOp op, auto exact) {
    const bool two = InfoOf(op)->arguments == 2;
    const std::vector<T> got = Run(op, a, two ? b : std::vector<T>());
    for (std::size_t i = 0; i < got.size(); ++i) {
      const long double want = exact(Exact(a[i]), Exact(b[i])), value = Exact(got[i]);
      const bool right = std::isnan(want)   ? std::isnan(value)
                         : std::isinf(want) ? value == want
                                            : IsWithin(units, got[i], want);
      ASSERT_TRUE(right) << InfoOf(op)->name << " of " << static_cast<double>(Exact(a[i]))
                         << " (and " << static_cast<double>(Exact(b[i]))
                         << "): " << static_cast<double>(Exact(got[i])) << ", not "
                         << static_cast<double>(want);
    }
  };
  using Real = long double;
  check(MapOp::kSin, [](Real x, Real) { return std::sin(x); });
  check(MapOp::kCos, [](Real x, Real) { return std::cos(x); });
  check(MapOp::kTan, [](Real x, Real) { return std::tan(x); });
  check(MapOp::kAsin, [](Real x, Real) { return std::asin(x); });
  check(MapOp::kAcos, [](Real x, Real) { return std::acos(x); });
  check(MapOp::kAtan, [](Real x, Real) { return std::atan(x); });
  check(MapOp::kAtan2, [](Real x, Real y) { return std::atan2(x, y); });
  check(MapOp::kSinh, [](Real x, Real) { return std::sinh(x); });
  check(MapOp::kCosh, [](Real x, Real) { return std::cosh(x); });
  check(MapOp::kAsinh, [](Real x, Real) { return std::asinh(x); });
  check(MapOp::kAcosh, [](Real x, Real) { return std::acosh(x); });
  check(MapOp::kAtanh, [](Real x, Real) { return std::atanh(x); });
  check(MapOp::kExpm1, [](Real x, Real) { return std::expm1(x); });
  check(MapOp::kLog1p, [](Real x, Real) { return std::log1p(x); });
  check(MapOp::kLog2, [](Real x, Real) { return std::log2(x); });
  check(MapOp::kLog10, [](Real x, Real) { return std::log10(x); });
  check(MapOp::kCbrt, [](Real x, Real) { return std::cbrt(x); });
  check(MapOp::kHypot, [](Real x, Real y) { return std::hypot(x, y); });
}

// The error that the tests above allow for each node is within the bound that a response states.
TESSERA_TYPED_TEST_OF(FloatElement, MapTest, NodesHaveTheBoundOfTheirRoundings) {
  const View x = WholeView({DTypeOf<T>(), MakeShape({5})}, nullptr);
  const double unit = UnitRoundoff(DTypeOf<T>()), single = UnitRoundoff(DType::kF32);
  RunOptions check = options();
  check.check_only = true;
  for (const auto& [nodes, units] :
       {std::pair(Alone(MapOp::kAdd), 1.0),
        {Alone(MapOp::kDivide), 1.0},
        {Alone(MapOp::kRemainder), 1.0},
        {Alone(MapOp::kFloorDivide), 1.0},
        {Alone(MapOp::kMaximum), 0.0},
        {Alone(MapOp::kNegate), 0.0},
        {Alone(MapOp::kTanh), 4.0},
        {Alone(MapOp::kExp), 4.0},
        {Alone(MapOp::kSin), 8.0},
        {{In(0), In(1), Op(MapOp::kLess, {0, 1}), Op(MapOp::kWhere, {2, 0, 1})}, 0.0},
        {ReferenceNodes(), 1.0}}) {
    // 16-bit results are rounded twice, to F32 and then to 16 bits.
    const double want = sizeof(T) > 2 ? units * unit
                        : units == 0  ? 0
                                      : unit + units * single + unit * units * single;
    EXPECT_DOUBLE_EQ(Get(RunMap(stream(), {x, x}, nodes, nullptr, check)).roundoff, want)
        << InfoOf(nodes.back().op)->name;
  }
}

// Computes ReferenceNodes in steps of the type itself, each of which is rounded.
template <class T>
T Reference(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>((static_cast<U>(a) - static_cast<U>(b)) * static_cast<U>(a));
  } else {
    using V = ValueOf<T>;
    const T difference = T(static_cast<V>(a) - static_cast<V>(b));
    return T(static_cast<V>(difference) * static_cast<V>(a));
  }
}
template <class T>
std::vector<T> References(const std::vector<T>& a, const std::vector<T>& b) {
  std::vector<T> want;
  for (std::size_t i = 0; i < a.size(); ++i) want.push_back(Reference(a[i], b[i]));
  return want;
}

TESSERA_TYPED_TEST(MapTest, SizesAlignmentsAndLaunches) {
  for (std::int64_t n : AwkwardSizes()) {
    const std::vector<T> a = NormalVector<T>(n, 1), b = NormalVector<T>(n, 2);
    DeviceArray<T> da(stream(), a, 1), db(stream(), b, 2);
    const std::vector<View> views = {da.view(), db.view()};
    const std::vector<T> want = References(a, b);
    ExpectSame(Run<T>(views, ReferenceNodes()), want, absl::StrCat(n));
    if (n != 4099) continue;
    for (const Launch& launch : Launches(limits()))
      ExpectSame(Run<T>(views, ReferenceNodes(), launch), want, absl::StrCat(launch.block_size));
  }
}

// Returns the elements of a view of `array`, which has these values, broadcast to a shape.
template <class T>
std::vector<T> Stretched(const View& view, const DeviceArray<T>& array,
                         const std::vector<T>& values, const Shape& shape) {
  std::vector<T> elements;
  for (std::int64_t e = 0; e < shape.elements(); ++e) {
    std::int64_t rest = e, at = static_cast<const T*>(view.data) - array.data();
    for (int i = shape.rank, j = view.shape.rank; i-- > 0;) {
      if (--j >= 0 && view.shape[j] > 1) at += rest % shape[i] * At(view.strides, j);
      rest /= shape[i];
    }
    elements.push_back(At(values, at));
  }
  return elements;
}

// Operands are broadcast along outer, inner and both kinds of axes, transposed and reversed.
TESSERA_TYPED_TEST(MapTest, ViewsAndBroadcasting) {
  constexpr DType kDType = DTypeOf<T>();
  const std::int64_t outer = 3, rows = WatchedClosely() ? 5 : 67, columns = 80;
  const std::vector<T> values = NormalVector<T>(outer * rows * columns + 64, 1);
  const DeviceArray<T> array(stream(), values);
  const auto part = [&](std::initializer_list<std::int64_t> shape) {
    return WholeView({kDType, MakeShape(shape)}, array.data() + 64);
  };
  const View whole = array.view(), cube = StridedView(array.data(), kDType, {outer, rows, columns},
                                                      {rows * columns, columns, 1});
  const View turned =
      StridedView(array.data() + columns - 1, kDType, {columns, rows}, {-1, columns});
  const auto check = [&](const View& a, const View& b) {
    const Shape shape = Get(MapType({a, b}, ReferenceNodes())).shape;
    ExpectSame(Run<T>({a, b}, ReferenceNodes()),
               References(Stretched(a, array, values, shape), Stretched(b, array, values, shape)),
               absl::StrCat(ToString(a.shape), " and ", ToString(b.shape)));
  };
  for (const View& other : {part({columns}), part({rows, columns}), part({rows, 1}),
                            part({outer, 1, 1}), part({outer, rows, 1}), part({1}), part({})}) {
    check(cube, other);
    check(other, cube);
  }
  check(turned, part({rows}));
  check(part({rows, 1, 1}), part({columns}));
  check(part({}), whole);
  check(part({0, 1, 1}), part({columns}));
  ExpectSame(Run<T>({part({})}, {In(0)}), {values[64]}, "nothing but a scalar");
}

// Steps of one type between elements of other types: conversions between 16-bit types and f32, and
// bool.
TESSERA_TYPED_TEST(MapTest, TypesAtTheEndsOfAChain) {
  const std::int64_t n = WatchedClosely() ? 301 : 4097;
  const std::vector<T> a = NormalVector<T>(n, 1), b = NormalVector<T>(n, 2);
  DeviceArray<T> da(stream(), a), db(stream(), b);
  const View x = da.view(), y = db.view();
  std::vector<std::uint8_t> bytes;
  for (std::int64_t i = 0; i < n; ++i) bytes.push_back(static_cast<std::uint8_t>(i % 3 * 80));
  DeviceArray<std::uint8_t> mask(stream(), bytes);
  const View truth = WholeView({DType::kBool, MakeShape({n})}, mask.data());
  std::vector<T> chosen;
  for (std::size_t i = 0; i < a.size(); ++i) chosen.push_back(bytes[i] != 0 ? a[i] : b[i]);
  ExpectSame(Run<T>({x, y, truth}, {In(2), In(0), In(1), Op(MapOp::kWhere, {0, 1, 2})}), chosen,
             "mask");
  // a < b gives bool elements, which are bytes.
  const Nodes less = {In(0), In(1), Op(MapOp::kLess, {0, 1})};
  if (Takes({x, y}, less)) {
    DeviceArray<std::uint8_t> out(stream(), n);
    ASSERT_TRUE(RunMap(stream(), {x, y}, less, out.data(), options()).ok());
    const std::vector<std::uint8_t> got = out.Values();
    for (std::size_t i = 0; i < a.size(); ++i)
      ASSERT_EQ(got[i], static_cast<ValueOf<T>>(a[i]) < static_cast<ValueOf<T>>(b[i])) << i;
  }
  if constexpr (std::is_same_v<T, float>) {
    const std::vector<BFloat16> c = NormalVector<BFloat16>(n, 3);
    DeviceArray<BFloat16> dc(stream(), c);
    const View narrow = dc.view();
    std::vector<float> sums;
    std::vector<Half> rounded;
    for (std::size_t i = 0; i < a.size(); ++i) {
      sums.push_back(a[i] + static_cast<float>(c[i]));
      rounded.push_back(Half(a[i] + static_cast<float>(c[i])));
    }
    Nodes nodes = {In(0), In(1), Op(MapOp::kAdd, {0, 1})};
    ExpectSame(Run<float>({x, narrow}, nodes), sums, "bf16 next to f32");
    nodes.push_back(Op(MapOp::kCast, {2}, DType::kF16));
    ExpectSame(Run<Half>({x, narrow}, nodes), rounded, "f16 of f32");
  }
}

TESSERA_TYPED_TEST(MapTest, LongProgramsWithManyRegisters) {
  const std::vector<T> a(600, Element<T>(0.001));
  DeviceArray<T> da(stream(), a);
  const View x = da.view();
  for (std::uint32_t chain : {1u, 5u, 11u, 31u}) {
    Nodes nodes = {In(0)};
    for (std::uint32_t i = 0; i < chain; ++i) nodes.push_back(Op(MapOp::kAdd, {i, 0}));
    std::uint32_t sum = chain;
    for (std::uint32_t i = chain; i-- > 0;) {
      nodes.push_back(Op(MapOp::kMaximum, {sum, i}));
      sum = static_cast<std::uint32_t>(nodes.size() - 1);
    }
    T want = a[0];
    for (std::uint32_t i = 0; i < chain; ++i)
      want = T(static_cast<ValueOf<T>>(want) + static_cast<ValueOf<T>>(a[0]));
    if (!Takes({x}, nodes)) {
      EXPECT_GT(chain, 5u) << "even short programs are refused";
      continue;
    }
    ExpectSame(Run<T>({x}, nodes), std::vector<T>(a.size(), want), absl::StrCat(chain));
  }
}

// Compares random expressions, in which a node may use the value of a node far before it, with a
// loop over the elements for each node.
TESSERA_TYPED_TEST(MapTest, RandomExpressions) {
  using V = ValueOf<T>;
  const auto apply = [&](MapOp op, V a, V b) -> V {
    const auto wrapped = [&](V x, V y, auto f) {
      if constexpr (std::is_integral_v<V>) {
        using U = std::make_unsigned_t<V>;
        return static_cast<V>(f(static_cast<U>(x), static_cast<U>(y)));
      } else {
        return f(x, y);
      }
    };
    if (op == MapOp::kAdd) return wrapped(a, b, std::plus());
    if (op == MapOp::kSubtract) return wrapped(a, b, std::minus());
    if (op == MapOp::kMultiply) return wrapped(a, b, std::multiplies());
    if (op == MapOp::kNegate) return std::is_integral_v<V> ? wrapped(0, a, std::minus()) : -a;
    if (a != a || b != b) return a + b;
    return op == MapOp::kMinimum ? std::min(a, b) : std::max(a, b);
  };
  constexpr MapOp kOps[] = {MapOp::kAdd,     MapOp::kSubtract, MapOp::kMultiply,
                            MapOp::kMinimum, MapOp::kMaximum,  MapOp::kNegate};
  Random random(17);
  const auto below = [&](std::size_t n) { return Below(random, n); };
  int taken = 0;
  for (std::uint64_t round = 0; round < 60; ++round) {
    const std::int64_t n =
        std::array<std::int64_t, 8>{1, 3, 8, 31, 256, 1000, 2051, 4099}[below(8)];
    const std::uint32_t operands = 1 + below(5);
    std::vector<DeviceArray<T>> arrays;
    std::vector<View> views;
    Nodes nodes;
    std::vector<std::vector<T>> values;  // for each node, one value or one per element
    arrays.reserve(operands);
    for (std::uint32_t i = 0; i < operands; ++i) {
      const std::int64_t length = i > 0 && below(4) == 0 ? 1 : n;
      values.push_back(NormalVector<T>(length, 100 * round + i));
      arrays.emplace_back(stream(), values.back());
      views.push_back(arrays.back().view());
      nodes.push_back(In(i));
    }
    values.push_back({T(V{2})});
    nodes.push_back(Integer(2));
    const auto at = [&](std::uint32_t node, std::int64_t i) {
      const std::vector<T>& v = values[node];
      return static_cast<V>(v[v.size() == 1 ? 0 : static_cast<std::size_t>(i)]);
    };
    const auto constant = operands;
    const std::uint32_t steps = 1 + below(12);
    std::vector<std::uint32_t> numbers(nodes.size());  // Nodes that are not bool.
    std::iota(numbers.begin(), numbers.end(), 0u);
    for (std::uint32_t step = 0; step < steps; ++step) {
      const auto latest = static_cast<std::uint32_t>(nodes.size() - 1);
      const auto any = [&] { return numbers[below(numbers.size())]; };
      std::uint32_t a = latest == constant || below(3) == 0 ? any() : latest, b = any();
      if (a == constant) a = 0;
      std::vector<T> result;
      if (below(5) == 0) {  // a < 2 ? a : b
        for (std::int64_t i = 0; i < n; ++i)
          result.push_back(T(at(a, i) < V{2} ? at(a, i) : at(b, i)));
        nodes.push_back(Op(MapOp::kLess, {a, constant}));
        values.emplace_back();
        nodes.push_back(Op(MapOp::kWhere, {latest + 1, a, b}));
      } else {
        const MapOp op = kOps[below(std::size(kOps))];
        for (std::int64_t i = 0; i < n; ++i) result.push_back(T(apply(op, at(a, i), at(b, i))));
        nodes.push_back(op == MapOp::kNegate ? Op(op, {a}) : Op(op, {a, b}));
      }
      values.push_back(std::move(result));
      numbers.push_back(static_cast<std::uint32_t>(nodes.size() - 1));
    }
    if (!Takes(views, nodes)) continue;
    ++taken;
    std::vector<T> want = values.back();
    const ArrayType type = Get(MapType(views, nodes));
    want.resize(static_cast<std::size_t>(type.shape.elements()));
    ExpectSame(Run<T>(views, nodes), want, absl::StrCat("round ", round));
  }
  EXPECT_GT(taken, 30);
}

TESSERA_TYPED_TEST(MapTest, TypesThatMeetAndConstants) {
  const std::vector<T> a = NormalVector<T>(1000, 1);
  const std::vector<std::int32_t> b = NormalVector<std::int32_t>(1000, 2);
  DeviceArray<T> da(stream(), a);
  DeviceArray<std::int32_t> db(stream(), b);
  const std::vector<View> views = {da.view(), db.view()};
  std::vector<double> quotients;
  for (std::size_t i = 0; i < a.size(); ++i)
    quotients.push_back(static_cast<double>(Exact(a[i])) / b[i]);
  if (DTypeOf<T>() != DType::kF64)  // Divisions with integers are in F64.
    ExpectSame(Run<double>(views, Alone(MapOp::kDivide)), quotients, "divide");
  std::vector<T> larger;
  for (T x : a) larger.push_back(Exact(x) > 2 ? x : Element<T>(0));
  ExpectSame(Run<T>(views, {In(0), Integer(2), Op(MapOp::kGreater, {0, 1}), Integer(0),
                            Op(MapOp::kWhere, {2, 0, 3})}),
             larger, "where");
  std::vector<std::int64_t> cut;
  for (T x : a) cut.push_back(static_cast<std::int64_t>(Exact(x)));
  ExpectSame(Run<std::int64_t>(views, {In(0), Op(MapOp::kCast, {0}, DType::kI64)}), cut, "cast");
  if constexpr (!std::is_integral_v<T>) {
    std::vector<T> scaled;
    const auto tenth = static_cast<ValueOf<T>>(T(static_cast<ValueOf<T>>(0.1)));
    for (T x : a) scaled.push_back(T(static_cast<ValueOf<T>>(x) * tenth));
    ExpectSame(Run<T>(views, {In(0), Real(0.1), Op(MapOp::kMultiply, {0, 1})}), scaled, "scale");
  }
}

TESSERA_STRATEGIES(MapTest);

// Tests the operations whose bits are the same on both devices.
TEST(MapDevices, SameBits) {
  TESSERA_NEED_DEVICE(Backend::kCuda);
  for (DType dtype : kAllDTypes) {
    DispatchDType(dtype, [&]<class T>(T) {
      const auto pairs = SpecialPairs<T>();
      const auto n = static_cast<std::int64_t>(pairs.first.size());
      const auto check = [&](const Nodes& nodes, std::string_view what) {
        DispatchElement(Get(CompileExpression(nodes, {dtype, dtype})).dtype, [&]<class R>(R) {
          using Out = std::conditional_t<std::is_same_v<R, bool>, std::uint8_t, R>;
          const auto run = [&](Backend backend) {
            Stream& stream = TestStream(backend);
            DeviceArray<T> a(stream, pairs.first), b(stream, pairs.second);
            DeviceArray<Out> out(stream, n);
            const auto stats = RunMap(stream, {a.view(), b.view()}, nodes, out.data(), {});
            EXPECT_TRUE(stats.ok()) << what;
            return out.Values();
          };
          ExpectSame(run(Backend::kCuda), run(Backend::kCpu), what);
        });
      };
      for (const MapOpInfo& info : kMapOpInfos) {
        const bool differs = info.op == MapOp::kExp || info.op == MapOp::kLog ||
                             info.op == MapOp::kTanh || IsLibraryFunction(info.op) ||
                             (info.op == MapOp::kPower && !std::is_integral_v<T>);
        const bool lacks = (info.rule == MapRule::kBits || info.rule == MapRule::kIntegers) &&
                           !std::is_integral_v<T>;
        if (differs || lacks || info.rule == MapRule::kCast) continue;
        Nodes nodes = {In(0), In(1), Op(MapOp::kLess, {0, 1}), Op(MapOp::kEqual, {0, 1})};
        std::vector<std::uint32_t> args = {0, 1, 1};
        if (info.rule == MapRule::kLogic && !std::is_integral_v<T>) args = {2, 3};
        if (info.rule == MapRule::kSelect) args = {2, 0, 1};
        args.resize(static_cast<std::size_t>(info.arguments));
        nodes.push_back(Op(info.op, args));
        check(nodes, info.name);
      }
      for (DType to : kArrayDTypes)
        check({In(0), Op(MapOp::kCast, {0}, to)}, absl::StrCat("cast to ", Absl(Name(to))));
    });
  }
}

// For all strategies, coordinates refer to the whole result, even if the axes of an operand are
// merged, reversed or broadcast, or the result has other axes.
TEST_P(MapTest, Coordinates) {
  const std::vector<std::int64_t> values = Iota(4 * 1000);
  DeviceArray<std::int64_t> x(stream(), values, 1);
  View view = x.view();
  view.shape = {.rank = 3, .dims = {4, 1, 1000}};
  view.strides = {1000, 0, 1};
  View tall{.data = view.data, .dtype = DType::kI64, .shape = {.rank = 3, .dims = {1, 3, 1}}};
  // ((first * 10 + middle) * 1000 + last) * 4000 + x.
  const Nodes nodes = {In(0),
                       In(1),
                       Axis(0),
                       Axis(-2),
                       Axis(2),
                       Integer(10),
                       Integer(1000),
                       Integer(4000),
                       Op(MapOp::kFma, {2, 5, 3}),
                       Op(MapOp::kFma, {8, 6, 4}),
                       Op(MapOp::kFma, {9, 7, 0})};
  for (std::int64_t step : {1, -1}) {
    View other = view;
    other.strides[2] = step;
    if (step < 0) other.data = static_cast<const std::int64_t*>(view.data) + 999;
    std::vector<std::int64_t> want;
    for (std::int64_t i = 0; i < 4; ++i)
      for (std::int64_t j = 0; j < 3; ++j)
        for (std::int64_t k = 0; k < 1000; ++k)
          want.push_back(((i * 10 + j) * 1000 + k) * 4000 + i * 1000 + (step < 0 ? 999 - k : k));
    ExpectSame(Run<std::int64_t>({other, tall}, nodes), want, "coordinates");
  }
  // One axis, and an axis of one element.
  const View one{.data = view.data, .dtype = DType::kI64, .shape = {.rank = 2, .dims = {777, 1}}};
  ExpectSame(Run<std::int64_t>({one}, {Axis(0)}), Iota(777), "one axis");
  ExpectSame(Run<std::int64_t>({one}, {Axis(1)}), std::vector<std::int64_t>(777), "one element");
  for (int axis : {2, -3}) {
    const absl::Status status = MapType(std::vector<View>{one}, Nodes{Axis(axis)}).status();
    EXPECT_EQ(ErrorReason(status), "BAD_AXES");
  }
}

// Computes parts of a result of 2^50 elements.
TEST_P(MapTest, CoordinatesOfParts) {
  constexpr std::int64_t kRows = std::int64_t{1} << 15, kColumns = std::int64_t{1} << 35;
  const std::vector<std::int64_t> zero = {0};
  DeviceArray<std::int64_t> x(stream(), zero, 0);
  const Nodes nodes = {In(0),
                       Axis(0),
                       Axis(1),
                       Integer(kColumns),
                       Op(MapOp::kFma, {1, 3, 2}),
                       Op(MapOp::kAdd, {4, 0})};
  const MapProgram program = Get(CompileExpression(nodes, {DType::kI64}));
  MapProblem problem{.dtype = DType::kI64, .n = kRows * kColumns, .program = &program};
  const View operand{.data = x.data(), .dtype = DType::kI64, .shape = MakeShape({kRows, kColumns})};
  ASSERT_TRUE(SetOperands({&operand, 1}, operand.shape, problem).ok());
  constexpr std::int64_t kCount = 3000;
  for (std::int64_t first :
       {std::int64_t{0}, kColumns - 1000, 7 * kColumns + (kColumns >> 1), problem.n - kCount}) {
    DeviceArray<std::int64_t> out(stream(), kCount);
    LaunchMapRange(problem, first, kCount, out.data(), stream());
    std::vector<std::int64_t> want = Iota(kCount);
    for (std::int64_t& value : want) value += first;
    ExpectSame(out.Values(), want, "a range");
  }
  // The shares of a team begin at an index of the first axis.
  MapProblem narrow = problem;
  for (int i = 0; i < program.operands; ++i)
    narrow.operands[static_cast<std::size_t>(i)].shape = MakeShape({kRows, 100});
  narrow.n = kRows * 100;
  DeviceArray<std::int64_t> out(stream(), 20 * 100);
  MapProblem part =
      PartOf(narrow, TeamShare{.stream = &stream(), .first = kRows - 20, .end = kRows});
  part.out = out.data();
  strategy().launch(part, stream());
  stream().Synchronize();
  std::vector<std::int64_t> want;
  for (std::int64_t i = kRows - 20; i < kRows; ++i)
    for (std::int64_t j = 0; j < 100; ++j) want.push_back(i * kColumns + j);
  ExpectSame(out.Values(), want, "a share");
}

// Compares with the first two words of the vectors that Random123 publishes for Philox 4x32-10.
TEST_P(MapTest, RandomBitsArePhilox) {
  const std::vector<std::uint64_t> seeds = {0, ~0ull, 0x299f31d0a4093822},
                                   counters = {0, ~0ull, 0x85a308d3243f6a88},
                                   streams = {0, ~0ull, 0x0370734413198a2e},
                                   want = {0xe169c58d6627e8d5, 0x41c83b0e408f276d,
                                           0x94fdccebd16cfe09};
  const auto array = [&](const std::vector<std::uint64_t>& of) {
    return std::vector<std::int64_t>(of.begin(), of.end());
  };
  DeviceArray<std::int64_t> a(stream(), array(seeds), 0), b(stream(), array(counters), 1),
      c(stream(), array(streams), 0);
  ExpectSame(Run<std::int64_t>({a.view(), b.view(), c.view()}, Alone(MapOp::kRandomBits)),
             array(want), "random bits");
}

// The exact quantiles were computed with 200 bits, and rounded to the nearest double.
TEST_P(MapTest, NdtriIsTheNormalQuantile) {
  const std::vector<double> a = {0x1p-1074, 0x1p-1022, 1e-300, 1e-100,    1e-20, 1.5e-12,
                                 1e-8,      0.001,     0.075,  0.1,       0.3,   0.5625,
                                 0.9,       0.925,     0.999,  0.99999999};
  const std::vector<double> want = {
      -0x1.33bd3f27fcd03p+5, -0x1.2c27b05bf1a0bp+5, -0x1.286074064c26ep+5, -0x1.546010d755221p+4,
      -0x1.2865170b43a4cp+3, -0x1.be930837a25c7p+2, -0x1.672b074435e3dp+2, -0x1.8b8cbb7204471p+1,
      -0x1.7085226d3e524p+0, -0x1.4813c36e26d32p+0, -0x1.0c7e39582c5fbp-1, 0x1.422c1aadb2493p-3,
      0x1.4813c36e26d33p+0,  0x1.7085226d3e525p+0,  0x1.8b8cbb7204470p+1,  0x1.672b074346f16p+2};
  DeviceArray<double> x(stream(), a, 1);
  const std::vector<double> got = Run<double>({x.view()}, Alone(MapOp::kNdtri));
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_NEAR(got[i], want[i], 10 * std::ldexp(1.0, std::ilogb(want[i]) - 52)) << a[i];
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> ends = {0, -0.0, 1, 0.5, -0x1p-1074, 1 + 0x1p-52, kInfinity, kNan};
  DeviceArray<double> y(stream(), ends);
  ExpectSame(Run<double>({y.view()}, Alone(MapOp::kNdtri)),
             {-kInfinity, -kInfinity, kInfinity, 0, kNan, kNan, kNan, kNan}, "ends");
}

TEST(ExpressionTest, CoordinatesTakeThePlacesOfOperands) {
  const std::vector<DType> seven(7, DType::kF32);
  EXPECT_EQ(Get(CompileExpression({Axis(0), Axis(0)}, seven)).operands, 8);
  EXPECT_EQ(ErrorMetadata(CompileExpression({Axis(0), Axis(1)}, seven).status())["node"], "1");
}

TEST(ExpressionTest, TypesThatMeet) {
  using enum DType;
  constexpr std::array<DType, 3> kCases[] = {
      {kF16, kBF16, kF32}, {kF16, kF32, kF32},    {kI32, kF32, kF64},
      {kI32, kI64, kI64},  {kBool, kBF16, kBF16}, {kU8, kU8, kU8},
      {kU8, kI8, kI32},    {kI8, kF16, kF16},     {kBool, kU8, kU8}};
  for (const auto& [a, b, want] : kCases)
    EXPECT_EQ(Promote(a, b), want) << Name(a) << " " << Name(b);
  for (DType a : kArrayDTypes)
    for (DType b : kArrayDTypes) EXPECT_EQ(Promote(a, b), Promote(b, a));
}

// One-byte integers and bool affect the type of the result only if there are no other types. The
// order of the arguments does not matter.
TEST(ExpressionTest, TheOrderOfArgumentsDoesNotMatter) {
  const auto type_of = [](MapOp op, std::vector<DType> types) {
    const auto program = CompileExpression({In(0), In(1), In(2), Op(op, {0, 1, 2})}, types);
    return program.ok() ? program->dtype : DType::kBool;
  };
  for (MapOp op : {MapOp::kFma, MapOp::kClip}) {
    for (DType a : kArrayDTypes) {
      for (DType b : kArrayDTypes) {
        for (DType c : kArrayDTypes) {
          std::vector<DType> types = {a, b, c};
          std::sort(types.begin(), types.end());
          DType want = DType::kBool, other = DType::kBool;
          for (DType type : types) {
            DType& of = type == DType::kBool || IsByteInteger(type) ? other : want;
            of = Promote(of, type);
          }
          if (want == DType::kBool && other != DType::kBool) want = DType::kI32;
          do {
            EXPECT_EQ(type_of(op, types), want)
                << Name(types[0]) << " " << Name(types[1]) << " " << Name(types[2]);
          } while (std::next_permutation(types.begin(), types.end()));
        }
      }
    }
  }
  EXPECT_EQ(type_of(MapOp::kFma, {DType::kU8, DType::kI8, DType::kF32}), DType::kF32);
  EXPECT_EQ(type_of(MapOp::kClip, {DType::kI8, DType::kF16, DType::kU8}), DType::kF16);
}

// One-byte integers have I32 values and need no conversion instruction.
TEST(ExpressionTest, BytesAreI32) {
  const auto sum =
      Get(CompileExpression({In(0), In(1), Op(MapOp::kAdd, {0, 1})}, {DType::kU8, DType::kI8}));
  EXPECT_EQ(sum.dtype, DType::kI32);
  EXPECT_EQ(sum.instructions, 3);
  for (DType dtype : {DType::kU8, DType::kI8}) {
    for (const MapOpInfo& info : kMapOpInfos) {
      if (info.rule != MapRule::kNumbers) continue;
      const std::vector<std::uint32_t> args(static_cast<std::size_t>(info.arguments));
      const auto alone = Get(CompileExpression({In(0), Op(info.op, args)}, {dtype}));
      EXPECT_EQ(alone.dtype, DType::kI32) << info.name;
    }
    EXPECT_EQ(CompileExpression({In(0)}, {dtype})->dtype, dtype);
    EXPECT_EQ(CompileExpression({In(0)}, {dtype}, DType::kI32)->instructions, 1);
    for (const auto& [node, want] :
         {std::pair(Integer(300), DType::kI32), {Real(1.5), DType::kF64}})
      EXPECT_EQ(CompileExpression({In(0), node, Op(MapOp::kAdd, {0, 1})}, {dtype})->dtype, want);
    const auto constant = [&](std::int64_t value) {
      ExpressionNode node = Integer(value);
      node.dtype = dtype;
      return CompileExpression({In(0), node, Op(MapOp::kAdd, {0, 1})}, {dtype}).ok();
    };
    const bool with_sign = dtype == DType::kI8;
    EXPECT_EQ(constant(-128), with_sign);
    EXPECT_EQ(constant(255), !with_sign);
    EXPECT_FALSE(constant(-129));
    EXPECT_FALSE(constant(256));
  }
}

TEST(ExpressionTest, WhatIsNotNeededIsNotComputed) {
  const Nodes nodes = {In(0), Op(MapOp::kExp, {0}), Op(MapOp::kAdd, {0, 0})};
  EXPECT_EQ(Get(CompileExpression(nodes, {DType::kF32})).instructions, 2);
}

TEST(ExpressionTest, RegistersAreUsedAgain) {
  Nodes nodes = {In(0)};
  for (std::uint32_t i = 0; i + 1 < kMostNodes; ++i) nodes.push_back(Op(MapOp::kAdd, {i, i}));
  const auto program = Get(CompileExpression(nodes, {DType::kF32}));
  EXPECT_EQ(program.registers, 2);
  EXPECT_FALSE(program.wide);
}

TEST(ExpressionTest, ErrorsNameTheNodeAndSayWhatIsWrongWithIt) {
  struct Case {
    Nodes nodes;
    std::string node, message;  // An empty message matches any.
  };
  for (const Case& c :
       {Case{{In(2)}, "0", "it refers to operand 2, but the last one is operand 0"},
        {{In(0), Op(MapOp::kAdd, {0})}, "1", "add takes 2 arguments, not 1"},
        {{In(0), Op(MapOp::kSqrt, {0, 0})}, "1", "sqrt takes 1 argument, not 2"},
        {{In(0), Op(MapOp::kAdd, {0, 0, 0, 0})}, "1", "add takes 2 arguments, not more than 3"},
        {{In(0), Op(MapOp::kAdd, {0, 1})}, "1", ""},
        {{In(0), Op(MapOp{}, {0})}, "1", ""},
        {{In(0), Op(MapOp::kNot, {0}), In(0)}, "1", ""},
        {{In(0), Op(MapOp::kCast, {0})}, "1", ""}}) {
    const absl::Status status = CompileExpression(c.nodes, {DType::kF32}).status();
    EXPECT_EQ(ErrorReason(status), "BAD_EXPRESSION");
    EXPECT_EQ(ErrorMetadata(status)["node"], c.node);
    if (!c.message.empty()) {
      EXPECT_EQ(status.message(), absl::StrCat("node ", c.node, ": ", c.message));
    }
  }
  // Errors of counts name the field and its limit.
  const auto figures = [](const Nodes& nodes, std::size_t operands) {
    const std::vector<DType> types(operands, DType::kF32);
    const absl::Status status = CompileExpression(nodes, types).status();
    auto metadata = ErrorMetadata(status);
    return absl::StrCat(ErrorReason(status), metadata["node"], " ", metadata["field"], " ",
                        metadata["limit"]);
  };
  EXPECT_EQ(figures({}, 1), "BAD_EXPRESSION nodes 64");
  EXPECT_EQ(figures(Nodes(65, In(0)), 1), "BAD_EXPRESSION nodes 64");
  EXPECT_EQ(figures({In(0)}, 0), "BAD_EXPRESSION operands 8");
  EXPECT_EQ(figures({In(0)}, 9), "BAD_EXPRESSION operands 8");
}

}  // namespace
}  // namespace tessera::test
