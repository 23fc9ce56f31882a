// Every strategy of Select in the table, for every type, compared with a loop over the host's copy
// of x and of the mask. Elements must keep their bits.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "kernels/choose/pace.h"
#include "kernels/problem/take.h"
#include "kernels/run/operation.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

using Mask = std::vector<std::uint8_t>;

// Returns a mask in which about one of `one_in` bytes is true, at random places.
Mask RandomMask(std::int64_t n, std::uint64_t one_in, std::uint64_t seed = 3) {
  Mask mask(static_cast<std::size_t>(n));
  Random random(seed);
  for (std::uint8_t& byte : mask) byte = random.Bits() % one_in == 0 ? 1 : 0;
  return mask;
}

struct Wants {
  bool values = true, indices = true;
};
constexpr Wants kAllWants[] = {{}, {.indices = false}, {.values = false}};

class SelectTest : public MovingTest<SelectProblem> {
 protected:
  // Selects from the views, counts first, and expects the elements at these positions.
  template <class U>
  static void Expect(const View& x, const View& mask, const Wants& wants,
                     const std::vector<U>& values, const std::vector<std::int64_t>& indices) {
    OperationSpec spec = SelectSpec{.values = wants.values, .indices = wants.indices};
    ASSERT_TRUE(Get(TypeOf(spec, {x, mask})).uncounted);
    ASSERT_TRUE(CountResults(spec, stream(), {x, mask}, {}).ok());
    const ResultType type = Get(TypeOf(spec, {x, mask}));
    const auto count = static_cast<std::int64_t>(indices.size());
    EXPECT_FALSE(type.uncounted);
    ASSERT_EQ(type.arrays.at(0).shape, MakeShape({count}));
    ASSERT_EQ(type.arrays.at(1).shape, MakeShape({count}));
    EXPECT_EQ(type.arrays.at(0).dtype, GetParam().dtype);
    EXPECT_EQ(type.arrays.at(1).dtype, DType::kI64);
    DeviceArray<U> got_values(stream(), wants.values ? count : 0);
    DeviceArray<std::int64_t> got_indices(stream(), wants.indices ? count : 0);
    const auto run =
        tessera::Run(spec, stream(), {x, mask}, {got_values.data(), got_indices.data()}, options());
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->stats.strategy, GetParam().name);
    EXPECT_EQ(run->stats.roundoff, 0);
    EXPECT_EQ(got_values.Values(), wants.values ? values : std::vector<U>());
    EXPECT_EQ(got_indices.Values(), wants.indices ? indices : std::vector<std::int64_t>());
  }

  // Selects elements of a vector whose first element has an offset from an aligned address.
  template <class U>
  static void Check(const Mask& mask, const Wants& wants = {}, std::size_t x_offset = 0,
                    std::size_t mask_offset = 0) {
    SCOPED_TRACE(testing::Message()
                 << mask.size() << " elements, offsets " << x_offset << ' ' << mask_offset
                 << (wants.values ? " values" : "") << (wants.indices ? " indices" : ""));
    const auto n = static_cast<std::int64_t>(mask.size());
    const std::vector<U> host = Elements<U>(n);
    std::vector<U> values;
    std::vector<std::int64_t> indices;
    for (std::int64_t i = 0; i < n; ++i) {
      if (At(mask, i) == 0) continue;
      values.push_back(At(host, i));
      indices.push_back(i);
    }
    DeviceArray<U> x(stream(), host, x_offset);
    DeviceArray<std::uint8_t> bytes(stream(), mask, mask_offset);
    Expect(WholeView({GetParam().dtype, MakeShape({n})}, x.data()),
           WholeView({DType::kBool, MakeShape({n})}, bytes.data()), wants, values, indices);
    x.ExpectUnchanged(host);
    bytes.ExpectUnchanged(mask);
  }
};

// Sizes around those of warps, tiles and chunks.
TESSERA_SIZED_TEST(SelectTest, EverySizeAndDensity) {
  for (std::int64_t n : Sizes({0, 1, 2, 31, 32, 33, 511, 512, 513, 4095, 4096, 4097, 8192, 12'301,
                               65'536, 65'537, 300'001})) {
    for (std::uint64_t one_in : {1, 2, 3, 20, 5000})
      for (const Wants& wants : kAllWants) Check<U>(RandomMask(n, one_in), wants);
    Check<U>(Mask(static_cast<std::size_t>(n), 0));
  }
}

// Selects a single element, a run, and every second element.
TESSERA_SIZED_TEST(SelectTest, Patterns) {
  const std::int64_t n = Largest() < 20'000 ? 3000 : 20'000;
  for (std::int64_t place : {std::int64_t{0}, n / 2, n - 1}) {
    Mask mask(static_cast<std::size_t>(n), 0);
    At(mask, place) = 1;
    Check<U>(mask);
    for (std::uint8_t& byte : mask) byte ^= 1;
    Check<U>(mask);
  }
  Mask run(static_cast<std::size_t>(n), 0), other(static_cast<std::size_t>(n), 0);
  for (std::int64_t i = n / 3; i < n / 2; ++i) At(run, i) = 1;
  for (std::int64_t i = 0; i < n; i += 2) At(other, i) = 1;
  Check<U>(run);
  Check<U>(other);
}

TESSERA_SIZED_TEST(SelectTest, EveryAlignment) {
  const Mask mask = RandomMask(5000, 2);
  for (std::size_t offset = 0; offset < 17; offset += WatchedClosely() ? 5 : 1) {
    Check<U>(mask, {}, offset, 0);
    Check<U>(mask, {}, 3, offset);
  }
}

// Shared memory may change after its bytes have been checked, so a mask may have any bytes.
TESSERA_SIZED_TEST(SelectTest, AnyByteButZeroSelects) {
  Mask mask = RandomMask(5000, 2);
  for (std::size_t i = 0; i < mask.size(); ++i) mask[i] *= i % 3 == 0 ? 1 : i % 3 == 1 ? 2 : 255;
  Check<U>(mask);
}

// Views of x and of the mask that are not contiguous. Positions are counted in row-major order.
TESSERA_SIZED_TEST(SelectTest, StridedViews) {
  const std::int64_t rows = 37, columns = 53, all = rows * columns;
  const std::vector<U> host = Elements<U>(all);
  const Mask bytes = RandomMask(all, 2);
  const DeviceArray<U> x(stream(), host);
  const DeviceArray<std::uint8_t> mask(stream(), bytes);
  struct Walk {
    std::int64_t first, row, column;
  };
  for (const Walk& of : {Walk{0, columns, 1}, Walk{0, 1, rows}, Walk{all - 1, -columns, -1}}) {
    for (const Walk& by : {Walk{0, columns, 1}, Walk{0, 1, rows}, Walk{5, 0, 1}}) {
      std::vector<U> values;
      std::vector<std::int64_t> indices;
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < columns; ++j) {
          if (At(bytes, by.first + i * by.row + j * by.column) == 0) continue;
          values.push_back(At(host, of.first + i * of.row + j * of.column));
          indices.push_back(i * columns + j);
        }
      }
      const View view =
          StridedView(x.data() + of.first, GetParam().dtype, {rows, columns}, {of.row, of.column});
      const View where =
          StridedView(mask.data() + by.first, DType::kBool, {rows, columns}, {by.row, by.column});
      for (const Wants& wants : kAllWants) Expect(view, where, wants, values, indices);
    }
  }
}

TESSERA_SIZED_TEST(SelectTest, RandomProblems) {
  Random random(31);
  for (std::uint64_t i = 0; i < (WatchedClosely() ? 5 : 100); ++i) {
    const auto n = static_cast<std::int64_t>(random.Bits() % (i % 10 == 0 ? 100'000 : 9000));
    Check<U>(RandomMask(std::min(n, Largest()), 1 + random.Bits() % 9, i), kAllWants[i % 3],
             random.Bits() % 16, random.Bits() % 16);
  }
}

class SelectLargeTest : public SelectTest {};

// Tests positions beyond 2^32.
TESSERA_SIZED_TEST(SelectLargeTest, LargeArrays) {
  if (Watched()) return;
  const std::int64_t n = (std::int64_t{1} << 32) + 12'345;
  DeviceArray<std::uint8_t> mask(stream(), Mask(static_cast<std::size_t>(n), 0));
  const std::vector<std::int64_t> places = {0, 4097, std::int64_t{1} << 31, n - 12'345, n - 1};
  const std::uint8_t one = 1;
  for (std::int64_t place : places)
    ASSERT_TRUE(CopyToDevice(stream(), mask.data() + place, &one, 1).ok());
  const View view = WholeView({DType::kBool, MakeShape({n})}, mask.data());
  Expect(view, view, {}, std::vector<U>(places.size(), 1), places);
}

// The mask has more than 2^32 elements, but repeats a few bytes in memory.
TEST_P(SelectLargeTest, CountsBroadcastMasks) {
  if (Watched()) return;
  const Mask bytes = RandomMask(1 << 20, 2);
  const DeviceArray<std::uint8_t> mask(stream(), bytes, 1);
  const std::int64_t rows = (1 << 12) + 1, columns = 1 << 20;
  const View view = StridedView(mask.data() + columns - 1, DType::kBool, {rows, columns}, {0, -1});
  OperationSpec spec = SelectSpec{};
  ASSERT_TRUE(CountResults(spec, stream(), {view, view}, {}).ok());
  EXPECT_EQ(std::get<SelectSpec>(spec).count, rows * std::count(bytes.begin(), bytes.end(), 1));
}

class SelectCountTest : public BackendTest {
 protected:
  // Counts the mask on a stream that may not have a single byte of scratch memory.
  static std::int64_t Count(const View& mask) {
    Budget none(0);
    const std::unique_ptr<Stream> stream = Get(MakeStream(*TestDevice(GetParam())));
    stream->SetScratchBudget(&none);
    OperationSpec spec = SelectSpec{};
    const absl::Status status = CountResults(spec, *stream, {mask, mask}, {});
    EXPECT_TRUE(status.ok()) << status;
    return std::get<SelectSpec>(spec).count.value_or(-1);
  }
};

TEST_P(SelectCountTest, NeedsNoScratchMemory) {
  const std::int64_t n = std::min<std::int64_t>(Largest(), 300'001);
  const Mask bytes = RandomMask(n, 3);
  const auto count = [&](std::int64_t first, std::int64_t step, std::int64_t end) {
    std::int64_t found = 0;
    for (std::int64_t i = first; i < end; i += step) found += At(bytes, i) != 0 ? 1 : 0;
    return found;
  };
  const DeviceArray<std::uint8_t> mask(stream(), bytes);
  for (std::int64_t first : {0, 1, 5, 15, 16, 17}) {
    for (std::int64_t end : {first, first + 1, first + 30, n}) {
      const View dense =
          StridedView(mask.data() + first, DType::kBool, {end - first}, {std::int64_t{1}});
      EXPECT_EQ(Count(dense), count(first, 1, end)) << first << ' ' << end;
    }
  }
  const View every = StridedView(mask.data() + 2, DType::kBool, {(n - 2) / 3}, {std::int64_t{3}});
  EXPECT_EQ(Count(every), count(2, 3, 2 + (n - 2) / 3 * 3));
  const View single = StridedView(mask.data(), DType::kBool, {}, {});
  EXPECT_EQ(Count(single), count(0, 1, 1));
}

TESSERA_BACKENDS(SelectCountTest);

TESSERA_STRATEGIES(SelectTest, kAny, kArrayDTypes);
// A build without CUDA has no such case.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SelectLargeTest);
TESSERA_STRATEGIES(
    SelectLargeTest, [](const auto& strategy, DType) { return strategy.backend == Backend::kCuda; },
    std::array{DType::kBool});

TEST(SelectErrors, OperandsThatDoNotFit) {
  const auto reason = [](std::initializer_list<std::int64_t> x, DType dtype,
                         std::initializer_list<std::int64_t> mask) {
    return ErrorReason(TypeOf(SelectSpec(), {WholeView({DType::kF32, MakeShape(x)}, nullptr),
                                             WholeView({dtype, MakeShape(mask)}, nullptr)})
                           .status());
  };
  for (DType dtype : kArrayDTypes)
    EXPECT_EQ(reason({3, 5}, dtype, {3, 5}), dtype == DType::kBool ? "" : "BAD_DTYPE")
        << Name(dtype);
  EXPECT_EQ(reason({}, DType::kBool, {}), "");
  EXPECT_EQ(reason({0, 4}, DType::kBool, {0, 4}), "");
  for (const auto& mask : {std::initializer_list<std::int64_t>{3}, {15}, {5, 3}, {3, 5, 1}})
    EXPECT_EQ(reason({3, 5}, DType::kBool, mask), "BAD_SHAPE");
}

// Until the mask is counted, TypeOf returns the largest possible length, and the check of a request
// assumes that length.
TEST(SelectOnTheCpu, ChecksTheLongestResult) {
  Stream& stream = TestStream(Backend::kCpu);
  const DeviceArray<float> x(stream, 6000);
  const DeviceArray<std::uint8_t> mask(stream, Mask(6000, 0));
  const View matrix = x.view({60, 100});
  const View where = WholeView({DType::kBool, MakeShape({60, 100})}, mask.data());
  EXPECT_EQ(Get(TypeOf(SelectSpec(), {matrix, where})).arrays.at(0).shape, MakeShape({6000}));
  const auto checked = Get(tessera::Run(SelectSpec(), stream, {matrix, where}, {nullptr, nullptr},
                                        {.check_only = true}));
  EXPECT_EQ(checked.stats.strategy, "cpu_parallel");
  EXPECT_EQ(checked.stats.scratch_bytes, 0u);
  EXPECT_GE(checked.stats.bytes, 6000u * (1 + 2 * 4 + 8));
  // The estimate includes the count.
  Pace pace(stream.device().info());
  const auto seconds = [&](const SelectSpec& spec) {
    return Get(tessera::Run(spec, stream, {matrix, where}, {nullptr, nullptr},
                            {.pace = &pace, .check_only = true}))
        .stats.estimate_seconds;
  };
  EXPECT_DOUBLE_EQ(seconds(SelectSpec()),
                   seconds(SelectSpec{.count = 6000}) + pace.EstimateCopy(where, DType::kBool));
}

}  // namespace
}  // namespace tessera::test
