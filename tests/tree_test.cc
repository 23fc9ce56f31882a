// fixed_tree and compensated: the same bits everywhere, and correct digits even if plain sums have
// none.
#include <utility>

#include "absl/strings/str_join.h"
#include "kernels/same_bits/fixed_tree.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

constexpr std::string_view kTreeStrategies[] = {"fixed_tree", "compensated"};

template <class T>
std::string ReduceBits(Stream& stream, std::string_view row, ReduceOp op, const DeviceArray<T>& x,
                       Launch launch = {}) {
  EXPECT_TRUE(BeginRequest(stream).ok());
  return Bits(RunReduce(stream, x.view(), op, {.strategy = row, .launch = launch}));
}

template <class T>
std::string DotBits(Stream& stream, std::string_view row, const DeviceArray<T>& a,
                    const DeviceArray<T>& b, Launch launch = {}) {
  EXPECT_TRUE(BeginRequest(stream).ok());
  return Bits(RunDot(stream, a.view(), b.view(), {.strategy = row, .launch = launch}));
}

TEST(TreeShape, IsAFunctionOfTheLength) {
  constexpr std::int64_t kOne = 1;
  struct Case {
    std::int64_t n, size, chunk, chunks;
  };
  constexpr Case kCases[] = {{0, 4, 8192, 1},
                             {8192, 4, 8192, 1},
                             {8193, 4, 4096, 3},
                             {1048576, 4, 4096, 256},
                             {1048577, 4, 8192, 129},
                             {4194304, 4, 8192, 512},
                             {16777216, 4, 28672, 586},
                             {67108864, 4, 61440, 1093},
                             {1073741824, 4, 258048, 4162},
                             {4294967296, 4, 258048, 16645},
                             {17179869184, 4, 1044480, 16449},
                             {1048576, 8, 4096, 256},
                             {1048576, 2, 8192, 128}};
  for (const Case& c : kCases) {
    const Tree tree = FixedTree(c.n, c.size);
    EXPECT_EQ(std::pair(tree.chunk, tree.chunks), std::pair(c.chunk, c.chunks)) << c.n;
  }
  for (std::int64_t size : {2, 4, 8})
    for (std::int64_t n : {kOne << 33, kOne << 40, (kOne << 40) + 1})
      EXPECT_LE(FixedTree(n, size).chunks, kTreeMaxChunks);
}

// Returns multiples of 2^-20 in [-8, 8), without any rounding that a compiler could change.
std::vector<float> GoldenInput(std::int64_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x)
    v = static_cast<float>(static_cast<std::int64_t>(random.Bits() >> 40) - (1 << 23)) * 0x1p-20f;
  return x;
}

class TreeTest : public BackendTest {};

// A change of these bits changes the results of all users.
TEST_P(TreeTest, GoldenBits) {
  struct Golden {
    std::int64_t n;
    const char *sum, *dot, *variance, *compensated;
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
      {33554439, "40e355d583440000 0 0", "41026efd8aba5900 0 0", "403555731de8a953 0 0",
       "41026efd7c015280 0 0"},
  };
  for (const Golden& g : golden) {
    if (g.n > Largest()) continue;
    SCOPED_TRACE(g.n);
    DeviceArray<float> a(stream(), GoldenInput(g.n, 101)), b(stream(), GoldenInput(g.n, 102));
    EXPECT_EQ(ReduceBits(stream(), "fixed_tree", ReduceOp::kSum, a), g.sum);
    EXPECT_EQ(DotBits(stream(), "fixed_tree", a, b), g.dot);
    EXPECT_EQ(ReduceBits(stream(), "fixed_tree", ReduceOp::kVariance, a), g.variance);
    EXPECT_EQ(DotBits(stream(), "compensated", a, b), g.compensated);
  }
}

// Repeats one element often enough for chunks of two segments.
TEST_P(TreeTest, LargestChunks) {
  constexpr std::int64_t kRows = 60 * 18 * kTreeLanes + 1, n = kRows * kTreeRowBytes / 8;
  static_assert(FixedTree(n, 8).chunk > kTreeSegmentRows * kTreeRowBytes / 8);
  const DeviceArray<double> one(stream(), std::vector<double>{1});
  const auto sum = Get(RunReduce(stream(), StridedView(one.data(), DType::kF64, {n}, {0}),
                                 ReduceOp::kSum, {.strategy = "fixed_tree"}));
  EXPECT_EQ(sum.value.real, static_cast<double>(n));
}

TEST_P(TreeTest, BitsDoNotDependOnTheLaunch) {
  for (std::string_view row : kTreeStrategies) {
    const LaunchLimits& limits = StrategyOf<ReduceProblem>({row, GetParam(), DType::kF32}).limits;
    for (std::int64_t n : Sizes({1000, 4099, 8192, 70001, 300007})) {
      DeviceArray<float> a(stream(), NormalVector<float>(n, 1, 0.5));
      DeviceArray<float> b(stream(), NormalVector<float>(n, 2));
      const std::string dot = DotBits(stream(), row, a, b);
      for (ReduceOp op : kAllReduceOps) {
        if (WatchedClosely() && op != ReduceOp::kArgMax) continue;
        const std::string want = ReduceBits(stream(), row, op, a);
        for (const Launch& launch : Launches(limits)) {
          SCOPED_TRACE(absl::StrCat(n, " block ", launch.block_size, " grid ", launch.grid_size));
          EXPECT_EQ(ReduceBits(stream(), row, op, a, launch), want);
          EXPECT_EQ(DotBits(stream(), row, a, b, launch), dot);
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
          std::map<ReduceOp, std::string> want;
          std::string dot;
          for (std::size_t offset = 0; offset < 16 / sizeof(T); ++offset) {
            SCOPED_TRACE(absl::StrCat(Absl(Name(dtype)), " ", n, " offset ", offset));
            DeviceArray<T> a(stream(), x, offset), b(stream(), y, (3 * offset) % 5);
            DeviceArray<T> alike(stream(), y, offset);
            for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kArgMax, ReduceOp::kVariance,
                                ReduceOp::kNormL2, ReduceOp::kProduct}) {
              const std::string got = ReduceBits(stream(), row, op, a);
              EXPECT_EQ(got, want.try_emplace(op, got).first->second) << Name(op);
            }
            if (offset == 0) dot = DotBits(stream(), row, a, b);
            EXPECT_EQ(DotBits(stream(), row, a, b), dot);
            EXPECT_EQ(DotBits(stream(), row, a, alike), dot);
          }
        }
      }
    });
  }
}

class TreeOnCudaTest : public TreeTest {};

// Tests chunks of more than one segment, which the fixed tree has only in the longest arrays.
TEST_P(TreeOnCudaTest, LongChunksDoNotDependOnTheAlignment) {
  for (DType dtype : kAllDTypes) {
    DispatchDType(dtype, [&]<class T>(T) {
      // 64 rows of 4096 bytes, one element more and less, and several segments.
      const auto row = static_cast<std::int64_t>(4096 / sizeof(T));
      for (std::int64_t n : {64 * row - 1, 64 * row, 64 * row + 1, 128 * row + 3, 200 * row + 5}) {
        if (WatchedClosely() && n != 64 * row + 1) continue;
        const std::vector<T> x = NormalVector<T>(n, 3, 0.5), y = NormalVector<T>(n, 4);
        const Launch one_chunk = {.grid_size = 1};
        std::string dot;
        for (std::size_t offset = 0; offset < 16 / sizeof(T); ++offset) {
          SCOPED_TRACE(absl::StrCat(Absl(Name(dtype)), " ", n, " offset ", offset));
          DeviceArray<T> a(stream(), x, offset), b(stream(), y), alike(stream(), y, offset);
          if (offset == 0) dot = DotBits(stream(), "single_pass", a, b, one_chunk);
          EXPECT_EQ(DotBits(stream(), "single_pass", a, b, one_chunk), dot);
          EXPECT_EQ(DotBits(stream(), "single_pass", a, alike, one_chunk), dot);
        }
      }
    });
  }
}

// Adds large terms that cancel, and a one. The condition number is about large * 1e5.
TEST_P(TreeTest, CompensatedKeepsWhatCancels) {
  const auto check = [&]<class T>(T one, double large) {
    SCOPED_TRACE(large);
    constexpr std::size_t kN = 100003;
    std::vector<T> x(kN), ones(kN, one);
    Random random(5);
    for (std::size_t i = 0; i + 1 < kN; i += 2)
      x[i] = static_cast<T>(large * (0.5 + random.Uniform()));
    // The element that cancels x[i] is elsewhere in the tree.
    for (std::size_t i = 0; i + 1 < kN; i += 2) x[kN - 2 - i] = -x[i];
    x.back() = one;
    DeviceArray<T> a(stream(), x), b(stream(), ones);
    for (std::string_view row : kTreeStrategies) {
      for (const auto& result : {RunReduce(stream(), a.view(), ReduceOp::kSum, {.strategy = row}),
                                 RunDot(stream(), a.view(), b.view(), {.strategy = row})}) {
        const double value = Get(result).value.real;
        if (row == "compensated") {
          EXPECT_NEAR(value, 1, 1e-4);
        } else {
          EXPECT_GT(std::abs(value - 1), 0.1);
        }
      }
    }
  };
  for (double large : {1e5, 1e6}) check(1.0f, large);
  for (double large : {1e15, 1e18, 1e20}) check(1.0, large);
}

// As above, but the products are rounded: term by term, (a + b) (a - b) - a^2 + b^2 is 0.
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
  DeviceArray<double> a(stream(), x), b(stream(), y);
  const auto dot = [&](std::string_view row) {
    return Get(RunDot(stream(), a.view(), b.view(), {.strategy = row})).value.real * 0x1p80;
  };
  EXPECT_NEAR(dot("compensated"), 1, 1e-3);
  EXPECT_GT(std::abs(dot("fixed_tree") - 1), 1);
}

// f32 columns whose sums overflow are folded again in double, as `compensated` folds them.
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
          const View view = a.view();
          const RunOptions options = {.timing = true};
          check(RunReduce(stream(), view, ReduceOp::kSum, options), sum, magnitude);
          check(RunReduce(stream(), view, ReduceOp::kMean, options), sum / n, magnitude / n);
          check(RunReduce(stream(), view, ReduceOp::kNormL1, options), magnitude, magnitude);
          check(RunDot(stream(), view, view, options), squares, squares);
          check(RunDot(stream(), view, b.view(), options), products, large);
          EXPECT_EQ(DotBits(stream(), "", a, a), DotBits(stream(), "compensated", a, a));
          if (x == &same && n > 1024) {
            for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kNormL1})
              EXPECT_EQ(ReduceBits(stream(), "", op, a),
                        ReduceBits(stream(), "compensated", op, a));
          }
        }
        const auto reduced = [&](ReduceOp op) {
          DeviceArray<T> a(stream(), same);
          return RunReduce(stream(), a.view(), op, {})->value.real;
        };
        same[same.size() / 2] = Element<T>(kInfinity);
        EXPECT_EQ(reduced(ReduceOp::kSum), kInfinity);
        DeviceArray<T> a(stream(), same);
        EXPECT_EQ(RunDot(stream(), a.view(), a.view(), {})->value.real, kInfinity);
        same[0] = Element<T>(-kInfinity);
        EXPECT_EQ(reduced(ReduceOp::kNormL1), kInfinity);
        const double sum = reduced(ReduceOp::kSum);
        EXPECT_TRUE(n == 1 ? sum == -kInfinity : std::isnan(sum)) << sum;
      }
    });
  }
  DeviceArray<float> a(stream(), std::vector<float>{1e20f});
  EXPECT_EQ(RunDot(stream(), a.view(), a.view(), {})->value.real,
            static_cast<double>(1e20f) * static_cast<double>(1e20f));
}

TESSERA_BACKENDS(TreeTest);
INSTANTIATE_TEST_SUITE_P(Devices, TreeOnCudaTest, testing::Values(Backend::kCuda), BackendName);

TEST(TreeDevices, AgreeBitByBit) {
  TESSERA_NEED_DEVICE(Backend::kCuda);
  Stream &cpu = TestStream(Backend::kCpu), &gpu = TestStream(Backend::kCuda);
  Random random(7);
  for (DType dtype : kAllDTypes) {
    DispatchDType(dtype, [&]<class T>(T) {
      const auto compare = [&](const std::vector<T>& x, const std::vector<T>& y,
                               std::size_t offset) {
        SCOPED_TRACE(absl::StrCat(Absl(Name(dtype)), " n ", x.size()));
        DeviceArray<T> ca(cpu, x), cb(cpu, y), ga(gpu, x, offset % 5), gb(gpu, y, offset % 3);
        for (std::string_view row : kTreeStrategies) {
          for (ReduceOp op : kAllReduceOps)
            EXPECT_EQ(ReduceBits(cpu, row, op, ca), ReduceBits(gpu, row, op, ga))
                << Name(op) << " " << row;
          if (!y.empty()) {
            EXPECT_EQ(DotBits(cpu, row, ca, cb), DotBits(gpu, row, ga, gb)) << row;
          }
        }
      };
      for (std::size_t i = 0; i < (WatchedClosely() ? 1u : 24u); ++i) {
        const double largest = std::min(0x1p22, static_cast<double>(Largest()));
        const auto n = static_cast<std::int64_t>(std::pow(largest, random.Uniform()));
        const std::uint64_t seed = random.Bits();
        compare(NormalVector<T>(n, seed, 0.25), NormalVector<T>(n, seed + 1), i);
      }
      std::vector<T> x(5000, Element<T>(3e38));
      if constexpr (std::is_integral_v<T>) x.assign(5000, std::numeric_limits<T>::max());
      x[77] = T{};
      compare(x, x, 0);
      if constexpr (FloatElement<T>) {
        x = NormalVector<T>(5000, 8);
        for (double special : {-kInfinity, std::nan("")}) {
          x[4321] = Element<T>(special);
          compare(x, {}, 0);
        }
      }
    });
  }
}

}  // namespace
}  // namespace tessera::test
