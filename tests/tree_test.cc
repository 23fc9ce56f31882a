// What fixed_tree and compensated promise beyond every other strategy: the same bits from every
// launch, alignment and device, and digits where plain sums have none.
#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_join.h"
#include "kernels/fixed_tree.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

constexpr std::string_view kTreeStrategies[] = {"fixed_tree", "compensated"};

// A result as the bits that a client sees.
std::string Bits(const absl::StatusOr<ScalarResult>& result) {
  if (!result.ok()) return result.status().ToString();
  return absl::StrCat(absl::Hex(std::bit_cast<std::uint64_t>(result->value.real), absl::kZeroPad16),
                      " ", result->value.integer, " ", result->value.index);
}

template <class T>
std::string ReduceBits(Stream& stream, std::string_view row, ReduceOp op, const DeviceArray<T>& x,
                       std::int64_t n, Launch launch = {}) {
  EXPECT_TRUE(BeginRequest(stream).ok());
  return Bits(RunReduce(stream, VectorView(x.data(), n), op, {.strategy = row, .launch = launch}));
}

template <class T>
std::string DotBits(Stream& stream, std::string_view row, const DeviceArray<T>& a,
                    const DeviceArray<T>& b, std::int64_t n, Launch launch = {}) {
  EXPECT_TRUE(BeginRequest(stream).ok());
  return Bits(RunDot(stream, VectorView(a.data(), n), VectorView(b.data(), n),
                     {.strategy = row, .launch = launch}));
}

// The tree written down once more, as kernels/fixed_tree.h describes it, for sums of floats.
double SumAlongTheTree(const std::vector<float>& x) {
  constexpr std::size_t kRow = 1024, kLanes = 256, kVector = 4;
  const auto halving = [](std::vector<double> v) {
    for (std::size_t half = v.size() / 2; half > 0; half /= 2)
      for (std::size_t i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
  };
  const std::size_t chunk =
      static_cast<std::size_t>(TreeRows(static_cast<std::int64_t>(x.size()), 4)) * kRow;
  std::vector<double> chunks;
  for (std::size_t begin = 0; begin == 0 || begin < x.size(); begin += chunk) {
    const std::size_t end = std::min(x.size(), begin + chunk);
    std::vector<double> lanes(kLanes);
    for (std::size_t top = begin; top < end; top += 64 * kRow) {
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        std::vector<double> columns(kVector);
        for (std::size_t k = 0; k < kVector; ++k) {
          float column = 0;
          for (std::size_t row = 0; row < 64; ++row) {
            const std::size_t i = top + row * kRow + lane * kVector + k;
            if (i < end) column += x[i];
          }
          columns[k] = column;
        }
        lanes[lane] += halving(columns);
      }
    }
    chunks.push_back(halving(lanes));
  }
  if (chunks.size() == 1) return chunks[0];
  std::vector<double> lanes(kLanes);
  for (std::size_t c = 0; c < chunks.size(); ++c) lanes[c % kLanes] += chunks[c];
  return halving(lanes);
}

TEST(TreeShape, IsAFunctionOfTheLength) {
  const auto shape = [](std::int64_t n, std::int64_t size) {
    const Tree tree = FixedTree(n, size);
    return std::pair(tree.chunk, tree.chunks);
  };
  using P = std::pair<std::int64_t, std::int64_t>;
  EXPECT_EQ(shape(0, 4), P(8192, 1));
  EXPECT_EQ(shape(8192, 4), P(8192, 1));
  EXPECT_EQ(shape(8193, 4), P(4096, 3));
  EXPECT_EQ(shape(1 << 20, 4), P(4096, 256));
  EXPECT_EQ(shape((1 << 20) + 1, 4), P(8192, 129));
  EXPECT_EQ(shape(1 << 22, 4), P(8192, 512));
  EXPECT_EQ(shape(1 << 24, 4), P(28 * 1024, 586));
  EXPECT_EQ(shape(1 << 26, 4), P(60 * 1024, 1093));
  EXPECT_EQ(shape(1 << 30, 4), P(252 * 1024, 4162));
  EXPECT_EQ(shape(std::int64_t{1} << 32, 4), P(252 * 1024, 16645));
  EXPECT_EQ(shape(std::int64_t{1} << 34, 4), P(1020 * 1024, 16449));
  EXPECT_EQ(shape(1 << 20, 8), P(4096, 256));
  EXPECT_EQ(shape(1 << 20, 2), P(8192, 128));
  for (std::int64_t size : {2, 4, 8})
    for (std::int64_t n :
         {std::int64_t{1} << 33, std::int64_t{1} << 40, (std::int64_t{1} << 40) + 1})
      EXPECT_LE(FixedTree(n, size).chunks, kTreeMaxChunks);
}

// Multiples of 2^-20 in [-8, 8), without any rounding that a compiler could change.
std::vector<float> GoldenInput(std::int64_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x)
    v = static_cast<float>(static_cast<std::int64_t>(random.Bits() >> 40) - (1 << 23)) * 0x1p-20f;
  return x;
}

class TreeTest : public BackendTest {
 protected:
  Stream& stream() { return TestStream(GetParam()); }
};

// Bits that must never change: whoever changes the tree changes everybody's results.
TEST_P(TreeTest, GoldenBits) {
  struct Golden {
    std::int64_t n;
    const char* sum;
    const char* dot;
    const char* variance;
    const char* compensated;
  };
  const Golden golden[] = {
      {1, "4014409280000000 0 0", "c04185d760000000 0 0", "0000000000000000 0 0",
       "c04185d7520a3500 0 0"},
      {1000, "c014359200000000 0 0", "4075ec84faf83000 0 0", "4034f13fc41ab221 0 0",
       "4075ec84e9013230 0 0"},
      {70001, "c0a2f2fba0800000 0 0", "c0bb59eec6607500 0 0", "4035484bae154f61 0 0",
       "c0bb59eec879cd8c 0 0"},
      {3000001, "c09afb988f000000 0 0", "40d6ae7434604e80 0 0", "40355282b75e65ab 0 0",
       "40d6ae7457666447 0 0"},
      // Chunks of 60 rows.
      {33554439, "40e355d583440000 0 0", "41026efd8aba5900 0 0", "403555731de8a953 0 0",
       "41026efd7c015280 0 0"},
  };
  for (const Golden& g : golden) {
    if (g.n > Largest()) continue;
    SCOPED_TRACE(g.n);
    const std::vector<float> x = GoldenInput(g.n, 101), y = GoldenInput(g.n, 102);
    DeviceArray<float> a(stream(), x), b(stream(), y);
    EXPECT_EQ(ReduceBits(stream(), "fixed_tree", ReduceOp::kSum, a, g.n), g.sum);
    EXPECT_EQ(DotBits(stream(), "fixed_tree", a, b, g.n), g.dot);
    EXPECT_EQ(ReduceBits(stream(), "fixed_tree", ReduceOp::kVariance, a, g.n), g.variance);
    EXPECT_EQ(DotBits(stream(), "compensated", a, b, g.n), g.compensated);
    EXPECT_EQ(Bits(ScalarResult{{.real = SumAlongTheTree(x)}, false, {}}), g.sum);
  }
}

// One element again and again, as often as makes chunks of two segments.
TEST_P(TreeTest, LargestChunks) {
  constexpr std::int64_t kRows = 60 * 18 * kTreeLanes + 1, n = kRows * kTreeRowBytes / 8;
  static_assert(FixedTree(n, 8).chunk > kTreeSegmentRows * kTreeRowBytes / 8);
  DeviceArray<double> one(stream(), std::vector<double>{1});
  const auto ones = MakeView({DType::kF64, MakeShape({1})}, one.data(), 0, {n}, {0});
  ASSERT_TRUE(ones.ok()) << ones.status();
  EXPECT_TRUE(BeginRequest(stream()).ok());
  const auto sum = RunReduce(stream(), *ones, ReduceOp::kSum, {.strategy = "fixed_tree"});
  ASSERT_TRUE(sum.ok()) << sum.status();
  EXPECT_EQ(sum->value.real, static_cast<double>(n));
}

TEST_P(TreeTest, BitsDoNotDependOnTheLaunch) {
  for (std::string_view row : kTreeStrategies) {
    const LaunchLimits& limits =
        StrategyOf<ReduceProblem>({.name = row, .backend = GetParam(), .dtype = DType::kF32})
            .limits;
    for (std::int64_t n : Sizes({1000, 4099, 8192, 70001, 300007})) {
      DeviceArray<float> a(stream(), NormalVector<float>(n, 1, 0.5));
      DeviceArray<float> b(stream(), NormalVector<float>(n, 2));
      const std::string dot = DotBits(stream(), row, a, b, n);
      for (ReduceOp op : kAllReduceOps) {
        if (WatchedClosely() && op != ReduceOp::kArgMax) continue;
        const std::string want = ReduceBits(stream(), row, op, a, n);
        for (const Launch& launch : Launches(limits)) {
          SCOPED_TRACE(absl::StrCat(n, " block ", launch.block_size, " grid ", launch.grid_size));
          EXPECT_EQ(ReduceBits(stream(), row, op, a, n, launch), want);
          EXPECT_EQ(DotBits(stream(), row, a, b, n, launch), dot);
        }
      }
    }
  }
}

TEST_P(TreeTest, BitsDoNotDependOnTheAlignment) {
  for (DType dtype : kAllDTypes) {
    DispatchDType(dtype, [&]<class T>(T) {
      for (std::int64_t n : Sizes({1, 7, 1000, 8192, 70001})) {
        const std::vector<T> x = NormalVector<T>(n, 3, 0.5), y = NormalVector<T>(n, 4);
        for (std::string_view row : kTreeStrategies) {
          std::string dot;
          std::map<ReduceOp, std::string> want;
          for (std::size_t offset = 0; offset < 16 / sizeof(T); ++offset) {
            SCOPED_TRACE(absl::StrCat(std::string(Name(dtype)), " ", n, " offset ", offset));
            DeviceArray<T> a(stream(), x, offset), b(stream(), y, (3 * offset) % 5);
            DeviceArray<T> alike(stream(), y, offset);
            for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kArgMax, ReduceOp::kVariance,
                                ReduceOp::kNormL2, ReduceOp::kProduct}) {
              const std::string got = ReduceBits(stream(), row, op, a, n);
              if (offset == 0) want[op] = got;
              EXPECT_EQ(got, want[op]) << static_cast<int>(op);
            }
            const std::string got = DotBits(stream(), row, a, b, n);
            if (offset == 0) dot = got;
            EXPECT_EQ(got, dot);
            EXPECT_EQ(DotBits(stream(), row, a, alike, n), dot);
          }
        }
      }
    });
  }
}

class TreeOnCudaTest : public TreeTest {};

// Chunks of more than one segment, which the fixed tree has in the longest arrays only.
TEST_P(TreeOnCudaTest, LongChunksDoNotDependOnTheAlignment) {
  for (DType dtype : kAllDTypes) {
    DispatchDType(dtype, [&]<class T>(T) {
      // Rows of 4096 bytes: 64, one element more and less, and several segments.
      const auto row = static_cast<std::int64_t>(4096 / sizeof(T));
      for (std::int64_t n : {64 * row - 1, 64 * row, 64 * row + 1, 128 * row + 3, 200 * row + 5}) {
        if (WatchedClosely() && n != 64 * row + 1) continue;
        const std::vector<T> x = NormalVector<T>(n, 3, 0.5), y = NormalVector<T>(n, 4);
        const Launch one_chunk = {.grid_size = 1};
        std::string dot;
        for (std::size_t offset = 0; offset < 16 / sizeof(T); ++offset) {
          SCOPED_TRACE(absl::StrCat(std::string(Name(dtype)), " ", n, " offset ", offset));
          DeviceArray<T> a(stream(), x, offset), b(stream(), y), alike(stream(), y, offset);
          const std::string got = DotBits(stream(), "single_pass", a, b, n, one_chunk);
          if (offset == 0) dot = got;
          EXPECT_EQ(got, dot);
          EXPECT_EQ(DotBits(stream(), "single_pass", a, alike, n, one_chunk), dot);
        }
      }
    });
  }
}

// Sums whose condition number, the sum of magnitudes over the magnitude of the sum, is 1e8 and
// more: a few large terms that cancel, among small ones that stay.
TEST_P(TreeTest, CompensatedKeepsWhatCancels) {
  const std::int64_t n = 100003;
  const auto run = [&](std::string_view row, auto zero, double large) {
    using T = decltype(zero);
    std::vector<T> x(static_cast<std::size_t>(n)), ones(x.size(), T(1));
    Random random(5);
    for (std::size_t i = 0; i + 1 < x.size(); i += 2) {
      // x[i] is large and x[n - 2 - i], somewhere else in the tree, takes it back.
      x[i] = static_cast<T>(large * (0.5 + random.Uniform()));
    }
    for (std::size_t i = 0; i + 1 < x.size(); i += 2) {
      const std::size_t back = x.size() - 2 - i;
      x[back] = -x[i];
    }
    x.back() = T(1);
    DeviceArray<T> a(stream(), x), b(stream(), ones);
    EXPECT_TRUE(BeginRequest(stream()).ok());
    const auto sum =
        RunReduce(stream(), VectorView(a.data(), n), ReduceOp::kSum, {.strategy = row});
    EXPECT_TRUE(BeginRequest(stream()).ok());
    const auto dot =
        RunDot(stream(), VectorView(a.data(), n), VectorView(b.data(), n), {.strategy = row});
    EXPECT_TRUE(sum.ok() && dot.ok()) << sum.status() << dot.status();
    return std::pair(sum->value.real, dot->value.real);
  };
  // Exactly 1. The condition is about large * 1e5.
  for (double large : {1e5, 1e6}) {
    const auto plain = run("fixed_tree", float{}, large);
    EXPECT_GT(std::abs(plain.first - 1), 0.1) << large;
    EXPECT_GT(std::abs(plain.second - 1), 0.1) << large;
    const auto kept = run("compensated", float{}, large);
    EXPECT_NEAR(kept.first, 1, 1e-4) << large;
    EXPECT_NEAR(kept.second, 1, 1e-4) << large;
  }
  for (double large : {1e15, 1e18, 1e20}) {
    const auto plain = run("fixed_tree", double{}, large);
    EXPECT_GT(std::abs(plain.first - 1), 0.1) << large;
    EXPECT_GT(std::abs(plain.second - 1), 0.1) << large;
    const auto kept = run("compensated", double{}, large);
    EXPECT_NEAR(kept.first, 1, 1e-4) << large;
    EXPECT_NEAR(kept.second, 1, 1e-4) << large;
  }
}

// The same of products that round: (a + b) (a - b) - a^2 + b^2, term by term, is 0.
TEST_P(TreeTest, CompensatedKeepsTheErrorOfProducts) {
  std::vector<double> x, y;
  Random random(6);
  for (int i = 0; i < 5000; ++i) {
    const double a = 1 + std::ldexp(std::floor(random.Uniform() * 0x1p40), -40);
    const double b = std::ldexp(std::floor(random.Uniform() * 0x1p30), -40);
    for (const auto& [u, v] : {std::pair(a + b, a - b), std::pair(-a, a), std::pair(b, b)}) {
      x.push_back(u);
      y.push_back(v);
    }
  }
  x.push_back(0x1p-40);
  y.push_back(0x1p-40);
  const auto n = static_cast<std::int64_t>(x.size());
  DeviceArray<double> a(stream(), x), b(stream(), y);
  EXPECT_TRUE(BeginRequest(stream()).ok());
  const auto kept = RunDot(stream(), VectorView(a.data(), n), VectorView(b.data(), n),
                           {.strategy = "compensated"});
  ASSERT_TRUE(kept.ok());
  EXPECT_NEAR(kept->value.real * 0x1p80, 1, 1e-3);
  EXPECT_TRUE(BeginRequest(stream()).ok());
  const auto plain = RunDot(stream(), VectorView(a.data(), n), VectorView(b.data(), n),
                            {.strategy = "fixed_tree"});
  ASSERT_TRUE(plain.ok());
  EXPECT_GT(std::abs(plain->value.real * 0x1p80 - 1), 1);
}

// A variance far from zero, where the difference of two sums of squares would have no digits.
TEST_P(TreeTest, VarianceIsStable) {
  for (std::string_view row : {"fixed_tree", "compensated"}) {
    std::vector<double> x(200004);  // of variance 2/3
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 1e9 + static_cast<double>(i % 3);
    DeviceArray<double> a(stream(), x);
    EXPECT_TRUE(BeginRequest(stream()).ok());
    const auto variance =
        RunReduce(stream(), VectorView(a.data(), 200004), ReduceOp::kVariance, {.strategy = row});
    ASSERT_TRUE(variance.ok());
    const double bound = variance->stats.roundoff;
    EXPECT_NEAR(variance->value.real, 2.0 / 3, 2.0 / 3 * bound);
    EXPECT_LT(bound, row == "compensated" ? 1e-15 : 1e-11);
  }
}

// What an empty strategy runs gives a finite answer where there is one: f32 columns that leave
// their range are folded again in double, which is what compensated does.
TEST_P(TreeTest, SumsMayLeaveTheRangeOnTheirWay) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    DispatchDType(dtype, [&]<class T>(T) {
      for (std::int64_t n : Sizes({1, 2, 31, 1025, 2048, 4099, 70001, 300007})) {
        Random random(19);
        std::vector<T> same(static_cast<std::size_t>(n), Element<T>(3e38)), mixed = same;
        for (T& x : mixed)
          x = Element<T>((random.Bits() % 2 == 0 ? 3e38 : -3e38) * random.Uniform());
        for (const std::vector<T>* x : {&same, &mixed}) {
          long double sum = 0, magnitude = 0, squares = 0, products = 0, large = 0;
          for (std::size_t i = 0; i < x->size(); ++i) {
            sum += Exact((*x)[i]);
            magnitude += std::abs(Exact((*x)[i]));
            squares += Exact((*x)[i]) * Exact((*x)[i]);
            products += Exact((*x)[i]) * Exact(mixed[i]);
            large += std::abs(Exact((*x)[i]) * Exact(mixed[i]));
          }
          SCOPED_TRACE(absl::StrCat(std::string(Name(dtype)), " n ", n));
          DeviceArray<T> a(stream(), *x, 1), b(stream(), mixed);
          const auto check = [&](const absl::StatusOr<ScalarResult>& got, long double want,
                                 long double scale) {
            ASSERT_TRUE(got.ok()) << got.status();
            EXPECT_EQ(got->stats.strategy, "fixed_tree");
            EXPECT_GE(got->stats.kernel_us, 0);
            EXPECT_LE(std::abs(static_cast<double>(got->value.real - want)),
                      got->stats.roundoff * static_cast<double>(scale))
                << got->value.real << " instead of " << static_cast<double>(want);
          };
          const View view = VectorView(a.data(), n);
          const RunOptions options = {.timing = true};
          check(RunReduce(stream(), view, ReduceOp::kSum, options), sum, magnitude);
          check(RunReduce(stream(), view, ReduceOp::kMean, options), sum / n, magnitude / n);
          check(RunReduce(stream(), view, ReduceOp::kNormL1, options), magnitude, magnitude);
          check(RunDot(stream(), view, view, options), squares, squares);
          check(RunDot(stream(), view, VectorView(b.data(), n), options), products, large);
          EXPECT_EQ(DotBits(stream(), "", a, a, n), DotBits(stream(), "compensated", a, a, n));
          if (x == &same && n > 1024) {
            for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kNormL1})
              EXPECT_EQ(ReduceBits(stream(), "", op, a, n),
                        ReduceBits(stream(), "compensated", op, a, n));
          }
        }
        // Operands that are not finite.
        const double inf = std::numeric_limits<double>::infinity();
        same[same.size() / 2] = Element<T>(inf);
        DeviceArray<T> a(stream(), same);
        const View view = VectorView(a.data(), n);
        EXPECT_EQ(RunReduce(stream(), view, ReduceOp::kSum, {})->value.real, inf);
        EXPECT_EQ(RunDot(stream(), view, view, {})->value.real, inf);
        same[0] = Element<T>(-inf);
        DeviceArray<T> b(stream(), same);
        EXPECT_EQ(RunReduce(stream(), VectorView(b.data(), n), ReduceOp::kNormL1, {})->value.real,
                  inf);
        const double sum =
            RunReduce(stream(), VectorView(b.data(), n), ReduceOp::kSum, {})->value.real;
        EXPECT_TRUE(n == 1 ? sum == -inf : std::isnan(sum)) << sum;
      }
    });
  }
  const std::vector<float> large = {1e20f};
  DeviceArray<float> a(stream(), large);
  EXPECT_EQ(RunDot(stream(), VectorView(a.data(), 1), VectorView(a.data(), 1), {})->value.real,
            static_cast<double>(1e20f) * static_cast<double>(1e20f));
}

INSTANTIATE_TEST_SUITE_P(Devices, TreeTest, testing::Values(Backend::kCpu, Backend::kCuda),
                         BackendName);
INSTANTIATE_TEST_SUITE_P(Devices, TreeOnCudaTest, testing::Values(Backend::kCuda), BackendName);

TEST(TreeDevices, AgreeBitByBit) {
  TESSERA_NEED_DEVICE(Backend::kCuda);
  Stream& cpu = TestStream(Backend::kCpu);
  Stream& gpu = TestStream(Backend::kCuda);
  Random random(7);
  for (DType dtype : kAllDTypes) {
    DispatchDType(dtype, [&]<class T>(T) {
      for (int i = 0; i < (WatchedClosely() ? 1 : 24); ++i) {
        // Log-uniform.
        const double largest = std::min(0x1p22, static_cast<double>(Largest()));
        const auto n = static_cast<std::int64_t>(std::pow(largest, random.Uniform()));
        SCOPED_TRACE(absl::StrCat(std::string(Name(dtype)), " n ", n));
        const std::uint64_t seed = random.Bits();
        const std::vector<T> x = NormalVector<T>(n, seed, 0.25), y = NormalVector<T>(n, seed + 1);
        DeviceArray<T> ca(cpu, x), cb(cpu, y), ga(gpu, x, i % 5), gb(gpu, y, i % 3);
        for (std::string_view row : kTreeStrategies) {
          for (ReduceOp op : kAllReduceOps)
            EXPECT_EQ(ReduceBits(cpu, row, op, ca, n), ReduceBits(gpu, row, op, ga, n))
                << static_cast<int>(op) << " " << row;
          EXPECT_EQ(DotBits(cpu, row, ca, cb, n), DotBits(gpu, row, ga, gb, n)) << row;
        }
      }
      // Extremes, NaN and infinities too.
      {
        std::vector<T> x(5000, Element<T>(3e38));
        if constexpr (std::is_integral_v<T>) x.assign(5000, std::numeric_limits<T>::max());
        x[77] = T{};
        DeviceArray<T> ca(cpu, x), ga(gpu, x);
        for (std::string_view row : kTreeStrategies) {
          for (ReduceOp op : kAllReduceOps)
            EXPECT_EQ(ReduceBits(cpu, row, op, ca, 5000), ReduceBits(gpu, row, op, ga, 5000))
                << static_cast<int>(op) << " " << row;
          EXPECT_EQ(DotBits(cpu, row, ca, ca, 5000), DotBits(gpu, row, ga, ga, 5000)) << row;
        }
      }
      if constexpr (!std::is_integral_v<T>) {
        std::vector<T> x = NormalVector<T>(5000, 8);
        for (double special :
             {-std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
          x[4321] = Element<T>(special);
          DeviceArray<T> ca(cpu, x), ga(gpu, x);
          for (std::string_view row : kTreeStrategies)
            for (ReduceOp op : kAllReduceOps)
              EXPECT_EQ(ReduceBits(cpu, row, op, ca, 5000), ReduceBits(gpu, row, op, ga, 5000))
                  << static_cast<int>(op);
        }
      }
    });
  }
}

}  // namespace
}  // namespace tessera::test
