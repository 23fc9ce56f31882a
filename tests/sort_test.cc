// Every strategy of Sort in the table, compared with a stable sort by values.
#include <array>
#include <numeric>
#include <optional>

#include "kernels/choose/pace.h"
#include "kernels/device/scratch.h"
#include "kernels/problem/sort.h"
#include "kernels/problem/top_k.h"
#include "kernels/run/operation.h"
#include "tests/expressions.h"

namespace tessera::test {
namespace {

enum class Values {
  kNormal,
  kUniformBits,  // every bit of an element is random
  kFew,          // five different values
  kEqual,        // all elements are equal
  kAscending,    // as far as the type can distinguish adjacent values
  kDescending,
  kSpecial,  // NaNs, infinities, zeros of both signs, the ends of the integers
  kZeros,    // only zeros, of both signs
};
constexpr std::array kAllValues = {Values::kNormal,  Values::kUniformBits, Values::kFew,
                                   Values::kEqual,   Values::kAscending,   Values::kDescending,
                                   Values::kSpecial, Values::kZeros};

template <class T>
using Bytes = std::array<unsigned char, sizeof(T)>;

template <class T>
T FromBits(std::uint64_t bits) {
  T element;
  std::memcpy(&element, &bits, sizeof element);
  return element;
}

template <class T>
T SpecialValue(Random& random) {
  const std::uint64_t choice = random.Bits() % 9;
  if constexpr (std::is_integral_v<T>) {
    using Limits = std::numeric_limits<T>;
    const std::array<T, 6> values = {Limits::min(), Limits::max(), 0, -1, Limits::min() + 1, 1};
    return choice < values.size() ? values[choice] : Element<T>(random.Normal());
  } else {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const std::array<double, 6> values = {kInfinity, -kInfinity, 0.0, -0.0, nan, -nan};
    if (choice >= values.size()) return Element<T>(random.Normal());
    T element = Element<T>(values[choice]);
    auto raw = std::bit_cast<Bytes<T>>(element);
    // NaNs with different bits, and subnormal numbers.
    if (choice > 1) raw[0] = static_cast<unsigned char>(raw[0] | (random.Bits() >> 8) % 3);
    return std::bit_cast<T>(raw);
  }
}

template <class T>
std::vector<T> MakeValues(Values values, std::int64_t n, std::uint64_t seed) {
  Random random(seed);
  const auto element = [&](std::int64_t i) -> T {
    const double step = static_cast<double>(i) / 16 - 1000;
    switch (values) {
      case Values::kUniformBits:
        return FromBits<T>(random.Bits());
      case Values::kSpecial:
        return SpecialValue<T>(random);
      case Values::kFew:
        return Element<T>(static_cast<double>(random.Bits() % 5));
      case Values::kEqual:
        return Element<T>(3);
      case Values::kZeros:
        return Element<T>(random.Bits() % 2 == 0 ? 0.0 : -0.0);
      case Values::kAscending:
        return Element<T>(step);
      case Values::kDescending:
        return Element<T>(-step);
      case Values::kNormal:
        break;
    }
    return Element<T>(random.Normal());
  };
  std::vector<T> all;
  for (std::int64_t i = 0; i < n; ++i) all.push_back(element(i));
  return all;
}

// Returns the positions of a row's elements in sorted order, by their values alone.
template <class T>
std::vector<std::int64_t> Sorted(const std::vector<T>& row, bool descending) {
  std::vector<std::int64_t> order(row.size());
  std::iota(order.begin(), order.end(), 0);
  using Number = std::conditional_t<std::is_integral_v<T>, T, double>;
  const auto number = [&](std::int64_t i) {
    return static_cast<Number>(static_cast<ValueOf<T>>(At(row, i)));
  };
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t i, std::int64_t j) {
    const Number x = number(descending ? j : i), y = number(descending ? i : j);
    return x < y || (x == x && y != y);  // NaN comes after all numbers
  });
  return order;
}

struct How {
  bool descending = false;
  bool values = true, indices = true;
};
// Returns another combination at each call, so that many shapes together have all of them.
How NextHow() {
  static std::uint32_t next = 0;
  ++next;
  return {next % 2 != 0, next % 3 != 1, next % 3 != 2};
}

struct Result {
  std::string strategy;
  std::vector<std::int64_t> indices;
};

class SortTest : public StrategyTest<SortProblem> {
 protected:
  static bool TooSlow(const SortProblem& p) {
    return GetParam().backend == Backend::kCuda && strategy().cost(p).depth > 4'000'000;
  }

  template <class T>
  static Memory OnDevice(const std::vector<T>& host) {
    const std::size_t bytes = host.size() * sizeof(T);
    Memory memory = Get(Allocate(stream().device(), bytes));
    EXPECT_TRUE(CopyToDevice(stream(), memory.data(), host.data(), bytes).ok());
    EXPECT_TRUE(Synchronize(stream()).ok());
    return memory;
  }

  // x is a view of device memory whose element [0, ..., 0] is host[first].
  template <class T>
  void Check(const std::vector<T>& host, const View& x, std::int64_t first, int axis,
             const How& how, Launch launch = {}) {
    const int rank = x.shape.rank, at = axis < 0 ? axis + rank : axis;
    const std::int64_t n = x.shape[at], rows = n == 0 ? 0 : x.elements() / n;
    SCOPED_TRACE(absl::StrCat("rows ", rows, " n ", n, " axis ", axis,
                              how.descending ? " descending" : "", how.values ? " values" : "",
                              how.indices ? " indices" : "", " block ", launch.block_size));
    const SortProblem problem{.dtype = x.dtype,
                              .descending = how.descending,
                              .wants_values = how.values,
                              .wants_indices = how.indices,
                              .rows = rows,
                              .n = n,
                              .launch = launch};
    if (TooSlow(problem)) return;
    const OperationSpec spec = SortSpec{
        .axis = axis, .descending = how.descending, .values = how.values, .indices = how.indices};
    const ResultType type = Get(TypeOf(spec, {x}));
    ASSERT_EQ(type.arrays.size(), 2u);
    EXPECT_EQ(type.arrays[0].dtype, x.dtype);
    EXPECT_EQ(type.arrays[1].dtype, DType::kI64);
    for (const ArrayType& array : type.arrays) EXPECT_EQ(array.shape, x.shape);
    // An array that is not wanted must not be asked for.
    DeviceArray<T> values(stream(), how.values ? x.elements() : 0);
    DeviceArray<std::int64_t> indices(stream(), how.indices ? x.elements() : 0);
    const auto refuse = []() -> absl::StatusOr<void*> { return absl::InternalError("unwanted"); };
    const Output outputs[] = {how.values ? Output(values.data()) : Output(refuse),
                              how.indices ? Output(indices.data()) : Output(refuse)};
    const auto result = tessera::Run(spec, stream(), {x}, outputs, options(launch));
    if (!Refusal(strategy(), problem).empty()) {
      EXPECT_EQ(ErrorReason(result.status()), "STRATEGY_UNSUPPORTED") << result.status();
      return;
    }
    const Stats stats = Get(result).stats;
    EXPECT_EQ(stats.strategy, GetParam().name);
    EXPECT_EQ(stats.roundoff, 0);
    CheckRows(host, x, first, at, how, values.Values(), indices.Values());
  }

  // Checks rows without gaps, `offset` elements off any alignment.
  template <class T>
  void CheckArray(const std::vector<T>& host, std::int64_t rows, std::int64_t n, const How& how,
                  std::size_t offset = 0, Launch launch = {}) {
    DeviceArray<T> array(stream(), host, offset);
    Check(host, array.view({rows, n}), 0, 1, how, launch);
    array.ExpectUnchanged(host);
  }

 private:
  template <class T>
  static void CheckRows(const std::vector<T>& host, const View& x, std::int64_t first, int at,
                        const How& how, const std::vector<T>& values,
                        const std::vector<std::int64_t>& indices) {
    const int rank = x.shape.rank;
    const std::int64_t n = x.shape[at];
    std::int64_t inner = 1;
    for (int i = at + 1; i < rank; ++i) inner *= x.shape[i];
    std::vector<T> row(static_cast<std::size_t>(n));
    for (std::int64_t r = 0; n > 0 && r < x.elements() / n; ++r) {
      std::int64_t begin = first, rest = r;
      for (int i = rank - 1; i >= 0; --i) {
        if (i == at) continue;
        begin += rest % x.shape[i] * At(x.strides, i);
        rest /= x.shape[i];
      }
      for (std::int64_t i = 0; i < n; ++i) At(row, i) = At(host, begin + i * At(x.strides, at));
      const std::vector<std::int64_t> want = Sorted(row, how.descending);
      for (std::int64_t j = 0; j < n; ++j) {
        const std::int64_t place = (r / inner * n + j) * inner + r % inner;
        if (how.indices) {
          ASSERT_EQ(At(indices, place), At(want, j)) << "row " << r << " element " << j;
        }
        if (how.values) {
          ASSERT_EQ(std::bit_cast<Bytes<T>>(At(values, place)),
                    std::bit_cast<Bytes<T>>(At(row, At(want, j))))
              << "row " << r << " element " << j;
        }
      }
    }
  }
};

// The lengths around the sizes of warps, of the tiles of each strategy, and of their powers.
std::vector<std::int64_t> Lengths() {
  return Sizes({1,    2,     3,     31,    32,    33,    63,     65,     199,    200,  201,
                255,  256,   257,   511,   513,   1000,  1023,   1024,   1025,   2047, 2048,
                2049, 3071,  3072,  3073,  4095,  4096,  4097,   6143,   6144,   6145, 8192,
                8193, 12287, 12289, 20000, 65535, 65537, 131072, 131073, 300'007});
}

TEST_P(SortTest, Rows) {
  ForType([&]<class T>(T) {
    std::uint64_t seed = 1;
    for (std::int64_t n : Lengths()) {
      for (Values values : kAllValues) {
        if (++seed % 5 != 0 && (n > 5000 || WatchedClosely())) continue;
        for (std::int64_t rows = 1; rows <= (n > 5000 ? 1 : 3); rows += 2)
          CheckArray(MakeValues<T>(values, rows * n, seed), rows, n, NextHow(),
                     static_cast<std::size_t>(n % 5));
      }
    }
  });
}

TEST_P(SortTest, EveryResultOfEveryOrder) {
  ForType([&]<class T>(T) {
    for (std::int64_t n : Sizes({7, 700, 5000, 70'000})) {
      for (bool descending : {false, true})
        for (int wanted : {1, 2, 3})
          CheckArray(MakeValues<T>(Values::kSpecial, 2 * n, 3), 2, n,
                     {descending, (wanted & 1) != 0, (wanted & 2) != 0}, 1);
    }
  });
}

TEST_P(SortTest, ManyRows) {
  ForType([&]<class T>(T) {
    for (std::int64_t n : {1,   2,   3,   15,  16,   17,   31,   33,   64,   100,
                           127, 129, 256, 300, 1000, 1500, 2100, 3500, 4096, 5000}) {
      const std::int64_t rows = WatchedClosely() ? 3 : 7 + 20'000 / n;
      if (rows * n > Largest()) continue;
      for (Values values : {Values::kNormal, Values::kFew, Values::kSpecial})
        CheckArray(MakeValues<T>(values, rows * n, 5), rows, n, NextHow(), n % 2 == 0 ? 0 : 3);
    }
  });
}

// Cores share the rows if there are more rows than a row has parts.
TEST_P(SortTest, LongRows) {
  if (GetParam().backend != Backend::kCpu) return;
  ForType([&]<class T>(T) {
    const std::int64_t n = (1 << 17) + 3, rows = 5;
    if (rows * n > Largest()) return;
    CheckArray(MakeValues<T>(Values::kSpecial, rows * n, 6), rows, n, NextHow(), 1);
  });
}

TEST_P(SortTest, RandomShapes) {
  ForType([&]<class T>(T) {
    Random random(17);
    const auto below = [&](std::int64_t end) {
      return static_cast<std::int64_t>(random.Bits() % static_cast<std::uint64_t>(end));
    };
    for (int i = 0; i < (WatchedClosely() ? 4 : 40); ++i) {
      const std::int64_t n =
          1 + below(std::min<std::int64_t>(Largest(), i % 2 == 0 ? 300 : 20'000));
      const std::int64_t rows = 1 + below(std::min<std::int64_t>(Largest(), 40'000) / n + 1);
      const Values values = kAllValues[random.Bits() % kAllValues.size()];
      CheckArray(MakeValues<T>(values, rows * n, random.Bits()), rows, n, NextHow(),
                 static_cast<std::size_t>(below(9)));
    }
  });
}

TEST_P(SortTest, Launches) {
  ForType([&]<class T>(T) {
    const std::int64_t n = std::min<std::int64_t>(7001, Largest() / 3);
    for (const Launch& launch : Launches(limits()))
      CheckArray(MakeValues<T>(Values::kNormal, 3 * n, 2), 3, n, NextHow(), 3, launch);
  });
}

TEST_P(SortTest, AxesAndStridedViews) {
  ForType([&]<class T>(T) {
    const auto values = MakeValues<T>(Values::kFew, 6000, 10);
    DeviceArray<T> array(stream(), values, 1);
    struct Window {
      std::int64_t offset;
      std::vector<std::int64_t> shape, strides;
    };
    const Window windows[] = {{0, {5, 30, 40}, {1200, 40, 1}},
                              {5, {4, 20, 3}, {100, 3, 1}},
                              {5999, {7, 50}, {-70, -1}},
                              {2, {30, 50}, {1, 30}},
                              {11, {6, 40, 5}, {0, 7, 2}},
                              {0, {1, 6000, 1}, {6000, 1, 1}},
                              {9, {300}, {-0}},
                              {17, {2, 3, 4, 5}, {500, 100, 25, 3}}};
    for (const Window& w : windows) {
      const auto view = Get(MakeView({GetParam().dtype, MakeShape({6000})}, array.data(), w.offset,
                                     w.shape, w.strides));
      const int rank = static_cast<int>(w.shape.size());
      for (int axis = -rank; axis < rank; ++axis) Check(values, view, w.offset, axis, NextHow());
    }
    array.ExpectUnchanged(values);
  });
}

TEST_P(SortTest, Long) {
  ForType([&]<class T>(T) {
    const bool cpu = GetParam().backend == Backend::kCpu;
    for (std::int64_t n : Sizes({(1 << 19) + 77, 1 << 20, (1 << 21) + 5001})) {
      for (Values values : {Values::kNormal, Values::kUniformBits, Values::kSpecial}) {
        if (cpu && (values != Values::kSpecial || n >= 1 << 20)) continue;
        CheckArray(MakeValues<T>(values, n, 9), 1, n, NextHow(), static_cast<std::size_t>(n % 4));
      }
    }
  });
}

TEST_P(SortTest, EmptyArrays) {
  ForType([&]<class T>(T) {
    DeviceArray<T> nothing(stream(), 0);
    for (const View& x : {nothing.view({0}), nothing.view({3, 0}), nothing.view({0, 3})})
      for (int axis = 0; axis < x.shape.rank; ++axis) Check(std::vector<T>(), x, 0, axis, {});
  });
}

// The strategy takes no more scratch memory than it declares.
TEST_P(SortTest, StaysWithinItsScratchMemory) {
  ForType([&]<class T>(T) {
    struct Case {
      std::int64_t rows, n;
    };
    for (const auto& [rows, n] : {Case{1, 1'000'003}, {70, 3001}, {5000, 17}, {3, 1}}) {
      for (bool indices : {false, true}) {
        if (rows * n > Largest()) continue;
        const SortProblem problem{.dtype = DTypeOf<T>(),
                                  .wants_values = !indices,
                                  .wants_indices = indices,
                                  .rows = rows,
                                  .n = n};
        if (!Refusal(strategy(), problem).empty() || TooSlow(problem)) continue;
        // A block of scratch memory has at least kKept bytes.
        const std::uint64_t most = strategy().scratch == nullptr ? 0 : strategy().scratch(problem);
        const Limited limited(GetParam().backend, most + 5 * ScratchBlocks::kKept);
        const DeviceArray<T> x(stream(), MakeValues<T>(Values::kNormal, rows * n, 4));
        DeviceArray<T> values(stream(), rows * n);
        DeviceArray<std::int64_t> places(stream(), rows * n);
        const auto result = tessera::Run(
            OperationSpec(SortSpec{.values = !indices, .indices = indices}), *limited.stream,
            {x.view({rows, n})}, {Output(values.data()), Output(places.data())}, options());
        EXPECT_TRUE(result.ok()) << result.status() << " rows " << rows << " n " << n;
      }
    }
  });
}

TESSERA_STRATEGIES(SortTest);

// A row with counters beyond 32 bits. A build without CUDA has no such case.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SortLargeTest);
TESSERA_STRATEGY_SUITE(SortLargeTest, SortTest, [](const auto& strategy, DType dtype) {
  return strategy.backend == Backend::kCuda && dtype == DType::kF32;
});

// A permutation of the numbers below n: element i is i * kStep mod n, for an n that shares no
// factor with the step. Its sorted order is known without sorting. The numbers are the bits of f32
// numbers that increase with them, because all are positive.
TEST_P(SortLargeTest, APermutation) {
  if (Watched()) GTEST_SKIP() << "the array is too large for this tool";
  constexpr std::int64_t n = (std::int64_t{1} << 30) + 3, kStep = 1'000'003;
  const SortProblem problem{.rows = 1, .n = n};
  if (!Refusal(strategy(), problem).empty() || TooSlow(problem)) return;
  std::vector<std::uint32_t> host(static_cast<std::size_t>(n));
  std::int64_t value = 0;
  for (std::uint32_t& x : host) {
    x = static_cast<std::uint32_t>(value);
    value += kStep;
    if (value >= n) value -= n;
  }
  std::vector<std::uint32_t> sorted(host.size());
  std::vector<std::int64_t> places(host.size());
  const Memory x = OnDevice(host), values = OnDevice(sorted), indices = OnDevice(places);
  const auto result = tessera::Run(OperationSpec(SortSpec{}), stream(),
                                   {WholeView({DType::kF32, MakeShape({n})}, x.data())},
                                   {Output(values.data()), Output(indices.data())}, options());
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_TRUE(CopyToHost(stream(), sorted.data(), values.data(), sorted.size() * 4).ok());
  ASSERT_TRUE(CopyToHost(stream(), places.data(), indices.data(), places.size() * 8).ok());
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < n; ++i) wrong += At(sorted, i) != i || At(host, At(places, i)) != i;
  EXPECT_EQ(wrong, 0);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SortLargestTest);
TESSERA_STRATEGY_SUITE(SortLargestTest, SortTest, [](const auto& strategy, DType dtype) {
  return strategy.backend == Backend::kCuda && dtype == DType::kF16;
});

// Every 1000th element is lower than the others, which are equal, so the positions show the order.
TEST_P(SortLargestTest, EqualElementsKeepTheirOrder) {
  if (Watched()) GTEST_SKIP() << "the array is too large for this tool";
  constexpr std::int64_t n = (std::int64_t{1} << 30) + 12'345, kLow = (n + 999) / 1000;
  const SortProblem problem{.dtype = DType::kF16, .rows = 1, .n = n};
  if (!Refusal(strategy(), problem).empty() || TooSlow(problem)) return;
  std::vector<Half> host(static_cast<std::size_t>(n), Element<Half>(1));
  for (std::int64_t i = 0; i < n; i += 1000) At(host, i) = Element<Half>(-1);
  const Memory x = OnDevice(host), indices = Get(Allocate(stream().device(), n * 8));
  const auto refuse = []() -> absl::StatusOr<void*> { return absl::InternalError("unwanted"); };
  const auto result = tessera::Run(OperationSpec(SortSpec{.values = false}), stream(),
                                   {WholeView({DType::kF16, MakeShape({n})}, x.data())},
                                   {Output(refuse), Output(indices.data())}, options());
  ASSERT_TRUE(result.ok()) << result.status();
  std::vector<std::int64_t> places(1 << 24);
  const auto count = static_cast<std::int64_t>(places.size());
  for (const std::int64_t first : {std::int64_t{0}, n / 2, n - count}) {
    ASSERT_TRUE(CopyToHost(stream(), places.data(),
                           static_cast<const std::int64_t*>(indices.data()) + first,
                           places.size() * 8)
                    .ok());
    std::int64_t wrong = 0;
    for (std::int64_t i = first; i < first + count; ++i) {
      const std::int64_t high = i - kLow;
      wrong += At(places, i - first) != (high < 0 ? i * 1000 : high + high / 999 + 1);
    }
    EXPECT_EQ(wrong, 0) << first;
  }
}

// Short rows with more elements than 32 bits count. Each row has the numbers 0 to 15.
TEST_P(SortLargestTest, ShortRows) {
  if (Watched()) GTEST_SKIP() << "the array is too large for this tool";
  constexpr std::int64_t n = 16, rows = (std::int64_t{1} << 27) + 5;
  const SortProblem problem{.dtype = DType::kF16, .wants_indices = false, .rows = rows, .n = n};
  if (!Refusal(strategy(), problem).empty() || TooSlow(problem)) return;
  std::vector<Half> numbers, host(static_cast<std::size_t>(rows * n));
  for (int i = 0; i < n; ++i) numbers.push_back(Element<Half>(i));
  for (std::int64_t i = 0; i < rows * n; ++i) At(host, i) = At(numbers, i * 7 % n);
  const Memory x = OnDevice(host), values = OnDevice(host);
  const auto refuse = []() -> absl::StatusOr<void*> { return absl::InternalError("unwanted"); };
  const auto result = tessera::Run(OperationSpec(SortSpec{.indices = false}), stream(),
                                   {WholeView({DType::kF16, MakeShape({rows, n})}, x.data())},
                                   {Output(values.data()), Output(refuse)}, options());
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_TRUE(CopyToHost(stream(), host.data(), values.data(), host.size() * 2).ok());
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < rows * n; ++i)
    wrong += std::bit_cast<std::uint16_t>(At(host, i)) !=
             std::bit_cast<std::uint16_t>(At(numbers, i % n));
  EXPECT_EQ(wrong, 0);
}

// --- Keys ---

TEST(SortKeys, AreThoseOfTopK) {
  const auto check = [&]<class T>(T) {
    using Word = KeyOf<T>;
    Random random(3);
    for (bool descending : {false, true}) {
      const SortKey<Word> key = MakeSortKey<Word>(DTypeOf<T>(), descending);
      for (int i = 0; i < 100'000; ++i) {
        const T element =
            i % 2 == 0 ? SpecialValue<T>(random) : FromBits<T>(random.Bits() << i % 7);
        ASSERT_EQ(key(std::bit_cast<Word>(element)), TopKKey(element, !descending));
      }
    }
  };
  for (DType dtype : kAllDTypes) DispatchDType(dtype, check);
}

// --- Expressions, bool and one-byte integers ---

class SortOnDevice : public BackendTest {
 protected:
  struct Found {
    DType dtype = DType::kF32;
    std::vector<double> values;
    std::vector<std::int64_t> indices;
  };
  static Found Run(SortSpec sort, const std::vector<View>& x) {
    const OperationSpec spec = std::move(sort);
    const ResultType type = Get(TypeOf(spec, x));
    if (type.arrays.size() != 2) return {};
    DeviceArray<char> values(stream_of(), static_cast<std::int64_t>(type.arrays[0].bytes()));
    DeviceArray<std::int64_t> indices(stream_of(), type.arrays[1].shape.elements());
    const Output outputs[] = {Output(values.data()), Output(indices.data())};
    Get(tessera::Run(spec, stream_of(), x, outputs, {}));
    Found found{type.arrays[0].dtype, {}, indices.Values()};
    const std::vector<char> bytes = values.Values();
    DispatchElement(found.dtype, [&]<class T>(T element) {
      for (std::size_t at = 0; at < bytes.size(); at += sizeof element) {
        std::memcpy(&element, bytes.data() + at, sizeof element);
        found.values.push_back(static_cast<double>(static_cast<ValueOf<T>>(element)));
      }
    });
    return found;
  }
  static Stream& stream_of() { return TestStream(GetParam()); }
};

using Numbers = std::vector<double>;
using Places = std::vector<std::int64_t>;

TEST_P(SortOnDevice, BytesKeepTheirType) {
  const DeviceArray<std::uint8_t> bytes(stream(), std::vector<std::uint8_t>{200, 1, 0, 255, 1, 7});
  const View row = StridedView(bytes.data(), DType::kU8, {6}, {1});
  EXPECT_EQ(Run({}, {row}).values, (Numbers{0, 1, 1, 7, 200, 255}));
  EXPECT_EQ(Run({}, {row}).dtype, DType::kU8);
  EXPECT_EQ(Run({}, {row}).indices, (Places{2, 1, 4, 5, 0, 3}));
  const View two = StridedView(bytes.data(), DType::kI8, {2, 3}, {3, 1});
  EXPECT_EQ(Run({.axis = 0}, {two}).values, (Numbers{-56, 1, 0, -1, 1, 7}));
  EXPECT_EQ(Run({.axis = 0}, {two}).indices, (Places{0, 0, 0, 1, 1, 1}));
  const Found backwards = Run({.axis = 0, .descending = true}, {two});
  EXPECT_EQ(backwards.dtype, DType::kI8);
  EXPECT_EQ(backwards.values, (Numbers{-1, 1, 7, -56, 1, 0}));
  EXPECT_EQ(backwards.indices, (Places{1, 0, 1, 0, 1, 0}));
  const DeviceArray<std::uint8_t> truths(stream(), std::vector<std::uint8_t>{1, 0, 1, 0});
  const Found found = Run({}, {StridedView(truths.data(), DType::kBool, {4}, {1})});
  EXPECT_EQ(found.dtype, DType::kBool);
  EXPECT_EQ(found.values, (Numbers{0, 0, 1, 1}));
  EXPECT_EQ(found.indices, (Places{1, 3, 0, 2}));
}

TEST_P(SortOnDevice, Expressions) {
  const DeviceArray<float> x(stream(), std::vector<float>{1, -5, 2, 4, 3, -7});
  const View two = StridedView(x.data(), DType::kF32, {2, 3}, {1, 2});  // 1 2 3, -5 4 -7
  const View row = StridedView(x.data(), DType::kF32, {3}, {2});        // 1 2 3
  const Nodes size = {In(0), Op(MapOp::kAbs, {0})};
  EXPECT_EQ(Run({.axis = 0, .expression = size}, {two}).values, (Numbers{1, 2, 3, 5, 4, 7}));
  EXPECT_EQ(Run({.axis = 1, .descending = true, .expression = size}, {two}).indices,
            (Places{2, 1, 0, 2, 0, 1}));
  // The operand is broadcast along the sorted axis.
  const Nodes product = {In(0), In(1), Op(MapOp::kMultiply, {0, 1})};
  EXPECT_EQ(Run({.axis = 0, .expression = product}, {row, two}).values,
            (Numbers{-5, 4, -21, 1, 8, 9}));
  EXPECT_EQ(Run({.axis = 0, .expression = product}, {row, two}).indices,
            (Places{1, 0, 1, 0, 1, 0}));
  const Nodes greater = {In(0), In(1), Op(MapOp::kGreater, {0, 1})};
  const Found found = Run({.expression = greater}, {two, row});
  EXPECT_EQ(found.dtype, DType::kBool);
  EXPECT_EQ(found.values, (Numbers{0, 0, 0, 0, 0, 1}));
  EXPECT_EQ(found.indices, (Places{0, 1, 2, 0, 2, 1}));
}

TESSERA_BACKENDS(SortOnDevice);

// A result that is not wanted needs neither memory nor time for its copy.
TEST(SortOnTheCpu, CopiesOnlyWhatIsWanted) {
  Stream& stream = TestStream(Backend::kCpu);
  const Strategy<SortProblem>& strategy =
      StrategyOf<SortProblem>({"cpu_radix", Backend::kCpu, DType::kF32});
  Pace pace(stream.device().info());
  constexpr std::int64_t kN = 12'500, kRows = 8;
  struct Copies {
    std::uint64_t bytes = 0;
    double seconds = 0;
  };
  const auto copies = [&](DType dtype, int axis, bool values, bool indices) {
    const SortProblem rows{.dtype = IsComputed(dtype) ? dtype : DType::kI32,
                           .wants_values = values,
                           .wants_indices = indices,
                           .rows = kRows,
                           .n = kN};
    const View x =
        WholeView({dtype, axis == 0 ? MakeShape({kN, kRows}) : MakeShape({kRows, kN})}, nullptr);
    const Stats stats =
        Get(tessera::Run(
                OperationSpec(SortSpec{.axis = axis, .values = values, .indices = indices}), stream,
                {x}, {nullptr, nullptr}, {.pace = &pace, .check_only = true}))
            .stats;
    return Copies{stats.scratch_bytes - strategy.scratch(rows),
                  stats.estimate_seconds - pace.Estimate(strategy, rows)};
  };
  const Copies values = copies(DType::kF32, 0, true, false),
               indices = copies(DType::kF32, 0, false, true),
               both = copies(DType::kF32, 0, true, true);
  EXPECT_EQ(values.bytes, kN * kRows * (4 + 4));
  EXPECT_EQ(indices.bytes, kN * kRows * (4 + 8));
  EXPECT_EQ(both.bytes, kN * kRows * (4 + 4 + 8));
  const View gathered = StridedView(nullptr, DType::kF32, {kRows, kN}, {1, kRows});
  EXPECT_NEAR(values.seconds + indices.seconds - both.seconds,
              pace.EstimateCopy(gathered, DType::kF32), 1e-9);
  // A strategy sorts bytes as I32, and values are converted back.
  const Copies bytes = copies(DType::kU8, 1, true, false),
               places = copies(DType::kU8, 1, false, true);
  EXPECT_EQ(bytes.bytes, kN * kRows * (4 + 4));
  EXPECT_EQ(places.bytes, kN * kRows * 4);
  EXPECT_GT(bytes.seconds, 1.2 * places.seconds);
}

// The memory of a CPU strategy is that of the cores of this host, without unwanted indices.
TEST(SortOnTheCpu, LittleMemoryIsEnough) {
  const Limited limited(Backend::kCpu, std::uint64_t{2} << 20);
  const std::vector<float> host = MakeValues<float>(Values::kNormal, 100'000, 8);
  const DeviceArray<float> x(*limited.stream, host);
  DeviceArray<float> values(*limited.stream, 100'000);
  const auto refuse = []() -> absl::StatusOr<void*> { return absl::InternalError("unwanted"); };
  const auto result =
      tessera::Run(OperationSpec(SortSpec{.axis = 0, .indices = false}), *limited.stream,
                   {x.view({12'500, 8})}, {Output(values.data()), Output(refuse)}, {});
  EXPECT_TRUE(result.ok()) << result.status();
  const Strategy<SortProblem>& strategy =
      StrategyOf<SortProblem>({"cpu_radix", Backend::kCpu, DType::kF32});
  const auto scratch = [&](std::int64_t rows, bool indices) {
    return strategy.scratch(SortProblem{.wants_indices = indices, .rows = rows, .n = 10'000});
  };
  const auto cores = std::min<std::int64_t>(64, limited.stream->device().info().multiprocessors);
  EXPECT_EQ(scratch(1000, false), scratch(std::max<std::int64_t>(cores, 7), false));
  EXPECT_LT(scratch(1000, false), 0.6 * static_cast<double>(scratch(1000, true)));
}

TEST(SortErrors, AxesAndShapesThatDoNotFit) {
  const View x = WholeView({DType::kF32, MakeShape({3, 5})}, nullptr);
  const View scalar = WholeView({DType::kF32, MakeShape({})}, nullptr);
  for (int axis : {-3, 2, 100})
    EXPECT_EQ(ErrorReason(TypeOf(SortSpec{.axis = axis}, {x}).status()), "BAD_AXES") << axis;
  for (int axis : {-1, 0})
    EXPECT_EQ(ErrorReason(TypeOf(SortSpec{.axis = axis}, {scalar}).status()), "BAD_AXES") << axis;
  const Nodes sum = {In(0), In(1), Op(MapOp::kAdd, {0, 1})};
  EXPECT_EQ(ErrorReason(TypeOf(SortSpec{.expression = sum}, {x}).status()), "BAD_EXPRESSION");
  const View wrong = WholeView({DType::kF32, MakeShape({4})}, nullptr);
  EXPECT_EQ(ErrorReason(TypeOf(SortSpec{.expression = sum}, {x, wrong}).status()), "BAD_SHAPE");
}

}  // namespace
}  // namespace tessera::test
