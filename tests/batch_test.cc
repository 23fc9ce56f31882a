// Batches of every operation and type on both devices, segment by segment against the serial row of
// the CPU, which folds in double, with the batch's own bound.
#include <algorithm>
#include <limits>
#include <tuple>

#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

// Around the lengths at which a vector, a warp, a block and a chunk are full, for every size of
// element; primes in between.
constexpr std::int64_t kLengths[] = {0,    1,    2,    3,    7,     8,     9,     31,    64,
                                     127,  255,  257,  509,  511,   512,   513,   1021,  1023,
                                     1024, 1025, 2047, 2048, 2049,  4093,  4096,  8191,  8192,
                                     8193, 9001, 0,    4096, 16383, 16385, 32768, 32771, 65537};

template <class Segment>
struct Piece {
  Segment host, device;
};

// A segment of n elements that begins `offset` elements into an array, there and here.
template <class T>
Piece<ReduceSegment> Cut(const std::vector<T>& x, const DeviceArray<T>& array, std::int64_t offset,
                         std::int64_t n) {
  return {{x.data() + offset, n}, {array.data() + offset, n}};
}

class BatchTest : public testing::TestWithParam<std::tuple<Backend, DType>> {
 protected:
  Backend backend() const { return std::get<0>(GetParam()); }
  DType dtype() const { return std::get<1>(GetParam()); }

  // What one segment reduces to, and how large its terms are in all.
  static ScalarResult Serial(const View& x, ReduceOp op) {
    const auto result = RunReduce(TestStream(Backend::kCpu), x, op, {.strategy = "cpu_serial"});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : ScalarResult{};
  }
  static double Real(const ScalarResult& r) {
    return r.integer ? static_cast<double>(r.value.integer) : r.value.real;
  }

  static double ScaleOf(const View& x, ReduceOp op, double value) {
    const auto n = static_cast<double>(x.elements());
    switch (op) {
      case ReduceOp::kSum:
        return Real(Serial(x, ReduceOp::kNormL1));
      case ReduceOp::kMean:
        return Real(Serial(x, ReduceOp::kNormL1)) / n;
      case ReduceOp::kVariance:
        return Real(Serial(x, ReduceOp::kSumSquares)) / n;
      default:
        return std::abs(value);
    }
  }

  void Compare(const Scalar& got, const ScalarResult& want, bool exact, double bound) {
    if (want.integer) {
      ASSERT_EQ(got.integer, want.value.integer);
    } else if (std::isnan(want.value.real)) {
      ASSERT_TRUE(std::isnan(got.real)) << got.real;
    } else if (exact || std::isinf(want.value.real)) {
      ASSERT_EQ(got.real, want.value.real);
    } else {
      ASSERT_LE(std::abs(got.real - want.value.real), bound)
          << "got " << got.real << " want " << want.value.real;
    }
    ASSERT_EQ(got.index, want.value.index);
  }

  void CheckReduce(ReduceOp op, const std::vector<Piece<ReduceSegment>>& pieces) {
    std::vector<ReduceSegment> segments;
    for (const auto& piece : pieces)
      if (piece.host.n > 0 || !NeedsElements(op)) segments.push_back(piece.device);
    Scalar poison;
    poison.real = poison.integer = poison.index = -77;
    std::vector<Scalar> results(segments.size(), poison);
    const auto stats = RunReduceBatch(TestStream(backend()), dtype(), op, segments,
                                      absl::MakeSpan(results), /*timing=*/true);
    ASSERT_TRUE(stats.ok()) << stats.status();
    EXPECT_EQ(stats->strategy, "batch");
    EXPECT_LT(stats->roundoff, 1e-3);
    std::size_t at = 0;
    for (const auto& piece : pieces) {
      if (piece.host.n == 0 && NeedsElements(op)) continue;
      SCOPED_TRACE(absl::StrCat("op ", static_cast<int>(op), " segment ", at, " n ", piece.host.n));
      const View x = WholeView({dtype(), MakeShape({piece.host.n})}, piece.host.x);
      const ScalarResult want = Serial(x, op);
      const double scale = want.integer ? 0 : ScaleOf(x, op, want.value.real);
      Compare(results[at++], want, IsExact(op, dtype()) || IsExactMean(op, dtype()),
              (stats->roundoff + want.stats.roundoff + 2 * kRoundoffF64) * scale);
      if (HasFatalFailure()) return;
    }
  }

  void CheckDot(const std::vector<Piece<DotSegment>>& pieces) {
    std::vector<DotSegment> segments;
    for (const auto& piece : pieces) segments.push_back(piece.device);
    std::vector<Scalar> results(segments.size());
    const auto stats =
        RunDotBatch(TestStream(backend()), dtype(), segments, absl::MakeSpan(results));
    ASSERT_TRUE(stats.ok()) << stats.status();
    EXPECT_LT(stats->roundoff, 1e-3);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const DotSegment& s = pieces[i].host;
      SCOPED_TRACE(absl::StrCat("segment ", i, " n ", s.n));
      const View a = WholeView({dtype(), MakeShape({s.n})}, s.a);
      const View b = WholeView({dtype(), MakeShape({s.n})}, s.b);
      const auto want = RunDot(TestStream(Backend::kCpu), a, b, {.strategy = "cpu_serial"});
      ASSERT_TRUE(want.ok()) << want.status();
      // The sum of |a b| is at most |a| |b|.
      const double scale = want->integer ? 0
                                         : Serial(a, ReduceOp::kNormL2).value.real *
                                               Serial(b, ReduceOp::kNormL2).value.real;
      Compare(results[i], *want, false, (stats->roundoff + want->stats.roundoff) * scale);
      if (HasFatalFailure()) return;
    }
  }
};

TEST_P(BatchTest, LengthsAndAlignments) {
  TESSERA_NEED_DEVICE(backend());
  DispatchDType(dtype(), [&](auto t) {
    using T = decltype(t);
    for (ReduceOp op : kAllReduceOps) {
      // Products need values near 1, or few other ones, to stay in range.
      std::vector<T> x = op == ReduceOp::kProduct && !std::is_integral_v<T>
                             ? NormalVector<T>(70000, 1, 1.0, sizeof(T) > 2 ? 1e-3 : 0.0)
                             : NormalVector<T>(70000, 1, 0.25);
      DeviceArray<T> array(TestStream(backend()), x, 1);
      std::vector<Piece<ReduceSegment>> pieces;
      std::int64_t offset = 0;
      for (std::int64_t n : kLengths) pieces.push_back(Cut(x, array, offset++ % 11, n));
      CheckReduce(op, pieces);
      if (HasFatalFailure()) return;
      array.Values();  // the guards are whole
    }
  });
}

// Whichever of the segments is the longest.
TEST_P(BatchTest, TheBoundIsThatOfTheLongestSegment) {
  TESSERA_NEED_DEVICE(backend());
  DispatchDType(dtype(), [&](auto t) {
    using T = decltype(t);
    DeviceArray<T> array(TestStream(backend()), NormalVector<T>(20000, 1));
    const ReduceSegment longest = {array.data(), 20000}, other = {array.data(), 3};
    const auto bound = [&](const std::vector<ReduceSegment>& segments) {
      std::vector<Scalar> results(segments.size());
      const auto stats = RunReduceBatch(TestStream(backend()), dtype(), ReduceOp::kSum, segments,
                                        absl::MakeSpan(results));
      EXPECT_TRUE(stats.ok()) << stats.status();
      return stats.ok() ? stats->roundoff : -1;
    };
    const double alone = bound({longest});
    EXPECT_EQ(bound({longest, other}), alone);
    EXPECT_EQ(bound({other, longest, other}), alone);
    if (!IsInteger(dtype())) {
      EXPECT_LT(bound({other}), alone);
    }
  });
}

TEST_P(BatchTest, DotLengthsAndAlignments) {
  TESSERA_NEED_DEVICE(backend());
  DispatchDType(dtype(), [&](auto t) {
    using T = decltype(t);
    const std::vector<T> a = NormalVector<T>(70000, 2, 0.25), b = NormalVector<T>(70000, 3);
    DeviceArray<T> array_a(TestStream(backend()), a), array_b(TestStream(backend()), b, 3);
    std::vector<Piece<DotSegment>> pieces;
    std::int64_t i = 0;
    for (std::int64_t n : kLengths) {
      const std::int64_t in_a = i % 9, in_b = i * 5 % 7;
      ++i;
      pieces.push_back({{a.data() + in_a, b.data() + in_b, n},
                        {array_a.data() + in_a, array_b.data() + in_b, n}});
    }
    CheckDot(pieces);
  });
}

TEST_P(BatchTest, NanTiesAndInfinities) {
  TESSERA_NEED_DEVICE(backend());
  DispatchDType(dtype(), [&](auto t) {
    using T = decltype(t);
    std::vector<T> x(70000);
    Random random(4);
    for (T& v : x) v = static_cast<T>(static_cast<ValueOf<T>>(random.Bits() % 4));
    if constexpr (!std::is_integral_v<T>) {
      for (int i = 0; i < 12; ++i) {
        x[random.Bits() % x.size()] = Element<T>(std::numeric_limits<double>::quiet_NaN());
        x[random.Bits() % x.size()] = Element<T>(std::numeric_limits<double>::infinity());
        x[random.Bits() % x.size()] = Element<T>(-std::numeric_limits<double>::infinity());
      }
    }
    DeviceArray<T> array(TestStream(backend()), x);
    std::vector<Piece<ReduceSegment>> pieces;
    for (int i = 0; i < 300; ++i) {
      const auto n = static_cast<std::int64_t>(random.Bits() % 5000);
      pieces.push_back(Cut(x, array, static_cast<std::int64_t>(random.Bits() % 65000), n));
    }
    pieces.push_back(Cut(x, array, 0, 70000));
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kArgMin, ReduceOp::kArgMax,
                        ReduceOp::kAll, ReduceOp::kAny}) {
      CheckReduce(op, pieces);
      if (HasFatalFailure()) return;
    }
    std::vector<T> same(70000, Element<T>(-std::numeric_limits<float>::infinity()));
    if constexpr (std::is_integral_v<T>) same.assign(70000, std::numeric_limits<T>::min());
    DeviceArray<T> same_array(TestStream(backend()), same);
    std::vector<Piece<ReduceSegment>> all_same;
    for (std::int64_t n : kLengths) all_same.push_back(Cut(same, same_array, n % 3, n));
    for (ReduceOp op : {ReduceOp::kMax, ReduceOp::kArgMin, ReduceOp::kArgMax})
      CheckReduce(op, all_same);
  });
}

// Variances of what is not finite, means of integers whose sum leaves 64 bits, sums and products
// that leave the range of f32: as the rows that a request of its own gets have them.
TEST_P(BatchTest, Extremes) {
  TESSERA_NEED_DEVICE(backend());
  DispatchDType(dtype(), [&](auto t) {
    using T = decltype(t);
    const double inf = std::numeric_limits<double>::infinity();
    std::vector<T> x(70000);
    if constexpr (std::is_integral_v<T>) {
      x.assign(x.size(), std::numeric_limits<T>::max());
    } else {
      Random random(10);
      const double largest = sizeof(T) == 8 ? 1e150 : std::is_same_v<T, Half> ? 6e4 : 3e38;
      for (T& v : x) v = Element<T>((random.Bits() % 4 == 0 ? -1 : 1) * largest);
    }
    DeviceArray<T> array(TestStream(backend()), x, 1);
    std::vector<Piece<ReduceSegment>> pieces;
    std::vector<Piece<DotSegment>> dots;
    for (std::int64_t n : kLengths) {
      pieces.push_back(Cut(x, array, n % 7, n));
      dots.push_back({{x.data(), x.data() + n % 5, n}, {array.data(), array.data() + n % 5, n}});
    }
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kNormL1}) {
      CheckReduce(op, pieces);
      if (HasFatalFailure()) return;
    }
    CheckDot(dots);
    if constexpr (!std::is_integral_v<T>) {
      for (std::size_t i = 0; i < x.size(); i += 97)
        x[i] = Element<T>(i % 2 == 0 ? inf : i % 3 == 0 ? -inf : inf - inf);
      DeviceArray<T> odd(TestStream(backend()), x);
      std::vector<Piece<ReduceSegment>> more;
      for (std::int64_t n : kLengths) more.push_back(Cut(x, odd, n % 3 == 0 ? 0 : 50, n));
      for (ReduceOp op : {ReduceOp::kVariance, ReduceOp::kSum}) {
        CheckReduce(op, more);
        if (HasFatalFailure()) return;
      }
    }
  });
}

TEST_P(BatchTest, TenThousandSegments) {
  TESSERA_NEED_DEVICE(backend());
  DispatchDType(dtype(), [&](auto t) {
    using T = decltype(t);
    const std::vector<T> x = NormalVector<T>(1 << 16, 5, 0.25), y = NormalVector<T>(1 << 16, 6);
    DeviceArray<T> array(TestStream(backend()), x), other(TestStream(backend()), y, 1);
    std::vector<Piece<ReduceSegment>> pieces;
    std::vector<Piece<DotSegment>> dots;
    Random random(7);
    for (int i = 0; i < 10000; ++i) {
      const auto n = static_cast<std::int64_t>(i % 100 == 0 ? 3000 : random.Bits() % 300);
      const auto at = static_cast<std::int64_t>(random.Bits() % 60000);
      const auto at_y = static_cast<std::int64_t>(random.Bits() % 60000);
      pieces.push_back(Cut(x, array, at, n));
      dots.push_back(
          {{x.data() + at, y.data() + at_y, n}, {array.data() + at, other.data() + at_y, n}});
    }
    CheckReduce(ReduceOp::kSum, pieces);
    CheckReduce(ReduceOp::kArgMax, pieces);
    CheckDot(dots);
  });
}

// One that is cut into many chunks, among short ones.
TEST_P(BatchTest, LongSegments) {
  TESSERA_NEED_DEVICE(backend());
  DispatchDType(dtype(), [&](auto t) {
    using T = decltype(t);
    const std::int64_t n = (std::int64_t{1} << (backend() == Backend::kCuda ? 23 : 20)) + 12345;
    const std::vector<T> x = NormalVector<T>(n, 8, 0.25);
    DeviceArray<T> array(TestStream(backend()), x);
    const std::vector<Piece<ReduceSegment>> pieces = {
        Cut(x, array, 5, 100), Cut(x, array, 1, n - 1), Cut(x, array, 0, 300001),
        Cut(x, array, 3, 0),   Cut(x, array, 0, n),     Cut(x, array, 7, 5000)};
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kArgMin, ReduceOp::kNormL2, ReduceOp::kVariance,
                        ReduceOp::kMax})
      CheckReduce(op, pieces);
    CheckDot({{{x.data(), x.data() + 1, n - 1}, {array.data(), array.data() + 1, n - 1}},
              {{x.data(), x.data(), 1000}, {array.data(), array.data(), 1000}}});
  });
}

// The bits of a result are its segment's own.
TEST_P(BatchTest, ResultsDoNotDependOnTheBatch) {
  TESSERA_NEED_DEVICE(backend());
  DispatchDType(dtype(), [&](auto t) {
    using T = decltype(t);
    const std::vector<T> x = NormalVector<T>(200000, 9, 0.25);
    // The same values, at an address that no vector is aligned to.
    DeviceArray<T> array(TestStream(backend()), x), shifted(TestStream(backend()), x, 1);
    std::vector<ReduceSegment> segments;
    std::vector<DotSegment> dots;
    for (std::int64_t n : {3, 1000, 4096, 5, 17001, 200000, 2049, 65536}) {
      segments.push_back({array.data(), n});
      dots.push_back({array.data(), shifted.data(), n});
    }
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kNormL2, ReduceOp::kVariance}) {
      std::vector<Scalar> all(segments.size());
      Stream& stream = TestStream(backend());
      ASSERT_TRUE(RunReduceBatch(stream, dtype(), op, segments, absl::MakeSpan(all)).ok());
      for (std::size_t i = 0; i < segments.size(); ++i) {
        for (const T* data : {array.data(), shifted.data()}) {
          Scalar alone;
          ASSERT_TRUE(RunReduceBatch(TestStream(backend()), dtype(), op, {{data, segments[i].n}},
                                     {&alone, 1})
                          .ok());
          EXPECT_EQ(alone.real, all[i].real) << "op " << static_cast<int>(op) << " segment " << i;
          EXPECT_EQ(alone.integer, all[i].integer);
        }
      }
    }
    std::vector<Scalar> all(dots.size());
    ASSERT_TRUE(RunDotBatch(TestStream(backend()), dtype(), dots, absl::MakeSpan(all)).ok());
    for (std::size_t i = 0; i < dots.size(); ++i) {
      Scalar alone;
      ASSERT_TRUE(RunDotBatch(TestStream(backend()), dtype(), {dots[i]}, {&alone, 1}).ok());
      EXPECT_EQ(alone.real, all[i].real);
      EXPECT_EQ(alone.integer, all[i].integer);
    }
  });
}

TEST_P(BatchTest, EmptyBatchesAndSegments) {
  TESSERA_NEED_DEVICE(backend());
  Stream& stream = TestStream(backend());
  EXPECT_TRUE(RunDotBatch(stream, dtype(), {}, {}).ok());
  EXPECT_TRUE(RunReduceBatch(stream, dtype(), ReduceOp::kMin, {}, {}).ok());
  std::vector<ReduceSegment> segments(5);
  std::vector<Scalar> results(5);
  for (ReduceOp op : kAllReduceOps) {
    const auto stats = RunReduceBatch(stream, dtype(), op, segments, absl::MakeSpan(results));
    EXPECT_EQ(stats.ok(), !NeedsElements(op));
    if (!stats.ok()) {
      EXPECT_EQ(stats.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(ErrorReason(stats.status()), "EMPTY_INPUT");
      EXPECT_EQ(ErrorMetadata(stats.status())["segment"], "0");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, BatchTest,
                         testing::Combine(testing::Values(Backend::kCpu, Backend::kCuda),
                                          testing::ValuesIn(kAllDTypes)),
                         [](const auto& tested) {
                           return std::string(Name(std::get<0>(tested.param))) + "_" +
                                  std::string(Name(std::get<1>(tested.param)));
                         });

}  // namespace
}  // namespace tessera::test
