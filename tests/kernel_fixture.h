// Common parts of the kernel suites: this machine's devices, arrays on them, and exact references.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/base/element.h"
#include "kernels/compute.h"
#include "kernels/problem/take.h"

namespace tessera::test {

// Whether this run must not skip tests because there is no GPU.
inline bool GpuRequired() {
  const char* value = std::getenv("TESSERA_REQUIRE_GPU");
  return value != nullptr && std::string(value) == "1";
}

// Returns the first device of the kind, opened once per process, or null if this machine has none.
inline Device* TestDevice(Backend backend) {
  static auto& devices = *new std::map<Backend, std::unique_ptr<Device>>;
  auto [it, fresh] = devices.try_emplace(backend);
  if (fresh) {
    auto device = OpenDevice(backend == Backend::kCpu ? "cpu" : "cuda:0");
    if (device.ok()) it->second = *std::move(device);
  }
  return it->second.get();
}

// Skips the test if there is no such device. Fails it instead if a GPU is required.
#define TESSERA_NEED_DEVICE(backend)                                                     \
  if (::tessera::test::TestDevice(backend) == nullptr) {                                 \
    if (::tessera::test::GpuRequired()) FAIL() << "a GPU is required and there is none"; \
    GTEST_SKIP() << "this machine has no GPU";                                           \
  }                                                                                      \
  static_assert(true)

inline Stream& TestStream(Backend backend) {
  static auto& streams = *new std::map<Backend, std::unique_ptr<Stream>>;
  auto [it, fresh] = streams.try_emplace(backend);
  if (fresh) it->second = *MakeStream(*TestDevice(backend));
  EXPECT_TRUE(BeginRequest(*it->second).ok());
  return *it->second;
}

// One strategy and one of its types. Most suites are parametrised by this.
struct StrategyCase {
  std::string_view name;
  Backend backend;
  DType dtype;
};

// Whether TESSERA_FEW_TYPES leaves out a type: one whose code differs from that of another type of
// the same size only in its arithmetic.
inline bool IsLeftOut(DType dtype) {
  return (dtype == DType::kBF16 || dtype == DType::kI64) &&
         std::getenv("TESSERA_FEW_TYPES") != nullptr;
}

inline constexpr auto kAny = [](const auto&, DType) { return true; };
// Returns the cases of all strategies, or only those for which keep(strategy, dtype) is true.
template <class Problem, class Keep = decltype(kAny)>
std::vector<StrategyCase> StrategyCases(Keep keep = kAny,
                                        absl::Span<const DType> dtypes = kAllDTypes) {
  std::vector<StrategyCase> cases;
  for (const Strategy<Problem>* strategy : Strategies<Problem>())
    for (DType dtype : dtypes)
      if (strategy->dtypes.Contains(dtype) && keep(*strategy, dtype) && !IsLeftOut(dtype))
        cases.push_back({strategy->name, strategy->backend, dtype});
  return cases;
}

// Filters for the strategies and types that a test applies to.
inline constexpr auto kIntegers = [](const auto&, DType dtype) { return IsInteger(dtype); };
inline constexpr auto kFloats = [](const auto&, DType dtype) { return !IsInteger(dtype); };
template <DType... kDTypes>
inline constexpr auto kOf = [](const auto&, DType dtype) { return ((dtype == kDTypes) || ...); };
inline constexpr auto kDeterministic = [](const auto& strategy, DType) {
  return strategy.deterministic;
};

template <class Problem>
const Strategy<Problem>& StrategyOf(const StrategyCase& c) {
  for (const Strategy<Problem>* strategy : Strategies<Problem>())
    if (strategy->name == c.name && strategy->backend == c.backend) return *strategy;
  std::abort();
}

inline std::string CaseName(const testing::TestParamInfo<StrategyCase>& info) {
  const StrategyCase& c = info.param;
  return absl::StrCat(Absl(Name(c.backend)), "_", Absl(c.name), "_", Absl(Name(c.dtype)));
}

// Skips the test if this device lacks what the strategy needs. If a GPU is required, the test fails
// instead, unless a vendor's library is missing.
#define TESSERA_NEED_STRATEGY(Problem, row_case)                                    \
  TESSERA_NEED_DEVICE((row_case).backend);                                          \
  if (const std::string missing =                                                   \
          ::tessera::Missing(::tessera::test::StrategyOf<Problem>(row_case),        \
                             *::tessera::test::TestDevice((row_case).backend));     \
      !missing.empty()) {                                                           \
    if (::tessera::test::GpuRequired()) FAIL() << "the strategy needs " << missing; \
    GTEST_SKIP() << "the strategy needs " << missing;                               \
  }                                                                                 \
  static_assert(true)

template <class T>
concept FloatElement = !std::integral<T>;
template <class T>
concept HalfElement = sizeof(T) == 2;

// A suite for every strategy of a Problem in each of its types. Skips what this machine lacks.
template <class P>
class StrategyTest : public testing::TestWithParam<StrategyCase> {
 public:
  using Problem = P;

 protected:
  void SetUp() override { TESSERA_NEED_STRATEGY(Problem, GetParam()); }

  // Calls f(T{}), where T is the C++ type of the case's dtype, unless f does not accept it.
  template <class F>
  void ForType(F f) const {
    DispatchDType(GetParam().dtype, [&]<class T>(T zero) {
      if constexpr (std::invocable<F&, T>) f(zero);
    });
  }
  static Stream& stream() { return TestStream(GetParam().backend); }
  static RunOptions options(Launch launch = {}) {
    return {.strategy = GetParam().name, .launch = launch};
  }
  static const Strategy<Problem>& strategy() { return StrategyOf<Problem>(GetParam()); }
  static const LaunchLimits& limits() { return strategy().limits; }
};

// Defines a test of a StrategyTest whose body is compiled for each type T and runs for that of the
// case. The body is a member of a second fixture, which is not set up.
#define TESSERA_TYPED_TEST(Suite, Test) TESSERA_TEST_FOR(ForType, class, T, Suite, Test)
// Does the same for the types that the concept accepts.
#define TESSERA_TYPED_TEST_OF(Concept, Suite, Test) \
  TESSERA_TEST_FOR(ForType, Concept, T, Suite, Test)
// Defines a test of a MovingTest, whose body has an unsigned type U of the elements' size.
#define TESSERA_SIZED_TEST(Suite, Test) TESSERA_TEST_FOR(ForSize, class, U, Suite, Test)
#define TESSERA_TEST_FOR(ForEach, Concept, Type, Suite, Test)               \
  template <Concept Type>                                                   \
  struct Suite##_##Test : Suite {                                           \
    void TestBody() override;                                               \
  };                                                                        \
  TEST_P(Suite, Test) {                                                     \
    ForEach([]<Concept Type>(Type) { Suite##_##Test<Type>().TestBody(); }); \
  }                                                                         \
  template <Concept Type>                                                   \
  void Suite##_##Test<Type>::TestBody()

// Instantiates a suite for the strategies of its problem, or for those that StrategyCases returns
// with these arguments.
#define TESSERA_STRATEGIES(Suite, ...) \
  INSTANTIATE_TEST_SUITE_P(            \
      Strategies, Suite, testing::ValuesIn(StrategyCases<Suite::Problem>(__VA_ARGS__)), CaseName)

// Runs the tests of `Base` for some strategies and types only: those for which the last argument,
// keep(strategy, dtype), returns true.
#define TESSERA_STRATEGY_SUITE(Suite, Base, ...) \
  class Suite : public Base {};                  \
  TESSERA_STRATEGIES(Suite, __VA_ARGS__)

// A suite for one device of each kind. Skips what this machine lacks.
class BackendTest : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override { TESSERA_NEED_DEVICE(GetParam()); }
  static Stream& stream() { return TestStream(GetParam()); }
};
inline std::string BackendName(const testing::TestParamInfo<Backend>& info) {
  return std::string(Name(info.param));
}
#define TESSERA_BACKENDS(Suite)                                                            \
  INSTANTIATE_TEST_SUITE_P(Devices, Suite, testing::Values(Backend::kCpu, Backend::kCuda), \
                           BackendName)

// Convert an element to a number, and a number to the nearest element. Integers count thousandths.
template <class T>
long double Exact(T x) {
  return static_cast<long double>(static_cast<ValueOf<T>>(x));
}
template <class T>
T Element(double x) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(std::llround(x * 1000));
  } else {
    return static_cast<T>(static_cast<ValueOf<T>>(x));
  }
}

// A fast generator (splitmix64), because some arrays have 2^28 elements.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t Bits() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::int64_t Below(std::int64_t end) {
    return static_cast<std::int64_t>(Bits() % static_cast<std::uint64_t>(end));
  }
  double Uniform() { return static_cast<double>(Bits() >> 11) * 0x1p-53; }
  // Returns a number with mean 0 and standard deviation 1, close enough to normal for test data.
  double Normal() { return (Uniform() + Uniform() + Uniform() + Uniform() - 2.0) * 1.7320508; }

 private:
  std::uint64_t state_;
};

template <class T>
std::vector<T> NormalVector(std::int64_t n, std::uint64_t seed, double mean = 0.0,
                            double deviation = 1.0) {
  std::vector<T> v(static_cast<std::size_t>(n));
  Random random(seed);
  for (T& x : v) x = Element<T>(mean + deviation * random.Normal());
  return v;
}

// A suite for an operation that moves elements of any type and keeps their bits.
template <class P>
class MovingTest : public StrategyTest<P> {
 protected:
  // Calls f(U{}), where U is an unsigned type of the elements' size.
  template <class F>
  void ForSize(F f) const {
    DispatchSize(MovingTest::GetParam().dtype, f);
  }

  template <class U>
  static std::vector<U> Elements(std::int64_t n) {
    std::vector<U> all(static_cast<std::size_t>(n));
    Random random(1);
    for (U& element : all) element = static_cast<U>(random.Bits());
    // Bool elements have only these bytes.
    if (MovingTest::GetParam().dtype == DType::kBool)
      for (U& element : all) element &= 1;
    return all;
  }
};

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Returns the bits of a result: the bits of its number, then the integer and the index.
inline std::string Bits(const absl::StatusOr<ScalarResult>& result) {
  EXPECT_TRUE(result.ok()) << result.status();
  if (!result.ok()) return result.status().ToString();
  return absl::StrCat(absl::Hex(std::bit_cast<std::uint64_t>(result->value.real), absl::kZeroPad16),
                      " ", result->value.integer, " ", result->value.index);
}

// Returns 16-bit terms, and their sum, which exceeds the midpoint of two values by less than f32
// can resolve.
template <HalfElement T>
std::pair<std::vector<T>, double> HardToRound() {
  const bool half = std::is_same_v<T, Half>;
  return {{Element<T>(half ? 2048 : 256), Element<T>(1), Element<T>(half ? 0x1p-24 : 0x1p-40)},
          half ? 2050 : 258};
}

inline Shape MakeShape(std::initializer_list<std::int64_t> dims) {
  Shape shape;
  for (std::int64_t d : dims) shape[shape.rank++] = d;
  return shape;
}

inline View StridedView(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                        std::initializer_list<std::int64_t> strides) {
  View view{.data = data, .dtype = dtype, .shape = MakeShape(shape), .strides = {}};
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  return view;
}

template <class T>
View VectorView(const T* data, std::int64_t n) {
  return WholeView({DTypeOf<T>(), MakeShape({n})}, data);
}

// Returns the value. On an error, fails the test and returns a default value.
template <class T>
T Get(absl::StatusOr<T> result) {
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *std::move(result) : T{};
}

// Returns values[i] for an index of the type that arrays use.
template <class V>
decltype(auto) At(V& values, std::int64_t i) {
  return values[static_cast<std::size_t>(i)];
}

// A window of an array, whose element [0, ..., 0] is element `first` of the array.
struct StridedWindow {
  std::int64_t first = 0;
  std::vector<std::int64_t> shape, strides;

  View Of(const void* array, DType dtype) const {
    const void* const data =
        static_cast<const char*>(array) + first * static_cast<std::int64_t>(SizeOf(dtype));
    View view{.data = data, .dtype = dtype, .shape = {}, .strides = {}};
    for (std::int64_t extent : shape) view.shape[view.shape.rank++] = extent;
    std::copy(strides.begin(), strides.end(), view.strides.begin());
    return view;
  }
};

inline StridedWindow Whole(const std::vector<std::int64_t>& shape) {
  StridedWindow window{0, shape, std::vector<std::int64_t>(shape.size())};
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0; stride *= std::max<std::int64_t>(1, shape[i]))
    window.strides[i] = stride;
  return window;
}

// Returns the position in the host array of element `at` of the window, in row-major order.
inline std::int64_t PlaceIn(const StridedWindow& window, std::int64_t at) {
  std::int64_t place = window.first;
  for (std::size_t i = window.shape.size(); i-- > 0; at /= window.shape[i])
    place += at % window.shape[i] * window.strides[i];
  return place;
}

// Windows of an array of 6000 elements: blocks with a pitch, reversed, transposed, repeated and
// overlapping ones, and the whole array.
inline const std::vector<StridedWindow>& StridedWindows() {
  static const auto& windows =
      *new std::vector<StridedWindow>{{0, {5, 30, 40}, {1200, 40, 1}},
                                      {5, {4, 20, 3}, {100, 3, 1}},
                                      {5999, {7, 50}, {-70, -1}},
                                      {2, {30, 50}, {1, 30}},
                                      {11, {6, 40, 5}, {0, 7, 2}},
                                      {0, {1, 6000, 1}, {6000, 1, 1}},
                                      {9, {300}, {0}},
                                      {17, {2, 3, 4, 5}, {500, 100, 25, 3}}};
  return windows;
}

// The lines of a view along an axis, in row-major order.
class Lines {
 public:
  Lines(const View& x, int axis) : x_(x), axis_(axis < 0 ? axis + x.shape.rank : axis) {
    for (int i = 0; i < x.shape.rank; ++i)
      (i < axis_ ? outer : i > axis_ ? inner : length) *= x.shape[i];
  }
  std::int64_t count() const { return outer * inner; }

  // Returns the elements of a line, where host[first] is element [0, ..., 0] of the view.
  template <class T>
  std::vector<T> Elements(const std::vector<T>& host, std::int64_t first, std::int64_t line) const {
    for (int i = x_.shape.rank - 1; i >= 0; --i) {
      if (i == axis_) continue;
      first += line % x_.shape[i] * At(x_.strides, i);
      line /= x_.shape[i];
    }
    std::vector<T> elements;
    for (std::int64_t i = 0; i < length; ++i)
      elements.push_back(At(host, first + i * At(x_.strides, axis_)));
    return elements;
  }
  // Returns the place of element i of a line in an array whose lines have `count` elements.
  std::int64_t Place(std::int64_t line, std::int64_t i, std::int64_t count) const {
    return (line / inner * count + i) * inner + line % inner;
  }

  std::int64_t outer = 1, length = 1, inner = 1;

 private:
  const View& x_;
  const int axis_;
};

// Device memory between guard bytes that must not change. It begins `offset` elements after an
// aligned address.
template <class T>
class DeviceArray {
 public:
  DeviceArray(Stream& stream, const std::vector<T>& values, std::size_t offset = 0)
      : stream_(stream), offset_(kGuard + offset), size_(values.size()) {
    absl::StatusOr<Memory> memory =
        Allocate(stream.device(), (offset_ + size_ + kGuard) * sizeof(T));
    if (!memory.ok()) ADD_FAILURE() << memory.status();
    if (memory.ok()) memory_ = *std::move(memory);
    const std::size_t begin = offset_ * sizeof(T), end = (offset_ + size_) * sizeof(T);
    const std::vector<unsigned char> guard(begin + kGuard * sizeof(T), kGuardByte);
    auto* bytes = static_cast<unsigned char*>(memory_.data());
    EXPECT_TRUE(CopyToDevice(stream, bytes, guard.data(), begin).ok());
    EXPECT_TRUE(CopyToDevice(stream, bytes + begin, values.data(), end - begin).ok());
    EXPECT_TRUE(CopyToDevice(stream, bytes + end, guard.data(), kGuard * sizeof(T)).ok());
    EXPECT_TRUE(Synchronize(stream).ok());
  }
  // Fills every byte with the guard pattern, for an array to which a result is written.
  DeviceArray(Stream& stream, std::int64_t size)
      : DeviceArray(stream, std::vector<T>(static_cast<std::size_t>(size), Poison())) {}

  T* data() const { return static_cast<T*>(memory_.data()) + offset_; }
  View view() const { return VectorView(data(), static_cast<std::int64_t>(size_)); }
  View view(std::initializer_list<std::int64_t> shape) const {
    return WholeView({DTypeOf<T>(), MakeShape(shape)}, data());
  }

  // Returns the current values. Fails the test if a guard byte has changed.
  std::vector<T> Values() {
    std::vector<unsigned char> now((offset_ + size_ + kGuard) * sizeof(T));
    EXPECT_TRUE(CopyToHost(stream_, now.data(), memory_.data(), now.size()).ok());
    std::vector<T> values(size_);
    if (size_ > 0) std::memcpy(values.data(), now.data() + offset_ * sizeof(T), size_ * sizeof(T));
    const auto is_guard = [](unsigned char byte) { return byte == kGuardByte; };
    const auto begin = now.begin() + static_cast<std::ptrdiff_t>(offset_ * sizeof(T));
    const auto end = begin + static_cast<std::ptrdiff_t>(size_ * sizeof(T));
    EXPECT_TRUE(std::all_of(now.begin(), begin, is_guard) && std::all_of(end, now.end(), is_guard))
        << "bytes around the array were overwritten";
    return values;
  }

  // Fails the test unless the array still holds these values.
  void ExpectUnchanged(const std::vector<T>& values) {
    const std::vector<T> now = Values();
    EXPECT_TRUE(now.empty() || std::memcmp(now.data(), values.data(), now.size() * sizeof(T)) == 0)
        << "an operand was written to";
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kGuardByte = 0xff;  // A NaN in every floating-point type.
  static T Poison() {
    T value;
    std::memset(&value, kGuardByte, sizeof value);
    return value;
  }

  Stream& stream_;
  std::size_t offset_;
  std::size_t size_;
  Memory memory_;
};

// A stream with this amount of scratch memory.
struct Limited {
  Limited(Backend backend, std::uint64_t bytes)
      : budget(bytes), stream(*MakeStream(*TestDevice(backend))) {
    stream->SetScratchBudget(&budget);
    EXPECT_TRUE(BeginRequest(*stream).ok());
  }
  Budget budget;
  std::unique_ptr<Stream> stream;
};

// Returns TESSERA_LARGEST, the largest number of elements that an array needs. It is set when tests
// run under a tool that watches every access.
inline std::int64_t Largest() {
  const char* value = std::getenv("TESSERA_LARGEST");
  return value == nullptr ? std::numeric_limits<std::int64_t>::max() : std::atoll(value);
}
inline bool Watched() { return std::getenv("TESSERA_LARGEST") != nullptr; }
// Whether that tool is so slow that each path is taken once, rather than in every combination.
inline bool WatchedClosely() { return Largest() <= 5000; }

// The sizes up to Largest().
inline std::vector<std::int64_t> Sizes(std::vector<std::int64_t> sizes) {
  std::erase_if(sizes, [](std::int64_t n) { return n > Largest(); });
  return sizes;
}

inline const std::vector<std::int64_t>& AwkwardSizes() {
  static const auto& sizes = *new std::vector<std::int64_t>(
      Sizes({0, 1, 2, 31, 32, 33, 255, 257, 1023, 4099, 65537, (1 << 20) + 1}));
  return sizes;
}

// Returns a size that exceeds every cache and every fixed grid.
inline std::int64_t LargeSize(Backend backend) {
  return std::min(Largest(), (std::int64_t{1} << (backend == Backend::kCuda ? 28 : 24)) + 3);
}

// Returns launches with no parameter set, and with one set to some values in the strategy's range.
inline std::vector<Launch> Launches(const LaunchLimits& limits) {
  std::vector<Launch> launches = {{}};
  const auto inside = [](LaunchLimits::Range r, std::uint32_t v) {
    return v >= r.min && v <= r.max;
  };
  for (std::uint32_t block : {32u, 33u, 96u, 100u, 257u, 512u, 1000u, 1024u})
    if (inside(limits.block_size, block)) launches.push_back({.block_size = block});
  for (std::uint32_t grid : {1u, 7u, 1000u})
    if (inside(limits.grid_size, grid)) launches.push_back({.grid_size = grid});
  for (std::uint32_t items : {1u, 3u, 16u})
    if (inside(limits.items_per_thread, items)) launches.push_back({.items_per_thread = items});
  if (inside(limits.block_size, 160) && inside(limits.items_per_thread, 5))
    launches.push_back({.block_size = 160, .items_per_thread = 5});
  return launches;
}

}  // namespace tessera::test
