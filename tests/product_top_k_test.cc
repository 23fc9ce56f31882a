// Products that select their largest results: which products can, and whether they have the bits
// of Matmul, Map and TopK.
#include <optional>

#include "kernels/run/product_top_k.h"
#include "kernels/run/stage.h"
#include "tests/described_device.h"
#include "tests/expressions.h"

namespace tessera::test {
namespace {

constexpr MapOp kAdd = MapOp::kAdd, kSubtract = MapOp::kSubtract, kMultiply = MapOp::kMultiply;

// Expressions of the product (operand 1) and a vector (operand 0), each with the score that is
// found in it.
const std::vector<std::pair<Nodes, Score>>& Scores() {
  static const auto& scores = *new std::vector<std::pair<Nodes, Score>>{
      {{In(1)}, {}},
      {{In(1), Real(-0.3), Op(kMultiply, {0, 1})}, {.scale = -0.3f}},
      {{In(1), Real(2), Op(kMultiply, {1, 0}), Real(0.7), Op(kMultiply, {2, 3})},
       {.scale = 2, .outer = 0.7f}},
      {{In(0), In(1), Op(kAdd, {0, 1})}, {.vector = 0}},
      {{In(0), In(1), Op(kAdd, {1, 0})}, {.vector = 0}},
      {{In(0), In(1), Op(kSubtract, {0, 1})}, {.scale = -1, .vector = 0}},
      {{In(0), In(1), Op(kSubtract, {1, 0})}, {.vector = 0, .negated = true}},
      {{In(0), Real(2), In(1), Op(kMultiply, {1, 2}), Op(kSubtract, {0, 3})},
       {.scale = -2, .vector = 0}},
      {{In(0), Real(0.3), In(1), Op(kMultiply, {1, 2}), Op(kSubtract, {3, 0})},
       {.scale = 0.3f, .vector = 0, .negated = true}},
      {{In(0), Real(-2), In(1), Op(kMultiply, {2, 1}), Op(kAdd, {3, 0})},
       {.scale = -2, .vector = 0}},
      {{In(0), In(1), Op(kSubtract, {0, 1}), Real(-0.3), Op(kMultiply, {2, 3})},
       {.scale = -1, .outer = -0.3f, .vector = 0}},
      {{In(0), In(1), Real(1.7), Op(kMultiply, {1, 2}), Op(kSubtract, {3, 0}), Real(0.3),
        Op(kMultiply, {5, 4})},
       {.scale = 1.7f, .outer = 0.3f, .vector = 0, .negated = true}},
  };
  return scores;
}

std::optional<Score> ScoreOf(const Nodes& nodes, std::vector<DType> dtypes) {
  const auto program = CompileExpression(nodes, dtypes);
  EXPECT_TRUE(program.ok()) << program.status();
  return program.ok() ? FindScore(*program, 1) : std::nullopt;
}

TEST(FindScoreTest, FindsFactorsAndVector) {
  for (std::size_t i = 0; i < Scores().size(); ++i) {
    SCOPED_TRACE(i);
    const auto& [nodes, expected] = Scores()[i];
    const auto score = ScoreOf(nodes, {DType::kF32, DType::kF32});
    ASSERT_TRUE(score.has_value());
    EXPECT_EQ(score->scale, expected.scale);
    EXPECT_EQ(score->outer, expected.outer);
    EXPECT_EQ(score->vector, expected.vector);
    EXPECT_EQ(score->negated, expected.negated);
    for (DType dtype : {DType::kF16, DType::kBF16})
      EXPECT_TRUE(ScoreOf(nodes, {dtype, dtype}).has_value()) << Name(dtype);
  }
}

TEST(FindScoreTest, ConstantsAreRoundedToTheType) {
  const auto score = ScoreOf(Scores()[1].first, {DType::kBF16, DType::kBF16});
  ASSERT_TRUE(score.has_value());
  EXPECT_EQ(score->scale, static_cast<float>(BFloat16(-0.3f)));
}

TEST(FindScoreTest, LeavesEverythingElse) {
  const std::vector<Nodes> others = {
      {In(0)},
      {In(1), In(1), Op(kAdd, {0, 1})},
      {In(1), In(1), Op(kMultiply, {0, 1})},
      {In(0), In(1), Op(kMultiply, {0, 1})},
      {In(1), Real(1), Op(kAdd, {0, 1})},
      {In(1), Op(MapOp::kNegate, {0})},
      {In(1), Real(1), Op(MapOp::kDivide, {0, 1})},
      {In(0), In(1), Real(2), Op(MapOp::kFma, {1, 2, 0})},
      {In(0), In(1), Op(kAdd, {0, 1}), In(0), Op(kAdd, {2, 3})},
      {In(0), In(1), Op(kAdd, {0, 1}), Real(2), Op(kMultiply, {2, 3}), Real(2),
       Op(kMultiply, {4, 5})},
      {In(1), Real(2), Op(kMultiply, {0, 1}), Real(3), Op(kMultiply, {2, 3}), In(0),
       Op(kAdd, {4, 5})},
      {In(0), Real(2), Op(kMultiply, {0, 1}), In(1), Op(kAdd, {2, 3})},
      {In(1), Op(MapOp::kCast, {0}, DType::kF64)},
      {In(1), Op(MapOp::kSqrt, {0})},
  };
  for (std::size_t i = 0; i < others.size(); ++i)
    EXPECT_FALSE(ScoreOf(others[i], {DType::kF32, DType::kF32}).has_value()) << i;
  // All operands have one type.
  const Nodes sum = {In(0), In(1), Op(kAdd, {0, 1})};
  using enum DType;
  for (auto [vector, product] : {std::pair(kF32, kBF16),
                                 {kBF16, kF32},
                                 {kF16, kBF16},
                                 {kF64, kF32},
                                 {kF64, kF64},
                                 {kI32, kI32},
                                 {kI32, kF32}})
    EXPECT_FALSE(ScoreOf(sum, {vector, product}).has_value()) << Name(vector) << Name(product);
}

// A search with the scores |x|^2 - 2 q.x of m queries and n vectors of d dimensions.
struct Search {
  std::int64_t m = 1024, n = 1 << 20, d = 128, k = 10;
  DType dtype = DType::kBF16, out_dtype = DType::kF32;
  Nodes nodes = Scores()[7].first;
  Expression expression = {};
  ProductTopK request = {};

  const ProductTopK& Make() {
    expression = nodes;
    request = {.a = StridedView(nullptr, dtype, {m, d}, {d, 1}),
               .b = StridedView(nullptr, dtype, {n, d}, {d, 1}),
               .transpose_b = true,
               .out_dtype = out_dtype,
               .expression = nodes.empty() ? nullptr : &expression,
               .operands = {StridedView(nullptr, out_dtype, {n}, {1}),
                            StridedView(nullptr, out_dtype, {m, n}, {n, 1})},
               .product = 1,
               .k = k,
               .smallest = true};
    return request;
  }
};

#ifdef TESSERA_WITH_CUDA

bool IsChosen(Search search, std::string_view product = "tensor_bf16") {
  return ChooseProductTopK(search.Make(), product, Described(Backend::kCuda)) != nullptr;
}

TEST(ChooseProductTopKTest, SearchesAreChosen) {
  EXPECT_TRUE(IsChosen({}));
  EXPECT_TRUE(IsChosen({.out_dtype = DType::kBF16}));
  EXPECT_TRUE(IsChosen({.dtype = DType::kF16}, "tensor_f16"));
  EXPECT_TRUE(IsChosen({.k = 128}));
  EXPECT_TRUE(IsChosen({.nodes = {}}));
  EXPECT_TRUE(IsChosen({.m = 1000, .n = 100'003, .d = 72}));
  Search search;
  EXPECT_EQ(ChooseProductTopK(search.Make(), "tensor_bf16", Described(Backend::kCuda))->name,
            "tensor_bf16_top_k");
}

TEST(ChooseProductTopKTest, WhatHasOtherBitsOrIsNoFasterIsNot) {
  EXPECT_FALSE(IsChosen({}, "tensor_f16x"));
  EXPECT_FALSE(IsChosen({}, "tensor_mma"));
  EXPECT_FALSE(IsChosen({}, "cublas"));
  EXPECT_FALSE(IsChosen({.dtype = DType::kF32}, "tensor_f32x3"));
  EXPECT_FALSE(IsChosen({.k = 129}));
  EXPECT_FALSE(IsChosen({.d = 100}));            // TMA cannot read it.
  EXPECT_FALSE(IsChosen({.m = 64, .n = 1024}));  // The product is small.
  EXPECT_TRUE(IsChosen({.m = 2048, .n = 16'384}));
  EXPECT_FALSE(IsChosen({.m = 2048, .n = 16'384, .k = 100}));
  EXPECT_FALSE(IsChosen({.m = 2048, .n = 16'384, .nodes = {}}));
  EXPECT_FALSE(IsChosen({.out_dtype = DType::kBF16, .nodes = {}}));
  EXPECT_FALSE(IsChosen({.d = 0}));
  EXPECT_FALSE(IsChosen({.nodes = {In(1), Op(MapOp::kAbs, {0})}}));
  Search search;
  const auto chosen = [&](int compute_capability = 90) {
    const Described device(Backend::kCuda, compute_capability);
    return ChooseProductTopK(search.request, "tensor_bf16", device) != nullptr;
  };
  search.Make();
  EXPECT_FALSE(chosen(80));
  EXPECT_FALSE(chosen(100));
  const auto vector = [](std::initializer_list<std::int64_t> shape,
                         std::initializer_list<std::int64_t> strides) {
    return StridedView(nullptr, DType::kF32, shape, strides);
  };
  for (const auto& [operand, want] : {std::pair(vector({search.n}, {3}), true),
                                      {vector({1}, {1}), true},
                                      {vector({search.m, 1}, {1, 1}), false},  // one per row
                                      {vector({search.m, search.n}, {search.n, 1}), false},
                                      {vector({1, 1, search.n}, {1, 1, 1}), false}}) {
    search.request.operands[0] = operand;
    EXPECT_EQ(chosen(), want) << ToString(operand.shape);
  }
  search.Make();
  search.request.a.data = reinterpret_cast<const void*>(8);  // NOLINT(performance-no-int-to-ptr)
  EXPECT_FALSE(chosen());
  search.Make();
  search.request.a = StridedView(nullptr, DType::kBF16, {search.m, search.d}, {1, search.m});
  EXPECT_FALSE(chosen());
}

#endif

enum class Filling { kNormal, kFew, kZeros, kRising, kFalling, kSpecial, kMostlyNan };
constexpr std::array kFillings = {Filling::kNormal,   Filling::kFew,     Filling::kZeros,
                                  Filling::kRising,   Filling::kFalling, Filling::kSpecial,
                                  Filling::kMostlyNan};

struct Problem {
  DType dtype, out_dtype;
  std::int64_t m, n, d, k;
  bool transpose_b = true;
  bool smallest = true;
  std::size_t score = 7;  // An index into Scores().
  Filling filling = Filling::kNormal;
  std::uint64_t seed = 1;
};

class ProductTopKTest : public testing::Test {
 protected:
  void SetUp() override {
    TESSERA_NEED_DEVICE(Backend::kCuda);
    if (stream().device().info().compute_capability != 90) {
      if (GpuRequired()) FAIL() << "compute capability 9.0 is required";
      GTEST_SKIP() << "only compute capability 9.0";
    }
  }
  static Stream& stream() { return TestStream(Backend::kCuda); }

  template <class T>
  static std::vector<T> Fill(std::int64_t rows, std::int64_t columns, Filling filling,
                             Random& random) {
    std::vector<T> values(static_cast<std::size_t>(rows * columns));
    for (T& value : values) {
      double x = random.Normal();
      if (filling == Filling::kFew || filling == Filling::kRising || filling == Filling::kFalling)
        x = static_cast<double>(random.Bits() % 3) - 1;
      if (filling == Filling::kZeros) x = random.Bits() % 2 == 0 ? 0.0 : -0.0;
      value = T(static_cast<float>(x));
    }
    // A few special elements make whole rows and columns special.
    if (filling == Filling::kSpecial || filling == Filling::kMostlyNan) {
      const std::uint64_t every = filling == Filling::kSpecial ? 50 : 2;
      for (std::int64_t row = 0; row < rows; ++row) {
        if (random.Bits() % every != 0) continue;
        const double special[] = {kInfinity, -kInfinity, std::nan(""), 0};
        values[static_cast<std::size_t>(row * columns) +
               random.Bits() % static_cast<std::uint64_t>(columns)] =
            T(static_cast<float>(special[filling == Filling::kMostlyNan ? 2 : random.Bits() % 4]));
      }
    }
    return values;
  }

  template <class T>
  static std::vector<T> Transposed(const std::vector<T>& values, std::int64_t rows,
                                   std::int64_t columns, std::int64_t pitch) {
    std::vector<T> out(static_cast<std::size_t>(columns * pitch), T(1.0f));
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j)
        At(out, j * pitch + i) = At(values, i * columns + j);
    return out;
  }

  template <class T, class S>
  void Compare(const Problem& p) {
    SCOPED_TRACE(absl::StrCat(Absl(Name(p.dtype)), " to ", Absl(Name(p.out_dtype)), ", ", p.m,
                              " x ", p.n, " x ", p.d, ", k ", p.k, ", transposed ", p.transpose_b,
                              ", smallest ", p.smallest, ", score ", p.score, ", filling ",
                              static_cast<int>(p.filling), ", seed ", p.seed));
    Random random(p.seed);
    const std::int64_t pitch = (p.n + 7) / 8 * 8;
    const std::vector<T> host_a =
        Fill<T>(p.m, p.d, p.filling == Filling::kMostlyNan ? Filling::kNormal : p.filling, random);
    std::vector<T> host_b = Fill<T>(p.n, p.d, p.filling, random);
    if (!p.transpose_b) host_b = Transposed(host_b, p.n, p.d, pitch);
    std::vector<S> host_v(static_cast<std::size_t>(p.n));
    for (std::size_t j = 0; j < host_v.size(); ++j) {
      double x = random.Normal();
      if (p.filling == Filling::kFew) x = static_cast<double>(random.Bits() % 3);
      if (p.filling == Filling::kZeros) x = random.Bits() % 2 == 0 ? 0.0 : -0.0;
      if (p.filling == Filling::kRising) x = static_cast<double>(j) * 8;
      if (p.filling == Filling::kFalling) x = static_cast<double>(j) * -8;
      host_v[j] = S(static_cast<float>(x));
    }
    const DeviceArray<T> a(stream(), host_a), b(stream(), host_b);
    const DeviceArray<S> v(stream(), host_v);
    const Expression nodes = Scores()[p.score].first;
    const ArrayType type{p.out_dtype, MakeShape({p.m, p.n})};
    DeviceArray<S> scores(stream(), p.m * p.n), product(stream(), p.m * p.n);
    const std::vector<View> operands = {v.view(), WholeView(type, product.data())};
    const ProductTopK request{.a = a.view({p.m, p.d}),
                              .b = p.transpose_b
                                       ? b.view({p.n, p.d})
                                       : StridedView(b.data(), p.dtype, {p.d, p.n}, {pitch, 1}),
                              .transpose_b = p.transpose_b,
                              .out_dtype = p.out_dtype,
                              .expression = &nodes,
                              .operands = {operands.begin(), operands.end()},
                              .product = 1,
                              .k = p.k,
                              .smallest = p.smallest};
    const std::string matmul = absl::StrCat("tensor_", Absl(Name(p.dtype)));
    const ProductTopKStrategy* strategy = FindProductTopK(request, matmul, stream().device());
    ASSERT_NE(strategy, nullptr);

    DeviceArray<S> values(stream(), p.m * p.k), found_values(stream(), p.m * p.k);
    DeviceArray<std::int64_t> indices(stream(), p.m * p.k), found_indices(stream(), p.m * p.k);
    Get(RunMatmul(stream(), request.a, request.b, false, p.transpose_b, p.out_dtype, product.data(),
                  {.strategy = matmul}));
    Get(RunMap(stream(), operands, nodes, scores.data(), {}));
    Get(RunTopK(stream(), WholeView(type, scores.data()), p.k, 1, p.smallest, values.data(),
                indices.data(), {.strategy = "threshold"}));
    const auto stats = Get(RunProductTopK(stream(), request, *strategy, found_values.data(),
                                          found_indices.data(), {.timing = true}));
    EXPECT_EQ(stats.strategy, absl::StrCat(matmul, "_top_k"));
    EXPECT_GT(stats.kernel_us, 0);
    ASSERT_EQ(found_indices.Values(), indices.Values());
    const auto want = values.Values(), got = found_values.Values();
    for (std::size_t i = 0; i < want.size(); ++i)
      ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(S)), 0)
          << i << ": " << static_cast<float>(got[i]) << ", not " << static_cast<float>(want[i]);
  }

  void Compare(const Problem& p) {
    const auto with = [&]<class T>(T) {
      p.out_dtype == DType::kF32 ? Compare<T, float>(p) : Compare<T, T>(p);
    };
    p.dtype == DType::kBF16 ? with(BFloat16{}) : with(Half{});
  }
};

constexpr std::array kDTypes = {
    std::pair(DType::kBF16, DType::kF32), std::pair(DType::kBF16, DType::kBF16),
    std::pair(DType::kF16, DType::kF32), std::pair(DType::kF16, DType::kF16)};

TEST_F(ProductTopKTest, EveryScoreInBothOrders) {
  const std::int64_t n = WatchedClosely() ? 300 : 3000;
  for (const auto& [dtype, out_dtype] : kDTypes)
    for (std::size_t score = 0; score < Scores().size(); ++score)
      for (const bool smallest : {true, false})
        Compare({dtype, out_dtype, 130, n, 64, 10, score % 2 == 0, smallest, score});
}

TEST_F(ProductTopKTest, ShapesAroundTilesAndLists) {
  for (const std::int64_t m : {1, 16, 127, 129, 300})
    for (const std::int64_t n : {1, 7, 255, 256, 257, 2047, 5000})
      for (const std::int64_t d : {8, 64, 200})
        for (const std::int64_t k : {1, 31, 33, 128})
          if (k <= n && (!WatchedClosely() || (d == 8 && m * n <= 40000)))
            Compare({DType::kBF16, DType::kF32, m, n, d, k, (m + n + k) % 2 == 0, n % 2 == 0});
}

TEST_F(ProductTopKTest, EveryK) {
  for (std::int64_t k = 1; k <= 128; ++k)
    Compare({DType::kF16, DType::kF32, 33, 4100, 16, k, true, k % 2 == 0, 7,
             k % 3 == 0 ? Filling::kFew : Filling::kNormal});
}

TEST_F(ProductTopKTest, TiesSpecialValuesAndOrders) {
  for (const Filling filling : kFillings)
    for (const auto& [dtype, out_dtype] : kDTypes)
      for (const bool smallest : {true, false})
        for (const std::int64_t k : {1, 100})
          for (const std::size_t score : {0, 7, 10})
            Compare({dtype, out_dtype, 140, 6000, 24, k, k == 1, smallest, score, filling});
}

TEST_F(ProductTopKTest, ManyParts) {
  for (const std::int64_t m : {40, 1024})
    for (const std::int64_t k : {10, 100})
      for (const Filling filling : {Filling::kNormal, Filling::kFew, Filling::kFalling})
        Compare({DType::kBF16, DType::kF32, m, 100'003, 128, k, true, true, 7, filling});
  Compare({DType::kBF16, DType::kBF16, 17'500, 3000, 64, 20});
}

// A program has reserved this amount before it runs, and cannot get more.
TEST_F(ProductTopKTest, TakesTheScratchMemoryThatItSays) {
  constexpr std::int64_t kD = 64;
  for (const auto& [m, n, k] : {std::array<std::int64_t, 3>{1024, 300'000, 10},
                                {100, 1'000'000, 100},
                                {3000, 50'000, 128},
                                {40, 3000, 20}}) {
    SCOPED_TRACE(absl::StrCat(m, " x ", n, ", k = ", k));
    const DeviceArray<BFloat16> a(stream(), m * kD), b(stream(), n * kD);
    const DeviceArray<float> values(stream(), m * k);
    const DeviceArray<std::int64_t> indices(stream(), m * k);
    const ProductTopK request{
        .a = a.view({m, kD}), .b = b.view({n, kD}), .transpose_b = true, .k = k};
    const auto* strategy = FindProductTopK(request, "tensor_bf16", stream().device());
    ASSERT_NE(strategy, nullptr);
    // Arrays begin at multiples of 256 bytes.
    const std::uint64_t bytes =
        (ProductTopKScratch(request, *strategy, stream().device()) / 256 + 16) * 256;
    EXPECT_LT(bytes, static_cast<std::uint64_t>(m * n) * sizeof(float));
    const Limited own(Backend::kCuda, bytes);
    const ScratchMark begin = own.stream->MarkScratch();
    ASSERT_TRUE(Scratch(*own.stream, bytes).ok());
    own.stream->RewindScratch(begin);
    Get(RunProductTopK(*own.stream, request, *strategy, values.data(), indices.data(), {}));
  }
}

TEST_F(ProductTopKTest, RandomProblems) {
  Random random(20261128);
  const auto up_to = [&](std::int64_t most) {
    // Small numbers are as frequent as large ones.
    const double exponent = random.Uniform() * std::log2(static_cast<double>(most));
    return std::clamp<std::int64_t>(static_cast<std::int64_t>(std::exp2(exponent)), 1, most);
  };
  for (int i = 0; i < 250; ++i) {
    const auto& [dtype, out_dtype] = kDTypes[random.Bits() % kDTypes.size()];
    Problem p{dtype, out_dtype, up_to(700), up_to(20'000), 8 * up_to(40), 1};
    p.k = std::min(p.n, up_to(128));
    p.transpose_b = random.Bits() % 2 == 0;
    p.smallest = random.Bits() % 2 == 0;
    p.score = random.Bits() % Scores().size();
    p.filling = kFillings[random.Bits() % kFillings.size()];
    p.seed = random.Bits();
    Compare(p);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace tessera::test
