// fixed_tree and compensated: the same bits everywhere, and digits where plain sums have none.
#include <utility>

#include "absl/strings/str_join.h"
#include "kernels/fixed_tree.h"
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

// Multiples of 2^-20 in [-8, 8), without any rounding that a compiler could change.
std::vector<float> GoldenInput(std::int64_t n, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x)
    v = static_cast<float>(static_cast<std::int64_t>(random.Bits() >> 40) - (1 << 23)) * 0x1p-20f;
  return x;
}

class TreeTest : public BackendTest {};

// Whoever changes these bits changes everybody's results.
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

// One element again and again, as often as makes chunks of two segments.
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

// Large terms that cancel, and 1: the condition number is about large * 1e5.
TEST_P(TreeTest, CompensatedKeepsWhatCancels) {
  const auto check = [&]<class T>(T one, double large) {
    SCOPED_TRACE(large);
    constexpr std::size_t kN = 100003;
    std::vector<T> x(kN), ones(kN, one);
    Random random(5);
    for (std::size_t i = 0; i + 1 < kN; i += 2)
      x[i] = static_cast<T>(large * (0.5 + random.Uniform()));
    // What takes x[i] back is somewhere else in the tree.
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
  DeviceArray<double> a(stream(), x), b(stream(), y);
  const auto dot = [&](std::string_view row) {
    return Get(RunDot(stream(), a.view(), b.view(), {.strategy = row})).value.real * 0x1p80;
  };
  EXPECT_NEAR(dot("compensated"), 1, 1e-3);
  EXPECT_GT(std::abs(dot("fixed_tree") - 1), 1);
}

// f32 columns that leave their range are folded again in double, as compensated does.
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

// Where parts of n elements begin and end: at 0, `count` random multiples of the chunk, and n.
std::vector<std::int64_t> RandomCuts(std::int64_t n, std::int64_t size, int count, Random& random) {
  const Tree tree = FixedTree(n, size);
  std::vector<std::int64_t> cuts = {0, n};
  for (int i = 0; i < count && n > 0; ++i) {  // no elements are one part
    const auto chunk =
        static_cast<std::int64_t>(random.Bits() % static_cast<std::uint64_t>(tree.chunks));
    cuts.push_back(chunk * tree.chunk);
  }
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

// What the parts between the cuts finish as; values_of(first, end): the values of one.
template <class F>
absl::StatusOr<ScalarResult> Finished(Stream& stream, std::string_view row, DType dtype,
                                      ReduceOp op, const std::vector<std::int64_t>& cuts,
                                      const F& values_of) {
  std::string values;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    EXPECT_TRUE(BeginRequest(stream).ok());
    const absl::StatusOr<ScalarResult> part = values_of(cuts[i], cuts[i + 1]);
    if (!part.ok()) return part.status();
    EXPECT_EQ(part->value.real, 0);
    values += part->values;
  }
  return FinishParts(stream.device(), dtype, op, cuts.back(), row, values);
}

template <class T>
std::vector<T> Slice(const std::vector<T>& x, std::int64_t first, std::int64_t end) {
  return {x.begin() + first, x.begin() + end};
}

TEST_P(TreeTest, PartsHaveTheBitsOfTheWhole) {
  Random random(31);
  for (DType dtype : kAllDTypes) {
    DispatchDType(dtype, [&]<class T>(T) {
      for (std::int64_t n : Sizes({0, 1, 1000, 4099, 8193, 70001, 300007})) {
        const std::vector<T> x = NormalVector<T>(n, 21, 0.5), y = NormalVector<T>(n, 22);
        DeviceArray<T> a(stream(), x), b(stream(), y);
        for (std::string_view row : kTreeStrategies) {
          const std::vector<Launch> launches =
              Launches(StrategyOf<ReduceProblem>({row, GetParam(), dtype}).limits);
          for (int count : {0, 1, 4}) {
            const auto cuts = RandomCuts(n, sizeof(T), count, random);
            SCOPED_TRACE(absl::StrCat(Absl(Name(dtype)), " ", Absl(row), " n ", n, " cut at ",
                                      absl::StrJoin(cuts, ", ")));
            std::size_t offset = random.Bits() % 16;
            const RunOptions options = {.strategy = row,
                                        .launch = launches[random.Bits() % launches.size()]};
            const auto parts = [&](ReduceOp op, bool products) {
              return Bits(Finished(
                  stream(), row, dtype, op, cuts, [&](std::int64_t first, std::int64_t end) {
                    const std::size_t misaligned = offset++ % 5;
                    DeviceArray<T> p(stream(), Slice(x, first, end), misaligned);
                    DeviceArray<T> q(stream(), Slice(y, first, end), offset % 3 * misaligned);
                    return products ? RunDotPart(stream(), p.view(), q.view(), {first, n}, options)
                                    : RunReducePart(stream(), p.view(), op, {first, n}, options);
                  }));
            };
            for (ReduceOp op : kAllReduceOps) {
              if ((n == 0 && NeedsElements(op)) || (WatchedClosely() && op != ReduceOp::kArgMax))
                continue;
              EXPECT_EQ(parts(op, false), ReduceBits(stream(), row, op, a)) << Name(op);
            }
            EXPECT_EQ(parts(ReduceOp::kSum, true), DotBits(stream(), row, a, b));
          }
          // What the parts leave does no harm to the next call.
          EXPECT_EQ(DotBits(stream(), row, a, b), DotBits(stream(), row, a, b));
        }
      }
    });
  }
}

// Operands with gaps, backwards too: elements of a part count from the view's own beginning.
TEST_P(TreeTest, PartsOfViews) {
  Random random(32);
  for (std::int64_t n : Sizes({700, 4099, 70001, 300007})) {
    DeviceArray<float> a(stream(), NormalVector<float>(2 * n, 23), 1);
    const auto view = [&](std::int64_t first, std::int64_t end, std::int64_t stride) {
      const std::int64_t offset = stride > 0 ? stride * first : 2 * n - 1 + stride * first;
      return StridedView(a.data() + offset, DType::kF32, {end - first}, {stride});
    };
    for (std::string_view row : kTreeStrategies) {
      const auto cuts = RandomCuts(n, 4, 3, random);
      SCOPED_TRACE(absl::StrCat(n, " cut at ", absl::StrJoin(cuts, ", ")));
      const RunOptions options = {.strategy = row};
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kArgMin, ReduceOp::kVariance}) {
        const std::string whole = Bits(RunReduce(stream(), view(0, n, -2), op, options));
        const auto parts = Finished(
            stream(), row, DType::kF32, op, cuts, [&](std::int64_t first, std::int64_t end) {
              return RunReducePart(stream(), view(first, end, -2), op, {first, n}, options);
            });
        EXPECT_EQ(Bits(parts), whole);
      }
      const std::string whole = Bits(RunDot(stream(), view(0, n, 2), view(0, n, 1), options));
      const auto parts = Finished(stream(), row, DType::kF32, ReduceOp::kSum, cuts,
                                  [&](std::int64_t first, std::int64_t end) {
                                    return RunDotPart(stream(), view(first, end, 2),
                                                      view(first, end, 1), {first, n}, options);
                                  });
      EXPECT_EQ(Bits(parts), whole);
    }
  }
}

// The same 4096 elements again and again, as often as makes thousands of chunks of 60 rows.
TEST_P(TreeTest, PartsOfThousandsOfChunks) {
  constexpr std::int64_t kTimes = 15 * 1100 + 7, n = kTimes * 4096;
  static_assert(FixedTree(n, 4).chunk == 15 * 4096 && FixedTree(n, 4).chunks == 1101);
  if (n > Largest()) GTEST_SKIP() << "it is too long";
  DeviceArray<float> base(stream(), NormalVector<float>(4096, 24));
  const auto times = [&](std::int64_t count) {
    return StridedView(base.data(), DType::kF32, {count, 4096}, {0, 1});
  };
  const std::string whole = Bits(RunReduce(stream(), times(kTimes), ReduceOp::kSum, {}));
  Random random(33);
  const auto parts = Finished(
      stream(), "", DType::kF32, ReduceOp::kSum, RandomCuts(n, 4, 5, random),
      [&](std::int64_t first, std::int64_t end) {
        return RunReducePart(stream(), times((end - first) / 4096), ReduceOp::kSum, {first, n}, {});
      });
  EXPECT_EQ(Bits(parts), whole);
}

// Step 6 of the tree is for who has all parts.
TEST_P(TreeTest, PartsThatLeaveTheRange) {
  for (std::int64_t n : Sizes({2050, 70001})) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = i < x.size() / 2 ? 3e38f : -3e38f;
    DeviceArray<float> a(stream(), x);
    Random random(34);
    const auto cuts = RandomCuts(n, 4, 2, random);
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kNormL1}) {
      const auto by = [&](std::string_view row) {
        return Finished(stream(), row, DType::kF32, op, cuts,
                        [&](std::int64_t first, std::int64_t end) {
                          return RunReducePart(stream(), VectorView(a.data() + first, end - first),
                                               op, {first, n}, {.strategy = row});
                        });
      };
      const ScalarResult first = Get(by(""));
      EXPECT_EQ(first.stats.strategy, "fixed_tree");
      EXPECT_FALSE(std::isfinite(first.value.real));
      EXPECT_EQ(Bits(by("compensated")), ReduceBits(stream(), "", op, a));
    }
  }
}

TEST_P(TreeTest, PartsThatThereAreNot) {
  DeviceArray<float> a(stream(), std::vector<float>(9000));
  const auto run = [&](std::int64_t n, const ArrayPart& part, std::string_view row = {}) {
    EXPECT_TRUE(BeginRequest(stream()).ok());
    return RunReducePart(stream(), VectorView(a.data(), n), ReduceOp::kSum, part, {.strategy = row})
        .status();
  };
  // Of 20,000 elements a chunk is 4096.
  EXPECT_TRUE(run(4096, {4096, 20000}).ok());
  EXPECT_TRUE(run(20000 - 4 * 4096, {4 * 4096, 20000}).ok());
  EXPECT_TRUE(run(0, {4096, 20000}).ok());
  EXPECT_TRUE(run(0, {20000, 20000}).ok());
  for (const auto& [n, part] : std::initializer_list<std::pair<std::int64_t, ArrayPart>>{
           {4096, {1, 20000}},
           {4095, {0, 20000}},
           {1, {20000, 20000}},
           {4096, {-4096, 20000}},
           {4096, {0, 4095}},
           {4096, {0, -1}},
           {0, {0, kMostPartBytes / 4 + 1}},
           {4096, {std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::max()}},
           {4096, {std::numeric_limits<std::int64_t>::max() - 4095, 1 << 20}}}) {
    const absl::Status status = run(n, part);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorReason(status), "BAD_PART") << n << " " << part.first << " " << part.elements;
  }
  EXPECT_EQ(ErrorReason(run(4096, {0, 20000},
                            GetParam() == Backend::kCpu ? "cpu_parallel" : "single_pass")),
            "BAD_PART");
  const auto finish = [&](std::size_t bytes, std::int64_t n) {
    return ErrorReason(
        FinishParts(stream().device(), DType::kF32, ReduceOp::kSum, n, "", std::string(bytes, '\0'))
            .status());
  };
  EXPECT_EQ(finish(5 * 8, 20000), "");
  EXPECT_EQ(finish(5 * 8 - 1, 20000), "BAD_PART");
  EXPECT_EQ(finish(6 * 8, 20000), "BAD_PART");
  EXPECT_EQ(finish(0, std::numeric_limits<std::int64_t>::max()), "BAD_PART");
}

// The same values, padding included, whatever memory was before.
TEST_P(TreeTest, ValuesAreTheSameOnEveryDevice) {
  Stream& cpu = TestStream(Backend::kCpu);
  const std::vector<float> x = NormalVector<float>(4096 * 3, 25);
  DeviceArray<float> a(stream(), x), on_cpu(cpu, x);
  for (ReduceOp op : kAllReduceOps) {
    EXPECT_TRUE(BeginRequest(cpu).ok());
    const auto values = [&](Stream& by, const DeviceArray<float>& array) {
      return Get(RunReducePart(by, VectorView(array.data(), 8192), op, {4096, 3 * 4096}, {}))
          .values;
    };
    const std::string found = values(stream(), a);
    EXPECT_EQ(found, values(cpu, on_cpu)) << Name(op);
    if (op == ReduceOp::kArgMax) {
      EXPECT_EQ(found.substr(4, 4), std::string(4, '\0'));
    }
  }
}

TEST_P(TreeTest, RowsOfParts) {
  struct Case {
    std::vector<std::int64_t> shape;
    std::vector<int> axes;
    std::int64_t row;
  };
  for (const Case& c : {Case{{60, 3000}, {1}, 3000}, Case{{40, 50, 30}, {1}, 1500},
                        Case{{30, 8, 9, 10}, {1, 3}, 720}, Case{{3, 20, 700}, {-1}, 700}}) {
    std::int64_t n = 1;
    for (std::int64_t extent : c.shape) n *= extent;
    if (n > Largest()) continue;
    const std::vector<float> x = NormalVector<float>(n, 26);
    DeviceArray<float> a(stream(), x);
    const auto fold = [&](std::int64_t first, std::int64_t rows, const ArrayPart* part) {
      std::vector<std::int64_t> shape = c.shape;
      shape[0] = rows;
      const std::int64_t step = n / c.shape[0];
      const View view = WholeView(*MakeArrayType(DType::kF32, shape), a.data() + first * step);
      const auto type = *ReduceAxesType(view, ReduceOp::kSum, c.axes, false);
      DeviceArray<float> there(stream(), type.shape.elements());
      Get(RunReduceAxes(stream(), view, ReduceOp::kSum, c.axes, there.data(), {}, nullptr, part));
      return there.Values();
    };
    const std::vector<float> whole = fold(0, c.shape[0], nullptr);
    std::vector<float> parts;
    for (std::int64_t first = 0; first < c.shape[0];) {
      const std::int64_t rows = std::min<std::int64_t>(c.shape[0] - first, 1 + first % 7);
      const ArrayPart part{first * (n / c.shape[0]), n};
      const std::vector<float> some = fold(first, rows, &part);
      parts.insert(parts.end(), some.begin(), some.end());
      first += rows;
    }
    EXPECT_EQ(parts, whole);
  }
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
