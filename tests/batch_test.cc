// A batch gives each problem the same bits as a separate call. Other suites compare the problems
// with exact results.
#include <array>

#include "kernels/same_bits/batch.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

// Lengths around those at which a vector, a warp, a row or the longest operand is full.
constexpr std::int64_t kLengths[] = {0,    1,    2,    3,    7,     8,    9,    31,   64,
                                     127,  255,  257,  509,  511,   512,  513,  1021, 1023,
                                     1024, 1025, 2047, 2048, 2049,  4093, 4095, 4096, 0,
                                     4097, 8191, 8192, 9001, 16383, 16384};

constexpr std::int64_t kElements = 70000;

class BatchTest : public StrategyTest<ReduceProblem> {
 protected:
  static DType dtype() { return GetParam().dtype; }

  using Operands = std::vector<std::array<View, 2>>;

  // Returns vectors of the lengths that fit a batch, at every alignment, in the array at data.
  template <class T>
  std::vector<View> Cut(const T* data) const {
    std::vector<View> views;
    std::int64_t offset = 0;
    for (std::int64_t n : kLengths) {
      const View view = WholeView({dtype(), MakeShape({n})}, data + offset++ % 11);
      if (FitsBatch(view)) views.push_back(view);
    }
    return views;
  }

  // Checks that batch(operand, results) gives each problem the result of alone(operands).
  static void Compare(const Operands& all, const auto& batch, const auto& alone) {
    std::vector<ScalarResult> results(all.size());
    const auto operand = [&](std::size_t i, int o) -> const View& { return At(all[i], o); };
    const absl::Status status = batch(operand, absl::MakeSpan(results));
    ASSERT_TRUE(status.ok()) << status;
    for (std::size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(absl::StrCat("problem ", i, " of ", all[i][0].elements()));
      const ScalarResult want = Get(alone(all[i]));
      EXPECT_EQ(Bits(results[i]), Bits(want));
      EXPECT_EQ(results[i].integer, want.integer);
      EXPECT_EQ(results[i].stats.strategy, want.stats.strategy);
      EXPECT_EQ(results[i].stats.bytes, want.stats.bytes);
      EXPECT_EQ(results[i].stats.flops, want.stats.flops);
      EXPECT_EQ(results[i].stats.roundoff, want.stats.roundoff);
      if (HasFailure()) return;
    }
  }

  void CheckReduce(ReduceOp op, Operands all) const {
    SCOPED_TRACE(Name(op));
    std::erase_if(all, [&](const auto& x) { return x[0].elements() == 0 && NeedsElements(op); });
    Compare(
        all,
        [&](const auto& operand, auto results) {
          return RunReduceBatch(stream(), op, operand, results);
        },
        [&](const auto& x) { return RunReduce(stream(), x[0], op, {}); });
  }

  void CheckDot(const Operands& all) const {
    Compare(
        all,
        [&](const auto& operand, auto results) { return RunDotBatch(stream(), operand, results); },
        [&](const auto& x) { return RunDot(stream(), x[0], x[1], {}); });
  }

  template <class T>
  void CheckAll(const std::vector<T>& x, const std::vector<T>& y) const {
    DeviceArray<T> array(stream(), x, 1), other(stream(), y, 3);
    const std::vector<View> a = Cut(array.data()), b = Cut(other.data() + 5);
    // The first case has all operands. The second has only operands so short that a GPU gives each
    // of them a warp.
    for (const std::int64_t most : {kBatchBytes, std::int64_t{kTreeRowBytes}}) {
      Operands operands;
      for (std::size_t i = 0; i < a.size(); ++i)
        if (a[i].elements() * static_cast<std::int64_t>(sizeof(T)) <= most)
          operands.push_back({a[i], b[i]});
      for (ReduceOp op : kAllReduceOps) CheckReduce(op, operands);
      CheckDot(operands);
    }
  }
};

TESSERA_TYPED_TEST(BatchTest, HasTheBitsOfEachProblemAlone) {
  CheckAll(NormalVector<T>(kElements, 1, 0.25), NormalVector<T>(kElements, 2));
}

// Tests NaN, infinities, and values whose sums and products exceed the range of f32.
TESSERA_TYPED_TEST(BatchTest, HasThemForExtremesToo) {
  std::vector<T> x(kElements);
  Random random(3);
  if constexpr (std::is_integral_v<T>) {
    for (T& v : x)
      v = random.Bits() % 2 == 0 ? std::numeric_limits<T>::max() : std::numeric_limits<T>::min();
  } else {
    const double largest = sizeof(T) == 8 ? 1e150 : std::is_same_v<T, Half> ? 6e4 : 3e38;
    for (T& v : x) v = Element<T>((random.Bits() % 4 == 0 ? -1 : 1) * largest);
  }
  CheckAll(x, x);
  if constexpr (!std::is_integral_v<T>) {
    for (std::size_t i = 40; i < x.size(); i += 997)
      x[i] = Element<T>(i % 2 == 0 ? kInfinity : i % 3 == 0 ? -kInfinity : std::nan(""));
    CheckAll(x, NormalVector<T>(kElements, 4));
  }
}

TESSERA_TYPED_TEST(BatchTest, TakesThousandsOfProblems) {
  DeviceArray<T> x(stream(), NormalVector<T>(kElements, 5, 0.25)),
      y(stream(), NormalVector<T>(kElements, 6), 1);
  Random random(7);
  Operands operands;
  for (int i = 0; i < 5000; ++i) {
    const auto n = static_cast<std::int64_t>(i % 100 == 0 ? 3000 : random.Bits() % 300);
    const auto cut = [&](const T* data) {
      return WholeView({dtype(), MakeShape({n})}, data + random.Bits() % 60000);
    };
    operands.push_back({cut(x.data()), cut(y.data())});
  }
  CheckReduce(ReduceOp::kSum, operands);
  CheckReduce(ReduceOp::kArgMax, operands);
  CheckDot(operands);
}

// Tests operands that are equally spaced slices of an array, even if one of them is shorter or has
// a different offset.
TESSERA_TYPED_TEST(BatchTest, TakesSlicesAtOneDistance) {
  DeviceArray<T> x(stream(), NormalVector<T>(kElements, 8, 0.25)),
      y(stream(), NormalVector<T>(kElements, 9), 1);
  for (const std::int64_t n : {1, 9, 300, 2100}) {
    const int count = n < 10 ? 300 : 30;
    for (const std::int64_t apart : {n, n + 1, std::int64_t{0}, -n}) {
      const T* const first = x.data() + (apart < 0 ? -apart * count : 0);
      for (const int other : {-1, 0, 1, 17, count / 2, count - 1}) {
        for (const bool shorter : {false, true}) {
          SCOPED_TRACE(absl::StrCat(n, " elements, ", apart, " apart, but for ", other,
                                    shorter ? " shorter" : " elsewhere"));
          Operands operands;
          for (int i = 0; i < count; ++i) {
            const bool differs = i == other;
            const auto cut = [&](const T* begin) {
              return WholeView({dtype(), MakeShape({n - (differs && shorter)})},
                               begin + (differs && !shorter ? 5 : 0));
            };
            // Each slice is combined with one vector, and with a slice of another array.
            operands.push_back({cut(first + i * apart), cut(y.data() + (n % 2 == 0 ? 0 : i * n))});
          }
          CheckReduce(ReduceOp::kSum, operands);
          CheckDot(operands);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(BatchTest, ChecksBeforeItRuns) {
  const View empty = WholeView({dtype(), MakeShape({0})}, nullptr);
  const View one = WholeView({dtype(), MakeShape({1})}, nullptr);
  const auto operand = [&](std::size_t, int o) -> const View& { return o == 0 ? empty : one; };
  EXPECT_TRUE(RunDotBatch(stream(), operand, {}).ok());
  EXPECT_TRUE(RunReduceBatch(stream(), ReduceOp::kMin, operand, {}).ok());
  ScalarResult result;
  for (ReduceOp op : kAllReduceOps) {
    const absl::Status status = RunReduceBatch(stream(), op, operand, {&result, 1});
    EXPECT_EQ(ErrorReason(status), NeedsElements(op) ? "EMPTY_INPUT" : "") << Name(op);
  }
  EXPECT_EQ(ErrorReason(RunDotBatch(stream(), operand, {&result, 1})), "BAD_SHAPE");
}

TEST_P(BatchTest, FitsWhatIsShortAndContiguous) {
  const auto size = static_cast<std::int64_t>(SizeOf(dtype()));
  const std::int64_t most = (std::int64_t{32} << 10) / size;
  View view = WholeView({dtype(), MakeShape({most})}, nullptr);
  EXPECT_TRUE(FitsBatch(view));
  view.strides[0] = 2;
  EXPECT_FALSE(FitsBatch(view));
  EXPECT_FALSE(FitsBatch(WholeView({dtype(), MakeShape({most + 1})}, nullptr)));
}

// The default strategy of both devices.
TESSERA_STRATEGIES(BatchTest,
                   [](const auto& strategy, DType) { return strategy.name == "fixed_tree"; });

}  // namespace
}  // namespace tessera::test
