// The kernels that Map compiles at run time give the same bits as the strategy `fused`.
#include <chrono>

#include "kernels/cuda/compile/compiler.h"
#include "kernels/expression/map_math.h"
#include "tests/expressions.h"

namespace tessera::test {
namespace {

using compiled::CompileBeforeUse;
using Bytes = std::vector<std::uint8_t>;

// Returns that many elements of the type, including special ones.
Bytes AnyElements(DType dtype, std::int64_t n, Random& random) {
  Bytes bytes(static_cast<std::size_t>(n) * SizeOf(dtype));
  DispatchElement(dtype, [&](auto t) {
    using T = StoredOf<decltype(t)>;
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      T element{};
      if constexpr (sizeof(T) == 1) {
        element = static_cast<T>(random.Bits());
      } else if constexpr (std::is_integral_v<T>) {
        element = Below(random, 4) == 0 ? static_cast<T>(random.Bits())
                                        : static_cast<T>(Below(random, 9)) - 4;
      } else {
        using V = ValueOf<T>;
        constexpr V kTiny = std::numeric_limits<V>::denorm_min();
        constexpr V kMost = std::numeric_limits<V>::max(), kInf = static_cast<V>(kInfinity);
        const V special[] = {0, V(-0.0), kInf, -kInf, kInf - kInf, kTiny, kMost, -1};
        element = static_cast<T>(Below(random, 5) == 0 ? special[Below(random, std::size(special))]
                                                       : static_cast<V>(3 * random.Normal()));
      }
      std::memcpy(&bytes[i * sizeof(T)], &element, sizeof(T));
    }
  });
  return bytes;
}

// Returns an operand of an expression over [outer, rows, columns]: `array` as it is, a part of it
// that is broadcast along some axes, or `array` with its axes in any order and direction.
View AnyView(DType dtype, const std::uint8_t* array, std::array<std::int64_t, 3> shape,
             Random& random) {
  if (Below(random, 2) == 0) {
    for (std::int64_t& extent : shape)
      if (Below(random, 3) == 0) extent = 1;
    return WholeView({dtype, MakeShape({shape[0], shape[1], shape[2]})}, array);
  }
  std::array<std::size_t, 3> order = {0, 1, 2};
  for (std::uint32_t i = 0; i < 2; ++i) std::swap(order[i], order[i + Below(random, 3 - i)]);
  std::array<std::int64_t, 3> strides{};
  std::int64_t stride = 1;
  for (std::size_t axis : order) {
    strides[axis] = stride;
    stride *= shape[axis];
    if (Below(random, 4) != 0) continue;
    array += strides[axis] * (shape[axis] - 1) * static_cast<std::int64_t>(SizeOf(dtype));
    strides[axis] = -strides[axis];
  }
  return StridedView(array, dtype, {shape[0], shape[1], shape[2]},
                     {strides[0], strides[1], strides[2]});
}

class CompiledTest : public testing::Test {
 protected:
  void SetUp() override { TESSERA_NEED_DEVICE(Backend::kCuda); }
  void TearDown() override { CompileBeforeUse(false); }

  // All NaNs are returned as the same one, because their sign and payload are not promised.
  static Bytes Run(Stream& stream, std::string_view strategy, const std::vector<View>& views,
                   const Nodes& nodes, std::size_t offset = 0) {
    const ArrayType type = Get(MapType(views, nodes));
    DeviceArray<std::uint8_t> out(stream, Bytes(type.bytes(), 0xaa), offset * SizeOf(type.dtype));
    Get(RunMap(stream, views, nodes, out.data(), {.strategy = strategy}));
    Bytes values = out.Values();
    DispatchElement(type.dtype, [&](auto t) {
      using T = StoredOf<decltype(t)>;
      if constexpr (std::is_floating_point_v<ValueOf<T>>) {
        for (std::size_t i = 0; i < values.size(); i += sizeof(T)) {
          T element;
          std::memcpy(&element, &values[i], sizeof element);
          if (std::isnan(static_cast<ValueOf<T>>(element)))
            std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(i), sizeof element, 0xff);
        }
      }
    });
    return values;
  }
  static void Compare(Stream& stream, const std::vector<View>& views, const Nodes& nodes,
                      std::size_t offset = 0) {
    EXPECT_EQ(Run(stream, "compiled", views, nodes, offset), Run(stream, "fused", views, nodes));
  }

  // The operands of an expression over [outer, rows, columns]. They are whole arrays. If `any` is
  // set, they may begin at any element and are views from AnyView.
  struct Operands {
    Operands(Stream& stream, const DrawnExpression& e, std::array<std::int64_t, 3> shape,
             Random& random, bool any) {
      const std::int64_t n = shape[0] * shape[1] * shape[2];
      arrays.reserve(e.dtypes.size());
      for (DType dtype : e.dtypes) {
        const std::size_t offset = any && Below(random, 3) == 0 ? SizeOf(dtype) : 0;
        arrays.emplace_back(stream, AnyElements(dtype, n, random), offset);
        views.push_back(any ? AnyView(dtype, arrays.back().data(), shape, random)
                            : WholeView({dtype, MakeShape({n})}, arrays.back().data()));
      }
    }
    std::vector<DeviceArray<std::uint8_t>> arrays;
    std::vector<View> views;
  };
};

TEST_F(CompiledTest, RandomExpressionsHaveTheBitsOfFused) {
  CompileBeforeUse(true);
  Stream& stream = TestStream(Backend::kCuda);
  Random random(2);
  const int rounds = WatchedClosely() ? 20 : 400;
  const std::int64_t before = compiled::Launches();
  for (int round = 0; round < rounds; ++round) {
    const DrawnExpression e = AnyExpression(random);
    const std::int64_t columns =
        Below(random, 2) == 0 ? 16 * (1 + Below(random, 9)) : 1 + Below(random, 100);
    const std::int64_t rows = 1 + Below(random, 20), outer = 1 + Below(random, 3);
    const Operands operands(stream, e, {outer, rows, columns}, random, /*any=*/true);
    SCOPED_TRACE(round);
    Compare(stream, operands.views, e.nodes, Below(random, 4) == 0 ? 1 : 0);
    if (HasFailure()) return;
  }
  EXPECT_EQ(compiled::Launches() - before, rounds);
}

TEST_F(CompiledTest, TextsThatWouldTakeTheCompilerMinutesAreLeftToFused) {
  CompileBeforeUse(true);
  Stream& stream = TestStream(Backend::kCuda);
  Random random(7);
  DeviceArray<std::uint8_t> array(stream, AnyElements(DType::kU8, 300, random));
  const View x = WholeView({DType::kU8, MakeShape({300})}, array.data());
  Nodes nodes = {In(0), Op(MapOp::kCast, {0}, DType::kF64), Real(3)};
  while (nodes.size() + 1 < kMostNodes)
    nodes.push_back(Op(MapOp::kFloorDivide, {static_cast<std::uint32_t>(nodes.size() - 1), 1}));
  nodes.push_back(Op(MapOp::kLess, {static_cast<std::uint32_t>(nodes.size() - 1), 2}));
  const std::int64_t before = compiled::Launches();
  Compare(stream, {x}, nodes);
  EXPECT_EQ(compiled::Launches(), before);
}

// A process keeps 1024 kernels. Here 1025 others are compiled and replace the first one, which is
// then compiled again.
TEST_F(CompiledTest, NewKernelsReplaceThoseUsedLongestAgo) {
  if (WatchedClosely()) return;
  CompileBeforeUse(true);
  Stream& stream = TestStream(Backend::kCuda);
  Random random(9);
  DeviceArray<std::uint8_t> array(stream, AnyElements(DType::kF32, 300, random));
  const View x = WholeView({DType::kF32, MakeShape({300})}, array.data());
  const auto nodes = [](std::uint32_t number) {
    Nodes chain = {In(0)};
    for (std::uint32_t bit = 0; bit < 11; ++bit)
      chain.push_back(Op((number >> bit & 1) == 0 ? MapOp::kAbs : MapOp::kNegate, {bit}));
    chain.push_back(Op(MapOp::kExp, {11}));
    return chain;
  };
  const std::int64_t before = compiled::Launches();
  for (std::uint32_t number = 0; number <= 1025; ++number)
    Run(stream, "compiled", {x}, nodes(number));
  Compare(stream, {x}, nodes(0));
  EXPECT_EQ(compiled::Launches() - before, 1027);
}

// 2^31 elements and more need 64-bit indices. The operands have few elements, which repeat.
TEST_F(CompiledTest, LargeResultsOfBroadcastOperands) {
  if (WatchedClosely()) return;
  CompileBeforeUse(true);
  Stream& stream = TestStream(Backend::kCuda);
  Random random(8);
  const std::int64_t rows = 1 << 16, columns = (1 << 15) + 24;
  DeviceArray<std::uint8_t> row(stream, AnyElements(DType::kU8, columns, random)),
      column(stream, AnyElements(DType::kU8, rows, random));
  const View a = WholeView({DType::kU8, MakeShape({columns})}, row.data()),
             b = WholeView({DType::kU8, MakeShape({rows, 1})}, column.data());
  const std::int64_t before = compiled::Launches();
  Compare(stream, {a, b}, {In(0), In(1), Op(MapOp::kLess, {0, 1})});
  EXPECT_EQ(compiled::Launches(), before + 1);
}

TEST_F(CompiledTest, TheSecondCallIsCompiledInTheBackground) {
  Stream& stream = TestStream(Backend::kCuda);
  Random random(4);
  const std::int64_t n = 1000;
  DeviceArray<std::uint8_t> array(stream, AnyElements(DType::kF32, n, random));
  const View x = WholeView({DType::kF32, MakeShape({n})}, array.data());
  // Makes an expression that no other test has.
  const auto nodes = [](double factor) -> Nodes {
    return {In(0),
            Real(factor),
            Op(MapOp::kMultiply, {0, 1}),
            Op(MapOp::kTanh, {2}),
            Op(MapOp::kNegate, {3}),
            Op(MapOp::kExp, {4}),
            Op(MapOp::kSubtract, {5, 0})};
  };
  const std::int64_t before = compiled::Launches();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  int calls = 0;
  while (compiled::Launches() == before && std::chrono::steady_clock::now() < end) {
    ++calls;
    Compare(stream, {x}, nodes(calls));
    if (HasFailure()) return;
  }
  EXPECT_GT(compiled::Launches(), before);
  EXPECT_GT(calls, 2);
}

// A process may end while kernels are being compiled.
TEST_F(CompiledTest, ExitsWhileItCompiles) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto compile_and_exit = [] {
    Stream& stream = TestStream(Backend::kCuda);
    DeviceArray<std::uint8_t> array(stream, Bytes(4000, 1));
    const View x = WholeView({DType::kF32, MakeShape({1000})}, array.data());
    Random random(6);
    for (int i = 0; i < 20; ++i) {
      Nodes nodes = {In(0)};
      for (std::uint32_t step = 0; step < 40; ++step)
        nodes.push_back(Op(Below(random, 2) == 0 ? MapOp::kTanh : MapOp::kExp, {step}));
      for (int call = 0; call < 2; ++call) Run(stream, "compiled", {x}, nodes);
    }
    std::exit(HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(compile_and_exit(), testing::ExitedWithCode(0), "");
}

TEST_F(CompiledTest, ManyThreadsWithManyExpressions) {
  Random seeds(5);
  constexpr int kThreads = 6, kExpressions = 12;
  std::vector<DrawnExpression> expressions;
  for (int i = 0; i < kExpressions; ++i) expressions.push_back(AnyExpression(seeds));
  const std::array<std::int64_t, 3> shape = {1, 64, WatchedClosely() ? 16 : 640};
  const std::int64_t before = compiled::Launches();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const std::unique_ptr<Stream> own = *MakeStream(*TestDevice(Backend::kCuda));
      Random random(static_cast<std::uint64_t>(100 + thread));
      for (int round = 0; round < 4 * kExpressions && !HasFailure(); ++round) {
        ASSERT_TRUE(BeginRequest(*own).ok());
        const DrawnExpression& e = expressions[Below(random, expressions.size())];
        const Operands operands(*own, e, shape, random, /*any=*/false);
        Compare(*own, operands.views, e.nodes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const DrawnExpression& e = expressions[0];
  Stream& stream = TestStream(Backend::kCuda);
  const Operands operands(stream, e, shape, seeds, /*any=*/false);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (compiled::Launches() == before && std::chrono::steady_clock::now() < end)
    Run(stream, "compiled", operands.views, e.nodes);
  EXPECT_GT(compiled::Launches(), before);
}

}  // namespace
}  // namespace tessera::test
