// Every strategy of Sort in the table, compared with a stable sort by values.
#include "kernels/problem/sort.h"

#include "kernels/choose/pace.h"
#include "kernels/device/scratch.h"
#include "kernels/run/operation.h"
#include "tests/expressions.h"
#include "tests/orders.h"

namespace tessera::test {
namespace {

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

// Memory for an array that must not be requested.
constexpr auto kRefuse = []() -> absl::StatusOr<void*> { return absl::InternalError("unwanted"); };

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
    const Lines lines(x, axis);
    SCOPED_TRACE(absl::StrCat("rows ", lines.count(), " n ", lines.length, " axis ", axis,
                              how.descending ? " descending" : "", how.values ? " values" : "",
                              how.indices ? " indices" : "", " block ", launch.block_size));
    // A strategy sorts bytes as I32.
    const SortProblem problem{.dtype = GetParam().dtype,
                              .descending = how.descending,
                              .wants_values = how.values,
                              .wants_indices = how.indices,
                              .rows = lines.count(),
                              .n = lines.length,
                              .launch = launch};
    if (TooSlow(problem)) return;
    const OperationSpec spec = SortSpec{
        .axis = axis, .descending = how.descending, .values = how.values, .indices = how.indices};
    const ResultType type = Get(TypeOf(spec, {x}));
    ASSERT_EQ(type.arrays.size(), 2u);
    EXPECT_EQ(type.arrays[0].dtype, x.dtype);
    EXPECT_EQ(type.arrays[1].dtype, DType::kI64);
    for (const ArrayType& array : type.arrays) EXPECT_EQ(array.shape, x.shape);
    DeviceArray<T> values(stream(), how.values ? x.elements() : 0);
    DeviceArray<std::int64_t> indices(stream(), how.indices ? x.elements() : 0);
    const Output outputs[] = {how.values ? Output(values.data()) : Output(kRefuse),
                              how.indices ? Output(indices.data()) : Output(kRefuse)};
    const auto result = tessera::Run(spec, stream(), {x}, outputs, options(launch));
    if (!Refusal(strategy(), problem).empty()) {
      EXPECT_EQ(ErrorReason(result.status()), "STRATEGY_UNSUPPORTED") << result.status();
      return;
    }
    const Stats stats = Get(result).stats;
    EXPECT_EQ(stats.strategy, GetParam().name);
    EXPECT_EQ(stats.roundoff, 0);
    const std::vector<T> got = values.Values();
    const std::vector<std::int64_t> places = indices.Values();
    ExpectSorted(host, x, first, axis, lines.length, how.descending, how.values ? &got : nullptr,
                 how.indices ? &places : nullptr);
  }

  // Checks rows without gaps, `offset` elements after an aligned address.
  template <class T>
  void CheckArray(const std::vector<T>& host, std::int64_t rows, std::int64_t n, const How& how,
                  std::size_t offset = 0, Launch launch = {}) {
    DeviceArray<T> array(stream(), host, offset);
    Check(host, array.view({rows, n}), 0, 1, how, launch);
    array.ExpectUnchanged(host);
  }
};

// Lengths around the sizes of warps and of the tiles of each strategy, and around their powers.
std::vector<std::int64_t> Lengths() {
  return Sizes({1,    2,     3,     31,    32,    33,    63,     65,     199,    200,  201,
                255,  256,   257,   511,   513,   1000,  1023,   1024,   1025,   2047, 2048,
                2049, 3071,  3072,  3073,  4095,  4096,  4097,   6143,   6144,   6145, 8192,
                8193, 12287, 12289, 20000, 65535, 65537, 131072, 131073, 300'007});
}

// Each long row has some of the kinds of values.
TESSERA_TYPED_TEST(SortTest, Rows) {
  std::uint64_t seed = 1;
  for (std::int64_t n : Lengths()) {
    for (Values values : kAllValues) {
      if (++seed % 7 != 0 && (n > 2100 || WatchedClosely())) continue;
      for (std::int64_t rows = 1; rows <= (n > 5000 ? 1 : 3); rows += 2)
        CheckArray(MakeValues<T>(values, rows * n, seed), rows, n, NextHow(),
                   static_cast<std::size_t>(n % 5));
    }
  }
}

TESSERA_TYPED_TEST(SortTest, ManyRows) {
  for (std::int64_t n : {1,   2,   3,   15,  16,   17,   31,   33,   64,   100,
                         127, 129, 256, 300, 1000, 1500, 2100, 3500, 4096, 5000}) {
    const std::int64_t rows = WatchedClosely() ? 3 : 7 + 20'000 / n;
    if (rows * n > Largest()) continue;
    for (Values values : {Values::kNormal, Values::kFew, Values::kSpecial})
      CheckArray(MakeValues<T>(values, rows * n, 5), rows, n, NextHow(), n % 2 == 0 ? 0 : 3);
  }
}

TESSERA_TYPED_TEST(SortTest, RandomShapes) {
  Random random(17);
  for (int i = 0; i < (WatchedClosely() ? 4 : 40); ++i) {
    const std::int64_t n =
        1 + random.Below(std::min<std::int64_t>(Largest(), i % 2 == 0 ? 300 : 20'000));
    const std::int64_t rows = 1 + random.Below(std::min<std::int64_t>(Largest(), 40'000) / n + 1);
    const Values values = kAllValues[random.Bits() % kAllValues.size()];
    CheckArray(MakeValues<T>(values, rows * n, random.Bits()), rows, n, NextHow(),
               static_cast<std::size_t>(random.Below(9)));
  }
}

TESSERA_TYPED_TEST(SortTest, Launches) {
  const std::int64_t n = std::min<std::int64_t>(7001, Largest() / 3);
  for (const Launch& launch : Launches(limits()))
    CheckArray(MakeValues<T>(Values::kNormal, 3 * n, 2), 3, n, NextHow(), 3, launch);
}

TESSERA_TYPED_TEST(SortTest, AxesAndStridedViews) {
  const auto values = MakeValues<T>(Values::kFew, 6000, 10);
  DeviceArray<T> array(stream(), values, 1);
  for (const StridedWindow& w : StridedWindows()) {
    const View view = w.Of(array.data(), GetParam().dtype);
    for (int axis = -view.shape.rank; axis < view.shape.rank; ++axis)
      Check(values, view, w.first, axis, NextHow());
  }
  array.ExpectUnchanged(values);
}

// The cores of a CPU share the rows if there are more rows than a row has parts.
TESSERA_TYPED_TEST(SortTest, Long) {
  const auto check = [&](Values values, std::int64_t rows, std::int64_t n) {
    if (rows * n <= Largest())
      CheckArray(MakeValues<T>(values, rows * n, 9), rows, n, NextHow(),
                 static_cast<std::size_t>(n % 4));
  };
  check(Values::kSpecial, 1, (1 << 19) + 77);
  check(Values::kSpecial, 5, (1 << 17) + 3);
  if (GetParam().backend == Backend::kCpu) return;
  for (std::int64_t n : {1 << 20, (1 << 21) + 5001})
    for (Values values : {Values::kNormal, Values::kUniformBits, Values::kSpecial})
      check(values, 1, n);
}

TESSERA_TYPED_TEST(SortTest, EmptyArrays) {
  DeviceArray<T> nothing(stream(), 0);
  for (const View& x : {nothing.view({0}), nothing.view({3, 0}), nothing.view({0, 3})})
    for (int axis = 0; axis < x.shape.rank; ++axis) Check(std::vector<T>(), x, 0, axis, {});
}

// However long the sorted axis is, an array without elements needs little memory.
TEST(SortOfNothing, NeedsLittleScratchMemory) {
  const Limited limited(Backend::kCpu, ScratchBlocks::kKept);
  const View none = WholeView({DType::kF32, MakeShape({std::int64_t{1} << 40, 0})}, nullptr);
  const auto result = tessera::Run(OperationSpec(SortSpec{.axis = 0}), *limited.stream, {none},
                                   {Output(nullptr), Output(nullptr)}, {});
  EXPECT_TRUE(result.ok()) << result.status();
}

// The strategy takes no more scratch memory than it declares.
TESSERA_TYPED_TEST(SortTest, StaysWithinItsScratchMemory) {
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
}

TESSERA_STRATEGIES(SortTest);

// Arrays with counters beyond 32 bits, in memory without guards. A build without CUDA has no such
// case.
class SortLargeTest : public SortTest {
 protected:
  void SetUp() override {
    SortTest::SetUp();
    if (Watched()) GTEST_SKIP() << "the array is too large for this tool";
  }
  // Whether the strategy sorts such rows in a short time.
  static bool Sorts(const SortProblem& problem) {
    return Refusal(strategy(), problem).empty() && !TooSlow(problem);
  }
  // Sorts rows without gaps. Results that the problem does not want are null.
  static void Run(const SortProblem& p, const Memory& x, const Memory* values,
                  const Memory* indices) {
    const auto output = [](const Memory* memory) {
      return memory == nullptr ? Output(kRefuse) : Output(memory->data());
    };
    const OperationSpec spec = SortSpec{.values = p.wants_values, .indices = p.wants_indices};
    Get(tessera::Run(spec, stream(), {WholeView({p.dtype, MakeShape({p.rows, p.n})}, x.data())},
                     {output(values), output(indices)}, options()));
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SortLargeTest);
TESSERA_STRATEGIES(SortLargeTest, [](const auto& strategy, DType dtype) {
  return strategy.backend == Backend::kCuda && dtype == DType::kF32;
});

// A permutation of the numbers below n: element i is i * kStep mod n, for an n that shares no
// factor with the step. Its sorted order is known without sorting. The numbers are the bits of f32
// numbers that increase with them, because all are positive.
TEST_P(SortLargeTest, APermutation) {
  constexpr std::int64_t n = (std::int64_t{1} << 30) + 3, kStep = 1'000'003;
  const SortProblem problem{.rows = 1, .n = n};
  if (!Sorts(problem)) return;
  std::vector<std::uint32_t> host(static_cast<std::size_t>(n));
  std::int64_t value = 0;
  for (std::uint32_t& x : host) {
    x = static_cast<std::uint32_t>(value);
    value = (value + kStep) % n;
  }
  std::vector<std::uint32_t> sorted(host.size());
  std::vector<std::int64_t> places(host.size());
  const Memory x = OnDevice(host), values = OnDevice(sorted), indices = OnDevice(places);
  Run(problem, x, &values, &indices);
  ASSERT_TRUE(CopyToHost(stream(), sorted.data(), values.data(), sorted.size() * 4).ok());
  ASSERT_TRUE(CopyToHost(stream(), places.data(), indices.data(), places.size() * 8).ok());
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < n; ++i) wrong += At(sorted, i) != i || At(host, At(places, i)) != i;
  EXPECT_EQ(wrong, 0);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SortLargestTest);
TESSERA_STRATEGY_SUITE(SortLargestTest, SortLargeTest, [](const auto& strategy, DType dtype) {
  return strategy.backend == Backend::kCuda && dtype == DType::kF16;
});

// Every 1000th element is lower than the others, which are equal, so the positions show the order.
TEST_P(SortLargestTest, EqualElementsKeepTheirOrder) {
  constexpr std::int64_t n = (std::int64_t{1} << 30) + 12'345, kLow = (n + 999) / 1000;
  const SortProblem problem{.dtype = DType::kF16, .wants_values = false, .rows = 1, .n = n};
  if (!Sorts(problem)) return;
  std::vector<Half> host(static_cast<std::size_t>(n), Element<Half>(1));
  for (std::int64_t i = 0; i < n; i += 1000) At(host, i) = Element<Half>(-1);
  const Memory x = OnDevice(host), indices = Get(Allocate(stream().device(), n * 8));
  Run(problem, x, nullptr, &indices);
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

// Sorts short rows with more elements than 32 bits count. Each row has the numbers 0 to 15.
TEST_P(SortLargestTest, ShortRows) {
  constexpr std::int64_t n = 16, kRows = (std::int64_t{1} << 27) + 5;
  const SortProblem problem{.dtype = DType::kF16, .wants_indices = false, .rows = kRows, .n = n};
  if (!Sorts(problem)) return;
  std::vector<Half> numbers, host(static_cast<std::size_t>(kRows * n));
  for (int i = 0; i < n; ++i) numbers.push_back(Element<Half>(i));
  for (std::int64_t i = 0; i < kRows * n; ++i) At(host, i) = At(numbers, i * 7 % n);
  const Memory x = OnDevice(host), values = OnDevice(host);
  Run(problem, x, &values, nullptr);
  ASSERT_TRUE(CopyToHost(stream(), host.data(), values.data(), host.size() * 2).ok());
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < kRows * n; ++i)
    wrong += std::bit_cast<std::uint16_t>(At(host, i)) !=
             std::bit_cast<std::uint16_t>(At(numbers, i % n));
  EXPECT_EQ(wrong, 0);
}

TESSERA_STRATEGY_SUITE(SortOfBytesTest, SortTest, kOf<DType::kI32>);

TEST_P(SortOfBytesTest, KeepsTheirType) {
  constexpr std::int64_t kRows = 37, kColumns = 50;
  const auto check = [&]<class T>(DType dtype, T ones) {
    std::vector<T> host = MakeValues<T>(Values::kUniformBits, kRows * kColumns, 8);
    for (T& element : host) element = static_cast<T>(element & ones);
    const DeviceArray<T> array(stream(), host, 1);
    const View x = StridedView(array.data(), dtype, {kRows, kColumns}, {kColumns, 1});
    for (int turn = 0; turn < 6; ++turn)
      for (int axis : {0, 1}) Check(host, x, 0, axis, NextHow());
  };
  check(DType::kBool, std::uint8_t{1});
  check(DType::kU8, std::uint8_t{255});
  check(DType::kI8, std::int8_t{-1});
}

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

// A CPU strategy needs memory for each core of this host, but not for unwanted indices.
TEST(SortOnTheCpu, LittleMemoryIsEnough) {
  const Limited limited(Backend::kCpu, std::uint64_t{2} << 20);
  const std::vector<float> host = MakeValues<float>(Values::kNormal, 100'000, 8);
  const DeviceArray<float> x(*limited.stream, host);
  DeviceArray<float> values(*limited.stream, 100'000);
  const auto result =
      tessera::Run(OperationSpec(SortSpec{.axis = 0, .indices = false}), *limited.stream,
                   {x.view({12'500, 8})}, {Output(values.data()), Output(kRefuse)}, {});
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
