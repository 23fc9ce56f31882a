// Every strategy of Dot in the table, compared with sums in long double within the strategy's own
// bound.
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

struct Reference {
  long double sum = 0;
  long double magnitude = 0;
  std::int64_t wrapped = 0;  // The sum of integers in 64 bits.
};

template <class T>
Reference DotReference(const std::vector<T>& a, const std::vector<T>& b) {
  Reference r;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const long double product = Exact(a[i]) * Exact(b[i]);
    r.sum += product;
    r.magnitude += std::abs(product);
    if constexpr (std::is_integral_v<T>)
      r.wrapped = WrapAdd(r.wrapped, WrapMultiply<std::int64_t>(a[i], b[i]));
  }
  return r;
}

class DotTest : public StrategyTest<DotProblem> {
 protected:
  template <class T>
  void Check(const std::vector<T>& a, const std::vector<T>& b, Launch launch = {},
             std::size_t offset_a = 0, std::size_t offset_b = 0) {
    DeviceArray<T> da(stream(), a, offset_a), db(stream(), b, offset_b);
    SCOPED_TRACE(absl::StrCat("block ", launch.block_size, " grid ", launch.grid_size, " items ",
                              launch.items_per_thread, " offsets ", offset_a, " ", offset_b));
    CheckResident<T>(DotReference(a, b), da.view(), db.view(), launch);
    da.ExpectUnchanged(a);
    db.ExpectUnchanged(b);
  }

  template <class T>
  void CheckResident(const Reference& want, const View& a, const View& b, Launch launch = {}) {
    SCOPED_TRACE(absl::StrCat("n ", a.elements()));
    RunOptions timed = options(launch);
    timed.timing = true;
    const auto result = Get(RunDot(stream(), a, b, timed));
    EXPECT_EQ(result.stats.strategy, GetParam().name);
    EXPECT_GE(result.stats.kernel_us, 0);
    EXPECT_GE(result.stats.bytes, 2 * static_cast<std::uint64_t>(a.elements()) * sizeof(T));
    EXPECT_EQ(result.integer, std::is_integral_v<T>);
    if constexpr (std::is_integral_v<T>) {
      EXPECT_EQ(result.stats.roundoff, 0);
      EXPECT_EQ(result.value.integer, want.wrapped);
    } else if (const double got = result.value.real; !std::isfinite(want.sum)) {
      EXPECT_TRUE(std::isnan(want.sum) ? std::isnan(got) : got == want.sum) << got;
    } else {
      EXPECT_LE(std::abs(static_cast<double>(got - want.sum)),
                result.stats.roundoff * static_cast<double>(want.magnitude))
          << "got " << got << " want " << static_cast<double>(want.sum);
    }
    for (int i = 0; strategy().deterministic && a.elements() > 4000 && i < 3; ++i)
      EXPECT_EQ(Bits(RunDot(stream(), a, b, timed)), Bits(result));
    // The order of the library's sums is unknown, so its bound is n * u.
    if (GetParam().name != "cublas") {
      EXPECT_LT(result.stats.roundoff, 1e-3);
    }
  }
};

TESSERA_TYPED_TEST(DotTest, AwkwardSizes) {
  for (std::int64_t n : AwkwardSizes()) {
    Check<T>(NormalVector<T>(n, 1), NormalVector<T>(n, 2));
    Check<T>(NormalVector<T>(n, 3, 1.0), NormalVector<T>(n, 4, 1.0), {}, 1, 3);
  }
}

TESSERA_TYPED_TEST(DotTest, LaunchesAndAlignments) {
  for (const Launch& launch : Launches(limits())) {
    for (std::int64_t n : Sizes({0, 1, 33, 4099, 70001}))
      Check<T>(NormalVector<T>(n, 5, 0.5), NormalVector<T>(n, 6), launch, n % 4, n % 3);
  }
}

TEST_P(DotTest, LaunchesOutOfRange) {
  DeviceArray<std::int64_t> words(stream(), std::vector<std::int64_t>{1});
  const View x = WholeView({GetParam().dtype, MakeShape({1})}, words.data());
  for (const auto& [range, knob, field] :
       {std::tuple(&LaunchLimits::block_size, &Launch::block_size, "launch.block_size"),
        {&LaunchLimits::grid_size, &Launch::grid_size, "launch.grid_size"},
        {&LaunchLimits::items_per_thread, &Launch::items_per_thread, "launch.items_per_thread"}}) {
    const auto [min, max] = limits().*range;
    for (const std::uint32_t value : {min - (min > 1), min, max + 1}) {
      Launch launch;
      launch.*knob = value;
      const absl::Status status = RunDot(stream(), x, x, options(launch)).status();
      const bool refused = value > max || (value < min && value != 0);
      EXPECT_EQ(ErrorReason(status), refused ? "BAD_LAUNCH" : "") << field << " " << value;
      EXPECT_EQ(ErrorMetadata(status)["field"], refused ? field : "");
    }
  }
}

TESSERA_STRATEGY_SUITE(DotOfFloatsTest, DotTest, kFloats);

TESSERA_TYPED_TEST(DotOfFloatsTest, SpecialValuesPropagate) {
  std::vector<T> a(4099, Element<T>(1)), b(4099, Element<T>(2));
  for (std::size_t at : {std::size_t{0}, a.size() - 1}) {
    for (double special : {std::nan(""), -kInfinity}) {
      a[at] = Element<T>(special);
      Check<T>(a, b);
    }
    a[at] = b[at];
  }
}

TESSERA_STRATEGY_SUITE(DotOfIntegersTest, DotTest, kIntegers);

TESSERA_TYPED_TEST_OF(std::integral, DotOfIntegersTest, Wrap) {
  std::vector<T> a(5000), b(5000);
  Random random(12);
  for (T& x : a) x = static_cast<T>(random.Bits());
  for (T& x : b) x = static_cast<T>(random.Bits());
  Check<T>(a, b);
}

TESSERA_TYPED_TEST(DotTest, Large) {
  // All elements are one except for one element. They are made once per type and device.
  static auto& inputs = *new std::map<Backend, std::pair<DeviceArray<T>, DeviceArray<T>>>;
  const std::int64_t n = LargeSize(GetParam().backend);
  if (!inputs.contains(GetParam().backend)) {
    std::vector<T> x(static_cast<std::size_t>(n), static_cast<T>(ValueOf<T>(1)));
    DeviceArray<T> a(stream(), x);
    At(x, n - 2) = static_cast<T>(ValueOf<T>(-1));
    inputs.try_emplace(GetParam().backend, std::move(a), DeviceArray<T>(stream(), x));
  }
  const auto& [a, b] = inputs.at(GetParam().backend);
  // The library rounds its sum to the type of the operands.
  const long double magnitude = GetParam().name == "cublas" ? n : 0;
  CheckResident<T>(
      {.sum = static_cast<long double>(n - 2), .magnitude = magnitude, .wrapped = n - 2}, a.view(),
      b.view());
}

TESSERA_STRATEGIES(DotTest);

TEST(DotErrors, OperandsAndStrategies) {
  Stream& stream = TestStream(Backend::kCpu);
  const std::vector<float> x(12, 1.0f);
  const View a = WholeView({DType::kF32, MakeShape({12})}, x.data());
  const View b = WholeView({DType::kF32, MakeShape({3, 4})}, x.data());
  const View c = WholeView({DType::kF64, MakeShape({6})}, x.data());
  EXPECT_EQ(ErrorReason(RunDot(stream, a, b, {}).status()), "BAD_SHAPE");
  EXPECT_EQ(ErrorReason(RunDot(stream, a, c, {}).status()), "BAD_DTYPE");
  const absl::Status unknown = RunDot(stream, a, a, {.strategy = "fastest"}).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorReason(unknown), "UNKNOWN_STRATEGY");
  for (const char* name : {"cpu_serial, ", ", cpu_parallel"})
    EXPECT_NE(ErrorMetadata(unknown)["valid"].find(name), std::string::npos) << name;
#ifdef TESSERA_WITH_CUDA
  const absl::Status device = RunDot(stream, a, a, {.strategy = "warp_shuffle"}).status();
  EXPECT_EQ(device.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(device), "STRATEGY_UNSUPPORTED");
  EXPECT_EQ(ErrorMetadata(device)["needs"], "a CUDA device");
#endif
}

}  // namespace
}  // namespace tessera::test
