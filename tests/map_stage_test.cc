// Expressions before Reduce and after Matmul have the bits of two separate steps. Also tests bool.
#include <numeric>

#include "kernels/problem/matmul.h"
#include "kernels/run/fold_map_axes.h"
#include "kernels/run/operation.h"
#include "tests/expressions.h"

namespace tessera::test {
namespace {

const Nodes kWeighted = {In(0), In(1), Op(MapOp::kSubtract, {0, 1}), Op(MapOp::kMultiply, {2, 0})};
const Nodes kGreater = {In(0), In(1), Op(MapOp::kGreater, {0, 1})};
const Nodes kProduct = {In(0), In(1), Op(MapOp::kMultiply, {0, 1})};

struct Mapped {
  Memory memory;
  View view;
};
Mapped Map(Stream& stream, const std::vector<View>& operands, const Nodes& nodes) {
  const ArrayType type = Get(MapType(operands, nodes));
  Mapped mapped{*Allocate(stream.device(), std::max<std::uint64_t>(1, type.bytes())), {}};
  Get(RunMap(stream, operands, nodes, mapped.memory.data(), {}));
  mapped.view = WholeView(type, mapped.memory.data());
  return mapped;
}

std::vector<char> BytesOf(Stream& stream, const void* data, std::uint64_t size) {
  std::vector<char> bytes(static_cast<std::size_t>(size));
  EXPECT_TRUE(CopyToHost(stream, bytes.data(), data, bytes.size()).ok());
  return bytes;
}

// Returns the types and the bytes of an operation's results, or the reason of its error.
std::string OutcomeOf(const OperationSpec& spec, Stream& stream, const std::vector<View>& x) {
  const absl::StatusOr<ResultType> type = TypeOf(spec, x);
  if (!type.ok()) return ErrorReason(type.status());
  std::vector<Memory> memory;
  std::vector<Output> outputs;
  for (const ArrayType& array : type->arrays) {
    memory.push_back(*Allocate(stream.device(), array.bytes()));
    outputs.emplace_back(memory.back().data());
  }
  Get(tessera::Run(spec, stream, x, outputs, {}));
  std::string outcome;
  for (std::size_t i = 0; i < memory.size(); ++i) {
    const std::vector<char> bytes = BytesOf(stream, memory[i].data(), type->arrays[i].bytes());
    absl::StrAppend(&outcome, Absl(Name(type->arrays[i].dtype)), ToString(type->arrays[i].shape),
                    std::string(bytes.begin(), bytes.end()));
  }
  return outcome;
}

class ReduceStageTest : public StrategyTest<ReduceProblem> {
 protected:
  // Checks that both forms have the same bits or fail in the same way.
  void Compare(const View& x, const View& with, const Nodes& nodes = kWeighted,
               absl::Span<const ReduceOp> ops = kAllReduceOps) {
    Mapped mapped = Map(stream(), {x, with}, nodes);
    const MapStage stage{nodes, {&with, 1}};
    for (ReduceOp op : ops) {
      SCOPED_TRACE(testing::Message() << Name(op) << " of " << ToString(mapped.view.shape));
      const auto expected = RunReduce(stream(), mapped.view, op, options());
      const auto found = RunReduce(stream(), x, op, options(), &stage);
      EXPECT_EQ(ErrorReason(found.status()), ErrorReason(expected.status()));
      if (!found.ok() || !expected.ok()) continue;
      EXPECT_EQ(Bits(found), Bits(expected));
      EXPECT_EQ(found->integer, expected->integer);
      EXPECT_EQ(found->stats.strategy, GetParam().name);
      EXPECT_EQ(found->stats.roundoff, expected->stats.roundoff);
      if (mapped.view.elements() > 0) {
        EXPECT_GT(found->stats.flops, expected->stats.flops);
      }
    }
  }
};

TESSERA_STRATEGIES(ReduceStageTest, kDeterministic);

TESSERA_TYPED_TEST(ReduceStageTest, HasTheBitsOfMapAndReduce) {
  for (std::int64_t n : Sizes({0, 1, 33, 4099, 70001, (1 << 20) + 1})) {
    const DeviceArray<T> a(stream(), NormalVector<T>(n, 1)), b(stream(), NormalVector<T>(n, 2));
    Compare(a.view(), b.view());
  }
  if constexpr (std::is_same_v<T, float>) {
    // These are sums of finite elements whose partial sums exceed the range of f32.
    std::vector<float> values(5000, 3e38f);
    for (std::size_t i = 1; i < values.size(); i += 2) values[i] = -3e38f;
    const DeviceArray<float> a(stream(), values), one(stream(), std::vector<float>{1});
    Compare(a.view(), one.view(), kProduct, {ReduceOp::kSum, ReduceOp::kMean});
  }
}

TESSERA_TYPED_TEST(ReduceStageTest, TakesViewsThatAreBroadcast) {
  constexpr DType kDType = DTypeOf<T>();
  const std::int64_t rows = WatchedClosely() ? 7 : 701, columns = 53;
  const DeviceArray<T> a(stream(), NormalVector<T>(rows * columns, 1), 3);
  const DeviceArray<T> b(stream(), NormalVector<T>(rows + columns, 2), 1);
  const View row = StridedView(b.data(), kDType, {columns}, {1}),
             column = StridedView(b.data(), kDType, {rows, 1}, {1, 1});
  Compare(StridedView(a.data(), kDType, {rows, columns}, {columns, 1}), row);
  // Transposed, reversed, and broadcast along both axes.
  Compare(StridedView(a.data(), kDType, {columns, rows}, {1, columns}), b.view({columns, 1}));
  Compare(StridedView(a.data() + rows * columns - 1, kDType, {rows, columns}, {-columns, -1}),
          column);
  Compare(row, column);
  Compare(StridedView(a.data(), kDType, {5, 1, rows, columns / 2}, {0, 9, columns, 2}),
          StridedView(b.data(), kDType, {3, 1, 1}, {7, 1, 1}));
}

// Tests what a kernel may compute while it folds: broadcast operands, bool, and a value that is
// used later.
TESSERA_TYPED_TEST(ReduceStageTest, HasTheBitsOfChains) {
  constexpr DType kDType = DTypeOf<T>();
  const std::int64_t rows = WatchedClosely() ? 3 : 517, columns = 48;
  const DeviceArray<T> a(stream(), NormalVector<T>(rows * columns, 1)),
      b(stream(), NormalVector<T>(rows * columns, 2));
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(rows * columns));
  Random random(3);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.Bits() % 3 * 100);
  const DeviceArray<std::uint8_t> mask(stream(), bytes);
  const View whole = a.view({rows, columns}), row = b.view({columns}), column = b.view({rows, 1});
  for (const View& with : {b.view({rows, columns}), row, column, b.view({1})}) {
    Compare(whole, with);
    Compare(with, whole);
  }
  // Folds the middle axis of three, and only the outermost axis of a broadcast operand.
  Compare(a.view({3, rows / 3, columns}), b.view({rows / 3, 1}));
  Compare(row, column);
  // The expressions where(mask, a, mask), and (x a) b + x with x = a b.
  const Nodes masked = {In(0), In(1), Op(MapOp::kWhere, {1, 0, 1}), Op(MapOp::kMultiply, {2, 0})};
  Nodes waits = kProduct;
  waits.insert(waits.end(), {Op(MapOp::kMultiply, {2, 0}), Op(MapOp::kMultiply, {3, 1}),
                             Op(MapOp::kAdd, {4, 2})});
  for (const View& with : {StridedView(mask.data(), DType::kBool, {rows, columns}, {columns, 1}),
                           StridedView(mask.data(), DType::kBool, {columns}, {1}),
                           StridedView(mask.data(), DType::kBool, {rows, 1}, {1, 1})})
    Compare(whole, with, masked);
  Compare(whole, row, waits);
  // 16-bit elements together with f32 elements, and a result that is rounded to 16 bits.
  if constexpr (kDType == DType::kF32) {
    const DeviceArray<BFloat16> narrow(stream(), NormalVector<BFloat16>(rows * columns, 4));
    Compare(whole, narrow.view({columns}));
    Compare(whole, narrow.view({rows, 1}));
    Compare(narrow.view({rows, columns}), whole);
  }
  if constexpr (kDType == DType::kBF16) {
    const DeviceArray<float> wide(stream(), NormalVector<float>(rows * columns, 4));
    Nodes rounded = kWeighted;
    rounded.push_back(Op(MapOp::kCast, {3}, DType::kBF16));
    Compare(wide.view({rows, columns}), row, rounded);
  }
}

// Each operand counts once. A strategy that computes the expression's values as it folds neither
// stores nor reads them. Any other strategy takes scratch memory for them, writes them and reads
// them again.
TESSERA_TYPED_TEST(ReduceStageTest, AccountsForTheExpression) {
  constexpr std::int64_t n = 4096;
  const bool stores = !strategy().reads_views;
  const DeviceArray<T> a(stream(), NormalVector<T>(n, 1)), b(stream(), NormalVector<T>(n, 2));
  RunOptions check = options();
  check.check_only = true;
  const auto plain = Get(RunReduce(stream(), a.view(), ReduceOp::kSum, check));
  for (const std::int64_t other : {n, std::int64_t{1}}) {
    const View with = VectorView(b.data(), other);
    const MapStage stage{kWeighted, {&with, 1}};
    const auto found = Get(RunReduce(stream(), a.view(), ReduceOp::kSum, check, &stage));
    const std::uint64_t values = n * sizeof(T);
    EXPECT_EQ(found.stats.bytes, plain.stats.bytes + static_cast<std::uint64_t>(other) * sizeof(T) +
                                     (stores ? 2 * values : 0));
    EXPECT_EQ(found.stats.scratch_bytes, plain.stats.scratch_bytes + (stores ? values : 0));
  }
}

TESSERA_STRATEGY_SUITE(ReduceFusedStageTest, ReduceStageTest,
                       [](const auto& strategy, DType dtype) {
                         return strategy.name == "fixed_tree" && !IsInteger(dtype);
                       });

TESSERA_TYPED_TEST(ReduceFusedStageTest, TakesNoScratchMemoryForChains) {
  const Limited own(GetParam().backend, 1);
  const std::int64_t rows = 40, columns = 64;
  const DeviceArray<T> a(*own.stream, NormalVector<T>(rows * columns, 1));
  const View x = a.view({rows, columns});
  for (const View& with : {x, a.view({columns}), a.view({rows, 1}), a.view({1})}) {
    const MapStage stage{kWeighted, {&with, 1}};
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kNormL1, ReduceOp::kNormL2,
                        ReduceOp::kSumSquares, ReduceOp::kMin, ReduceOp::kMax}) {
      Get(RunReduce(*own.stream, x, op, options(), &stage));
    }
  }
  if constexpr (DTypeOf<T>() == DType::kF32) {
    const MapStage stage{kGreater, {&x, 1}};
    const auto found = Get(RunReduce(*own.stream, x, ReduceOp::kSum, options(), &stage));
    EXPECT_EQ(found.value.integer, 0);
  }
}

TESSERA_STRATEGY_SUITE(ReduceTruthStageTest, ReduceStageTest, kOf<DType::kI32>);

TEST_P(ReduceTruthStageTest, CountsWhatAnExpressionFindsTrue) {
  const std::int64_t n = std::min<std::int64_t>(Largest(), 300001);
  const auto values = NormalVector<float>(n, 1), others = NormalVector<float>(n, 2);
  const DeviceArray<float> a(stream(), values), b(stream(), others);
  std::int64_t count = 0;
  for (std::size_t i = 0; i < values.size(); ++i) count += values[i] > others[i];
  const View with = b.view();
  const MapStage stage{kGreater, {&with, 1}};
  const auto run = [&](ReduceOp op) {
    return RunReduce(stream(), a.view(), op, options(), &stage);
  };
  const auto sum = Get(run(ReduceOp::kSum)), mean = Get(run(ReduceOp::kMean));
  EXPECT_EQ(sum.value.integer, count);
  EXPECT_TRUE(sum.integer);
  EXPECT_EQ(mean.value.real, static_cast<double>(count) / static_cast<double>(n));
  EXPECT_FALSE(mean.integer);
  EXPECT_EQ(run(ReduceOp::kAny)->value.integer, count > 0);
  EXPECT_EQ(run(ReduceOp::kAll)->value.integer, count == n);
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kArgMax, ReduceOp::kProduct, ReduceOp::kNormL2})
    EXPECT_EQ(ErrorReason(run(op).status()), "BAD_DTYPE") << Name(op);
}

TESSERA_STRATEGY_SUITE(ReducePieceStageTest, ReduceStageTest,
                       [](const auto& strategy, DType dtype) {
                         return strategy.reads_views && dtype == DType::kF32;
                       });

TEST_P(ReducePieceStageTest, TakesScratchMemoryOfBoundedSize) {
  const Limited own(GetParam().backend, 4 << 20);
  const std::int64_t n = std::min<std::int64_t>(Largest(), 1 << 22);
  const DeviceArray<float> a(*own.stream, NormalVector<float>(n, 1));
  const View x = a.view();
  const MapStage stage{kWeighted, {&x, 1}};
  const auto zero = Get(RunReduce(*own.stream, x, ReduceOp::kNormL1, options(), &stage));
  EXPECT_EQ(zero.value.real, 0);
}

class ReduceAxesStageTest : public StrategyTest<ReduceAxesProblem> {
 protected:
  // staged_on: the stream for the reduction of the expression.
  void Compare(const View& x, const View& with, const std::vector<int>& axes,
               const Nodes& nodes = kWeighted, absl::Span<const ReduceOp> ops = kAllReduceOps,
               Stream& staged_on = stream()) {
    Mapped mapped = Map(stream(), {x, with}, nodes);
    const MapStage stage{nodes, {&with, 1}};
    for (ReduceOp op : ops) {
      SCOPED_TRACE(testing::Message() << Name(op) << " of " << ToString(mapped.view.shape)
                                      << " along " << testing::PrintToString(axes));
      const auto type = ReduceAxesType(mapped.view, op, axes, false);
      const auto staged = ReduceAxesType(x, op, axes, false, &stage);
      ASSERT_EQ(ErrorReason(staged.status()), ErrorReason(type.status()));
      if (!type.ok()) continue;
      EXPECT_EQ(staged->dtype, type->dtype);
      EXPECT_EQ(ToString(staged->shape), ToString(type->shape));
      const std::uint64_t bytes = std::max<std::uint64_t>(1, type->bytes());
      Memory one = *Allocate(stream().device(), bytes), two = *Allocate(stream().device(), bytes);
      EXPECT_TRUE(BeginRequest(staged_on).ok());
      Get(RunReduceAxes(stream(), mapped.view, op, axes, one.data(), options()));
      Get(RunReduceAxes(staged_on, x, op, axes, two.data(), options(), &stage));
      EXPECT_EQ(BytesOf(stream(), two.data(), type->bytes()),
                BytesOf(stream(), one.data(), type->bytes()));
    }
  }
};

TESSERA_STRATEGIES(ReduceAxesStageTest);

TESSERA_TYPED_TEST(ReduceAxesStageTest, HasTheBitsOfMapAndReduce) {
  constexpr DType kDType = DTypeOf<T>();
  const std::int64_t a = WatchedClosely() ? 3 : 29, b = 17, c = WatchedClosely() ? 5 : 101;
  const DeviceArray<T> x(stream(), NormalVector<T>(a * b * c, 1));
  const DeviceArray<T> y(stream(), NormalVector<T>(a * b, 2));
  const View whole = x.view({a, b, c});
  const View mirrored = StridedView(x.data() + c - 1, kDType, {a, b, c}, {b * c, c, -1});
  const View column = y.view({a, b, 1});
  for (const std::vector<int>& axes :
       {std::vector<int>{2}, {1}, {0}, {0, 2}, {1, 2}, {0, 1, 2}, {-3, -2}}) {
    Compare(whole, column, axes);
    Compare(mirrored, y.view({b, 1}), axes);
  }
  // A broadcast operand is folded as many times as it is repeated.
  Compare(column, y.view({c}), {1});
  Compare(x.view({0, b, c}), y.view({b, 1}), {0});
  Compare(x.view({a, b, 0}), column, {2});
}

// The values of one piece are written and read again, like any other values.
TESSERA_TYPED_TEST(ReduceAxesStageTest, AccountsForTheExpression) {
  constexpr std::int64_t kRows = 4, kColumns = 64;
  const DeviceArray<T> a(stream(), NormalVector<T>(kRows * kColumns, 1)),
      b(stream(), NormalVector<T>(kColumns, 2));
  const View x = a.view({kRows, kColumns}), with = b.view();
  const MapStage stage{kWeighted, {&with, 1}};
  RunOptions check = options();
  check.check_only = true;
  const auto plain = Get(RunReduceAxes(stream(), x, ReduceOp::kSum, {1}, nullptr, check));
  const auto found = Get(RunReduceAxes(stream(), x, ReduceOp::kSum, {1}, nullptr, check, &stage));
  constexpr std::uint64_t kValues = kRows * kColumns * sizeof(T);
  EXPECT_EQ(found.bytes, plain.bytes + 2 * kValues + kColumns * sizeof(T));
  EXPECT_EQ(found.scratch_bytes, plain.scratch_bytes + kValues);
}

TESSERA_STRATEGY_SUITE(ReduceAxesPieceStageTest, ReduceAxesStageTest, kOf<DType::kF32>);

// A piece takes at most a quarter of the scratch memory. Some values exceed the range of f32.
TEST_P(ReduceAxesPieceStageTest, FoldsInPieces) {
  const std::int64_t rows = std::min<std::int64_t>(Largest() / 64, 40000), length = 64;
  const Limited own(GetParam().backend, 4 << 20);
  std::vector<float> values = NormalVector<float>(rows * length, 1);
  for (std::size_t i = 0; i < 64; i += 1) values[i] = i % 2 == 0 ? 3e38f : -3e38f;
  values[1] = values[3] = 0;
  const DeviceArray<float> a(stream(), values), one(stream(), std::vector<float>{1});
  Compare(a.view({rows, length}), one.view(), {1}, kProduct,
          {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax}, *own.stream);
}

// Without pieces, a few columns are folded at a time. Most sums are exact.
TEST_P(ReduceAxesPieceStageTest, FoldsColumnsOfWhatDoesNotFit) {
  constexpr std::int64_t kDepth = 3, kColumns = 21;
  const std::int64_t rows = std::min<std::int64_t>(Largest() / 64, 40000), row = kDepth * kColumns;
  const Limited own(GetParam().backend, 4 << 20);  // Scratch memory for 10 MB of values.
  std::vector<float> values(static_cast<std::size_t>(rows * row));
  Random random(5);
  for (float& value : values) value = static_cast<float>(random.Bits() % 17);
  for (std::int64_t i = 0; i < rows; ++i)
    At(values, i * row) = i > 3 ? 0.0f : i < 2 ? 3e38f : -3e38f;
  const DeviceArray<float> a(stream(), values), b(stream(), std::vector<float>{2, 3, 1});
  // Every row is reversed, and each of the three inner elements has its own factor.
  const View x =
      StridedView(a.data() + row - 1, DType::kF32, {rows, kColumns, kDepth}, {row, -kDepth, -1});
  Compare(x, b.view(), {0}, kProduct, {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kArgMin},
          *own.stream);
}

// Uses a strategy similar to those for GPUs. Each launch takes scratch memory, much more for many
// columns, and the error bound is larger for few columns. The statistics describe what is launched,
// and launches leave nothing behind.
TEST(ReduceAxesColumnsTest, AreFoldedAndAccountedForPartByPart) {
  constexpr std::int64_t kRows = 4096, kColumns = 600;  // 18 parts of 32 columns, and one of 24.
  constexpr std::uint64_t kTaken = 768 << 10;
  static const auto& of_cpu =
      StrategyOf<ReduceAxesProblem>({"cpu_axis", Backend::kCpu, DType::kF32});
  Strategy<ReduceAxesProblem> strategy = of_cpu;
  strategy.scratch = [](const ReduceAxesProblem& p) {
    return p.inner > 32 ? 100 * kTaken : kTaken;
  };
  strategy.roundoff = [](const ReduceAxesProblem& p) { return 1 / static_cast<double>(p.inner); };
  strategy.cost = [](const ReduceAxesProblem& p) {
    return Cost{.bytes = p.inner == 32 ? 1000u : 1u, .flops = 0, .atomics = 0, .depth = 0};
  };
  strategy.launch = [](const ReduceAxesProblem& p, Stream& on) {
    std::memset(on.Scratch(kTaken), 0xff, kTaken);
    of_cpu.launch(p, on);
  };
  Limited own(Backend::kCpu, 4 << 20);  // Values take 10 MB, and launches 14 MB.
  const std::vector<float> ones(static_cast<std::size_t>(kRows * kColumns), 1), factor = {2};
  std::vector<float> sums(static_cast<std::size_t>(kColumns));
  const View x = StridedView(ones.data(), DType::kF32, {kRows, kColumns}, {kColumns, 1});
  const View with = VectorView(factor.data(), 1);
  const MapStage stage{kProduct, {&with, 1}};
  const auto staged = Get(StageReduce(x, &stage));
  MapProblem& map = (staged)->problem();
  ReduceAxesProblem problem{.outer = 1, .length = kRows, .inner = kColumns, .out = sums.data()};
  const FoldMapAxes work(map, *own.stream, problem, /*first_inner=*/1);
  Get(WithinLimit(&strategy, problem, /*named=*/true, nullptr, *own.stream, work));
  Stats stats = StatsOf(strategy, problem);
  work.Account(strategy, stats);
  EXPECT_EQ(stats.roundoff, 1 / 24.0);
  EXPECT_EQ(stats.bytes, 18001 + sizeof(float))
      << "x, in place of the map's values, and the factor";
  EXPECT_NO_THROW(work.Launch(*own.stream, problem, strategy));
  EXPECT_LE(own.budget.used(), 2 << 20);
  EXPECT_EQ(sums, std::vector<float>(static_cast<std::size_t>(kColumns), 2 * kRows));
  ASSERT_TRUE(EndRequest(*own.stream).ok());
}

class MatmulStageTest : public StrategyTest<MatmulProblem> {};

TESSERA_STRATEGIES(MatmulStageTest, kDeterministic);

TESSERA_TYPED_TEST(MatmulStageTest, HasTheBitsOfMatmulAndMap) {
  // The expression where(c + bias > residual, c, 0) as F16, and its condition only.
  Nodes chosen = {In(0), In(1), In(2), Op(MapOp::kAdd, {0, 1}), Op(MapOp::kGreater, {3, 2})};
  const Nodes whether = chosen;
  chosen.push_back(Op(MapOp::kWhere, {4, 0, 1}));
  chosen.push_back(Op(MapOp::kCast, {5}, DType::kF16));
  constexpr DType kDType = DTypeOf<T>();
  for (const auto& [m, n, k] : std::vector<std::array<std::int64_t, 3>>{
           {1, 1, 1}, {33, 65, 17}, {128, 64, 32}, {0, 5, 3}, {5, 7, 0}}) {
    const DeviceArray<T> a(stream(), NormalVector<T>(m * k, 1)),
        b(stream(), NormalVector<T>(k * n, 2)), bias(stream(), NormalVector<T>(n + m * n, 3));
    const View left = a.view({m, k}), right = b.view({k, n});
    const View with[] = {VectorView(bias.data(), n),
                         StridedView(bias.data() + n, kDType, {m, n}, {n, 1})};
    for (const Nodes& nodes : {chosen, whether}) {
      const MapStage stage{nodes, with};
      const auto multiply = [&](void* out, const MapStage* then, bool check_only = false) {
        RunOptions how = options();
        how.check_only = check_only;
        return RunMatmul(stream(), left, right, false, false, kDType, out, how, then);
      };
      const auto product = Get(MatmulType(left, right, false, false, kDType));
      Memory c = *Allocate(stream().device(), product.bytes() + 1);
      const auto plain = multiply(c.data(), nullptr);
      const auto type = Get(MatmulType(left, right, false, false, kDType, &stage));
      EXPECT_EQ(type.dtype, nodes.size() > 5 ? DType::kF16 : DType::kBool);
      Memory out = *Allocate(stream().device(), type.bytes() + 1);
      const auto found = multiply(out.data(), &stage);
      ASSERT_EQ(ErrorReason(found.status()), ErrorReason(plain.status())) << found.status();
      if (!found.ok()) continue;
      EXPECT_EQ(found->strategy, plain->strategy);
      // The product is written once and read once, in addition to the cost of the step itself.
      if (m * n > 0) {
        EXPECT_EQ(found->bytes, plain->bytes + product.bytes() + type.bytes() +
                                    static_cast<std::uint64_t>(n + m * n) * sizeof(T));
      }
      EXPECT_EQ(Get(multiply(nullptr, &stage, true)).scratch_bytes,
                Get(multiply(nullptr, nullptr, true)).scratch_bytes + product.bytes());
      Mapped mapped = Map(stream(), {WholeView(product, c.data()), with[0], with[1]}, nodes);
      EXPECT_EQ(BytesOf(stream(), out.data(), type.bytes()),
                BytesOf(stream(), mapped.view.data, type.bytes()))
          << m << " " << n << " " << k;
    }
  }
}

class StageTest : public BackendTest {};

TEST_P(StageTest, RefusesWhatDoesNotGoTogether) {
  const View x = WholeView({DType::kF32, MakeShape({4, 3})}, nullptr);
  const View bad = WholeView({DType::kF32, MakeShape({2})}, nullptr);
  const View wide = WholeView({DType::kF32, MakeShape({2, 4, 4})}, nullptr);
  const RunOptions options{.check_only = true};
  const auto sum = [&](const MapStage& stage) {
    return RunReduce(stream(), x, ReduceOp::kSum, options, &stage).status();
  };
  const Nodes both = {In(0), In(1), Op(MapOp::kAdd, {0, 1})};
  EXPECT_EQ(ErrorReason(sum({both, {&bad, 1}})), "BAD_SHAPE");
  EXPECT_EQ(ErrorMetadata(sum({both, {&bad, 1}}))["operand"], "with[0]");
  EXPECT_EQ(ErrorReason(sum({both, {}})), "BAD_EXPRESSION");
  EXPECT_EQ(ErrorMetadata(sum({both, {}}))["node"], "1");
  EXPECT_EQ(ErrorReason(sum({{}, {&x, 1}})), "BAD_EXPRESSION");
  const std::vector<View> many(8, x);
  EXPECT_EQ(ErrorReason(sum({both, many})), "BAD_EXPRESSION");
  EXPECT_TRUE(sum({both, {&x, 1}}).ok());

  const MapStage stage{both, {&wide, 1}};
  const absl::Status status = MatmulType(x, x, false, true, DType::kF32, &stage).status();
  EXPECT_EQ(ErrorReason(status), "BAD_SHAPE");
  EXPECT_EQ(ErrorMetadata(status)["operand"], "with[0]");
  const View narrow = WholeView({DType::kF32, MakeShape({4, 1})}, nullptr);
  const MapStage fits{both, {&narrow, 1}};
  EXPECT_TRUE(MatmulType(x, x, false, true, DType::kF32, &fits).ok());
}

TEST_P(StageTest, ScansAndSortsHaveTheBitsOfTwoSteps) {
  for (DType dtype : kAllDTypes) {
    DispatchDType(dtype, [&]<class T>(T) {
      const std::int64_t rows = WatchedClosely() ? 3 : 101, columns = 53;
      const DeviceArray<T> a(stream(), NormalVector<T>(rows * columns, 1), 3),
          b(stream(), NormalVector<T>(rows + columns, 2), 1);
      const View x = a.view({rows, columns}), row = b.view({columns}), column = b.view({rows, 1});
      const View turned = StridedView(a.data(), dtype, {columns, rows}, {1, columns});
      // Some operands are read again and again, among them x itself.
      for (const std::vector<View>& operands : {std::vector<View>{x, row},
                                                {x, column},
                                                {x, b.view({1})},
                                                {turned, b.view({rows})},
                                                {row, column}}) {
        for (const Nodes& nodes : {kWeighted, kGreater}) {
          const Mapped mapped = Map(stream(), operands, nodes);
          const auto compare = [&](const OperationSpec& second, const OperationSpec& both) {
            EXPECT_TRUE(OutcomeOf(both, stream(), operands) ==
                        OutcomeOf(second, stream(), {mapped.view}));
          };
          for (int axis : {0, 1}) {
            SCOPED_TRACE(testing::Message() << Name(dtype) << ToString(mapped.view.shape)
                                            << " axis " << axis << " nodes " << nodes.size());
            for (ReduceOp op : kAllReduceOps) {
              const bool exclusive = op == ReduceOp::kMin;
              compare(
                  ScanSpec{.op = op, .axis = axis, .exclusive = exclusive},
                  ScanSpec{.op = op, .axis = axis, .exclusive = exclusive, .expression = nodes});
            }
            for (bool descending : {false, true})
              compare(SortSpec{.axis = axis, .descending = descending},
                      SortSpec{.axis = axis, .descending = descending, .expression = nodes});
          }
        }
      }
    });
  }
}

// sort_test checks sorted bytes, which keep their type.
TEST_P(StageTest, ScansOfBytesAreThoseOfI32) {
  using R = ReduceOp;
  constexpr std::int64_t kRows = 17, kColumns = 59, n = kRows * kColumns;
  std::vector<std::uint8_t> bytes(n);
  Random random(4);
  for (DType dtype : {DType::kBool, DType::kU8, DType::kI8}) {
    SCOPED_TRACE(Name(dtype));
    for (std::uint8_t& byte : bytes)
      byte = static_cast<std::uint8_t>(random.Bits() & (dtype == DType::kBool ? 1 : 255));
    const DeviceArray<std::uint8_t> array(stream(), bytes, 1);
    const View x = StridedView(array.data(), dtype, {kRows, kColumns}, {kColumns, 1});
    const DeviceArray<std::int32_t> wide(stream(), n);
    ASSERT_TRUE(RunCopy(stream(), x, DType::kI32, wide.data()).ok());
    for (R op : {R::kSum, R::kProduct, R::kMin, R::kMax, R::kAll, R::kAny}) {
      const bool refused =
          dtype == DType::kBool && (op == R::kProduct || op == R::kMin || op == R::kMax);
      for (bool exclusive : {false, true}) {
        const OperationSpec spec =
            ScanSpec{.op = op, .axis = 0, .exclusive = exclusive, .reverse = !exclusive};
        const std::string want =
            refused ? "BAD_DTYPE" : OutcomeOf(spec, stream(), {wide.view({kRows, kColumns})});
        EXPECT_TRUE(OutcomeOf(spec, stream(), {x}) == want) << Name(op);
      }
    }
  }
}

TEST_P(StageTest, OtherOperationsRefuseElementsOfAByte) {
  const RunOptions options{.check_only = true};
  for (DType dtype : {DType::kBool, DType::kU8, DType::kI8}) {
    SCOPED_TRACE(Name(dtype));
    const View x = WholeView({dtype, MakeShape({4, 4})}, nullptr);
    const View row = WholeView({dtype, MakeShape({4})}, nullptr);
    EXPECT_EQ(ErrorReason(RunDot(stream(), x, x, options).status()), "BAD_DTYPE");
    EXPECT_EQ(ErrorReason(RunAdd(stream(), x, x, nullptr, options).status()), "BAD_DTYPE");
    EXPECT_EQ(
        ErrorReason(tessera::Run(WindowSumSpec{1}, stream(), {row}, {nullptr}, options).status()),
        "BAD_DTYPE");
    EXPECT_EQ(ErrorReason(RunTopK(stream(), x, 1, 0, false, nullptr, nullptr, options).status()),
              "BAD_DTYPE");
    EXPECT_EQ(ErrorReason(MatmulType(x, x, false, false, dtype).status()), "BAD_DTYPE");
    EXPECT_EQ(ErrorReason(RunReduce(stream(), x, ReduceOp::kMax, options).status()),
              dtype == DType::kBool ? "BAD_DTYPE" : "");
    EXPECT_FALSE(FitsBatch(row));
  }
}

// Tests all one-byte integers, with every strategy, in expressions, casts and reductions.
TEST_P(StageTest, ComputesWithIntegersOfAByte) {
  constexpr std::int64_t n = 4099;
  std::vector<std::uint8_t> a(n);
  std::vector<std::int8_t> b(n);
  std::vector<float> c(n);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<std::uint8_t>(i);
    b[i] = static_cast<std::int8_t>(i / 256 * 37 + i);
    c[i] = static_cast<float>(i % 19) * 0.25f;
  }
  // Arrays that begin at multiples of 16 bytes, and arrays that do not.
  for (std::size_t offset : {0, 1}) {
    const DeviceArray<std::uint8_t> da(stream(), a, offset);
    const DeviceArray<std::int8_t> db(stream(), b, offset);
    const DeviceArray<float> dc(stream(), c, offset);
    const std::vector<View> views = {da.view(), db.view(), dc.view()};
    for (const Strategy<MapProblem>* strategy : Strategies<MapProblem>()) {
      if (strategy->backend != GetParam()) continue;
      SCOPED_TRACE(strategy->name);
      const auto check = [&]<class T>(Nodes nodes, T, auto want) {
        nodes.insert(nodes.begin(), {In(0), In(1), In(2)});
        const auto type = Get(MapType(views, nodes));
        ASSERT_EQ(type.dtype, DTypeOf<T>());
        DeviceArray<T> out(stream(), std::vector<T>(n), offset);
        Get(RunMap(stream(), views, nodes, out.data(), {.strategy = strategy->name}));
        const std::vector<T> found = out.Values();
        for (std::size_t i = 0; i < a.size(); ++i)
          ASSERT_EQ(Exact(found[i]), Exact(static_cast<T>(want(i)))) << i;
      };
      check({In(0)}, std::uint8_t{}, [&](std::size_t i) { return a[i]; });
      check({In(1)}, std::int8_t{}, [&](std::size_t i) { return b[i]; });
      check({Op(MapOp::kMultiply, {0, 1})}, std::int32_t{},
            [&](std::size_t i) { return a[i] * b[i]; });
      check({Op(MapOp::kAdd, {0, 0}), Op(MapOp::kCast, {3}, DType::kU8)}, std::uint8_t{},
            [&](std::size_t i) { return std::min(2 * a[i], 255); });
      check({Op(MapOp::kSubtract, {1, 0}), Op(MapOp::kCast, {3}, DType::kI8)}, std::int8_t{},
            [&](std::size_t i) { return std::max(b[i] - a[i], -128); });
      check({Op(MapOp::kCast, {1}, DType::kU8)}, std::uint8_t{},
            [&](std::size_t i) { return std::max<int>(b[i], 0); });
      check({Op(MapOp::kMultiply, {0, 2})}, float{},
            [&](std::size_t i) { return static_cast<float>(a[i]) * c[i]; });
      check(
          {Op(MapOp::kMultiply, {1, 2}), Op(MapOp::kCast, {3}, DType::kU8)}, std::uint8_t{},
          [&](std::size_t i) { return std::clamp(static_cast<float>(b[i]) * c[i], 0.0f, 255.0f); });
      check({Op(MapOp::kLess, {0, 1}), Op(MapOp::kWhere, {3, 0, 1}),
             Op(MapOp::kCast, {4}, DType::kF64)},
            double{}, [&](std::size_t i) { return std::min<int>(a[i], b[i]); });
    }
    std::int64_t sum = 0;
    for (std::int8_t x : b) sum += x;
    const auto reduce = [&](ReduceOp op) {
      return Get(RunReduce(stream(), views[1], op, {})).value;
    };
    EXPECT_EQ(reduce(ReduceOp::kSum).integer, sum);
    EXPECT_EQ(reduce(ReduceOp::kMean).real, static_cast<double>(sum) / n);
    EXPECT_EQ(reduce(ReduceOp::kMin).integer, -128);
    EXPECT_EQ(reduce(ReduceOp::kMax).integer, 127);
    EXPECT_EQ(reduce(ReduceOp::kArgMax).index, std::max_element(b.begin(), b.end()) - b.begin());
    const View square = da.view({64, 64});
    EXPECT_EQ(ReduceAxesType(square, ReduceOp::kMax, {1}, false)->dtype, DType::kI32);
    DeviceArray<std::int32_t> most(stream(), 64);
    ASSERT_TRUE(RunReduceAxes(stream(), square, ReduceOp::kMax, {1}, most.data(), {}).ok());
    const std::vector<std::int32_t> found = most.Values();
    for (std::size_t i = 0; i < 64; ++i)
      EXPECT_EQ(found[i], *std::max_element(a.begin() + i * 64, a.begin() + (i + 1) * 64));
  }
}

// Bytes other than 0 and 1 count as true, wherever they are read.
TEST_P(StageTest, ReadsAnyByteButZeroAsTrue) {
  constexpr std::int64_t kRows = 17, kColumns = 59, n = kRows * kColumns;
  std::vector<std::uint8_t> bytes(n);
  std::iota(bytes.begin(), bytes.end(), std::uint8_t{0});
  std::vector<std::uint8_t> truth, negated;
  std::vector<std::int64_t> counts(kColumns);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    truth.push_back(bytes[i] != 0);
    negated.push_back(bytes[i] == 0);
    counts[i % kColumns] += bytes[i] != 0;
  }
  const DeviceArray<std::uint8_t> array(stream(), bytes);
  const View x = StridedView(array.data(), DType::kBool, {kRows, kColumns}, {kColumns, 1});
  const auto sum = Get(RunReduce(stream(), x, ReduceOp::kSum, {}));
  EXPECT_EQ(sum.value.integer, std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
  DeviceArray<std::int64_t> sums(stream(), kColumns);
  ASSERT_TRUE(RunReduceAxes(stream(), x, ReduceOp::kSum, {0}, sums.data(), {}).ok());
  EXPECT_EQ(sums.Values(), counts);
  EXPECT_EQ(ErrorReason(ReduceAxesType(x, ReduceOp::kMax, {0}, false).status()), "BAD_DTYPE");
  for (const Strategy<MapProblem>* strategy : Strategies<MapProblem>()) {
    if (strategy->backend != GetParam()) continue;
    SCOPED_TRACE(strategy->name);
    const RunOptions options{.strategy = strategy->name};
    DeviceArray<std::uint8_t> out(stream(), n);
    ASSERT_TRUE(RunMap(stream(), {x}, {In(0)}, out.data(), options).ok());
    EXPECT_EQ(out.Values(), truth);
    ASSERT_TRUE(RunMap(stream(), {x}, {In(0), Op(MapOp::kNot, {0})}, out.data(), options).ok());
    EXPECT_EQ(out.Values(), negated);
  }
}

TEST_P(StageTest, CopiesConvertTruthValues) {
  const std::vector<float> values = {0.0f, -0.0f, 1.0f, 0.25f, -3.0f, NAN, INFINITY, 1e-45f};
  const std::vector<std::uint8_t> truth = {0, 0, 1, 1, 1, 1, 1, 1};
  const DeviceArray<float> x(stream(), values);
  DeviceArray<std::uint8_t> out(stream(), 8);
  ASSERT_TRUE(RunCopy(stream(), x.view(), DType::kBool, out.data()).ok());
  EXPECT_EQ(out.Values(), truth);
  // The view is reversed, so it is gathered first.
  const View backwards = StridedView(x.data() + 7, DType::kF32, {8}, {-1});
  ASSERT_TRUE(RunCopy(stream(), backwards, DType::kBool, out.data()).ok());
  EXPECT_EQ(out.Values(), std::vector<std::uint8_t>(truth.rbegin(), truth.rend()));
  const View bits{out.data(), DType::kBool, MakeShape({8}), {1}};
  for (DType dtype : kAllDTypes) {
    DispatchDType(dtype, [&]<class T>(T) {
      DeviceArray<T> numbers(stream(), 8);
      ASSERT_TRUE(RunCopy(stream(), bits, dtype, numbers.data()).ok());
      const std::vector<T> found = numbers.Values();
      for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(Exact(found[i]), truth[7 - i]) << Name(dtype);
    });
  }
  DeviceArray<std::uint8_t> turned(stream(), 8);
  const View columns = StridedView(out.data(), DType::kBool, {4, 2}, {1, 4});
  ASSERT_TRUE(RunCopy(stream(), columns, DType::kBool, turned.data()).ok());
  const std::vector<std::uint8_t> flat = out.Values();
  EXPECT_EQ(turned.Values(), (std::vector<std::uint8_t>{flat[0], flat[4], flat[1], flat[5], flat[2],
                                                        flat[6], flat[3], flat[7]}));
}

TESSERA_BACKENDS(StageTest);

}  // namespace
}  // namespace tessera::test
