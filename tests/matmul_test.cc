// Every strategy of Matmul in the table, compared with references in long double within its own
// bound.
#include <array>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <string_view>

#include "kernels/choose/pace.h"
#include "kernels/cuda/matmul/hopper/gemm/stream_k.h"
#include "kernels/problem/matmul.h"
#include "kernels/run/execute.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

struct MatmulShape {
  std::int64_t m, n, k;
};

struct MatmulCase {
  StrategyCase row;
  DType out_dtype;
};

std::string MatmulCaseName(const testing::TestParamInfo<MatmulCase>& info) {
  return CaseName({info.param.row, info.index}) + "_to_" + std::string(Name(info.param.out_dtype));
}

std::vector<MatmulCase> MatmulCases(const auto& keep) {
  std::vector<MatmulCase> cases;
  for (const StrategyCase& row : StrategyCases<MatmulProblem>(keep, kArrayDTypes))
    for (DType out_dtype : kAllDTypes)
      if (IsMatmulPair(row.dtype, out_dtype)) cases.push_back({row, out_dtype});
  return cases;
}
std::vector<MatmulCase> MatmulCases(std::initializer_list<std::string_view> rows,
                                    std::optional<DType> only = {}) {
  return MatmulCases([&](const auto& row, DType dtype) {
    return std::ranges::find(rows, row.name) != rows.end() && dtype == only.value_or(dtype);
  });
}

// In builds without CUDA, some suites have no instances.
#define TESSERA_PRODUCTS(Suite, ...)                                                       \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Suite);                                    \
  INSTANTIATE_TEST_SUITE_P(Strategies, Suite, testing::ValuesIn(MatmulCases(__VA_ARGS__)), \
                           MatmulCaseName)

// Defines a test whose body is compiled for the types T of operands and O of results, and runs for
// those of the case.
#define TESSERA_PRODUCT_TEST(Suite, Test)                                        \
  template <class T, class O>                                                    \
  struct Suite##_##Test : Suite {                                                \
    void TestBody() override;                                                    \
  };                                                                             \
  TEST_P(Suite, Test) {                                                          \
    Dispatch([]<class T, class O>(T, O) { Suite##_##Test<T, O>().TestBody(); }); \
  }                                                                              \
  template <class T, class O>                                                    \
  void Suite##_##Test<T, O>::TestBody()

// Which operands are transposed, as bits: 1 is a, 2 is b.
struct Transposes {
  Transposes(int bits) : a(bits & 1), b(bits & 2) {}  // NOLINT(google-explicit-constructor)
  bool a, b;
};

template <class T>
View MatrixView(const T* data, std::int64_t rows, std::int64_t columns, bool transposed) {
  return WholeView(
      {DTypeOf<T>(), transposed ? MakeShape({columns, rows}) : MakeShape({rows, columns})}, data);
}

// Returns the product of a column and a row, transposed or not.
template <class T, class V>
std::vector<T> Outer(const std::vector<V>& column, const std::vector<V>& row, bool transposed) {
  if (transposed) return Outer<T>(row, column, false);
  std::vector<T> values;
  values.reserve(column.size() * row.size());
  for (V x : column)
    for (V y : row) values.push_back(static_cast<T>(static_cast<ValueOf<T>>(x * y)));
  return values;
}

// Whether the strategy rounds f32 operands, as its name says.
bool RoundsOperands(const Strategy<MatmulProblem>& row, DType dtype) {
  return dtype == DType::kF32 && (row.name == "tensor_bf16" || row.name == "tensor_tf32");
}

class MatmulTest : public testing::TestWithParam<MatmulCase> {
 protected:
  void SetUp() override { TESSERA_NEED_STRATEGY(MatmulProblem, GetParam().row); }
  const Strategy<MatmulProblem>& row() const { return StrategyOf<MatmulProblem>(GetParam().row); }
  static Stream& stream() { return TestStream(GetParam().row.backend); }
  static bool gpu() { return GetParam().row.backend == Backend::kCuda; }

  // Calls f with the types of the operands and the result.
  template <class F>
  void Dispatch(F&& f) {
    DispatchMatmul({.dtype = GetParam().row.dtype, .out_dtype = GetParam().out_dtype}, f);
  }

  // An expected element of a product, numbered row by row.
  template <class T>
  struct Wanted {
    std::int64_t place;
    double magnitude;  // The sum of the products' magnitudes.
    std::conditional_t<std::is_integral_v<T>, std::int64_t, long double> sum;
  };

  // a and b are views of host memory. Large results are checked at random places.
  template <class T>
  static std::vector<Wanted<T>> References(const View& a, const View& b, Transposes t) {
    const std::int64_t m = a.shape[t.a], k = a.shape[!t.a], n = b.shape[!t.b];
    const auto at = [](const View& v, bool transpose, std::int64_t i, std::int64_t j) {
      return static_cast<const T*>(v.data)[i * v.strides[transpose] + j * v.strides[!transpose]];
    };
    Random random(42);
    const std::int64_t products = Watched() ? 50'000 : 2'000'000;
    const std::int64_t checks =
        std::min<std::int64_t>(m * n, products / std::max<std::int64_t>(1, k) + 64);
    std::vector<Wanted<T>> wanted;
    for (std::int64_t check = 0; check < checks; ++check) {
      const std::int64_t e = checks == m * n ? check : random.Below(m * n);
      Wanted<T> want{e, 0, 0};
      for (std::int64_t l = 0; l < k; ++l) {
        const T x = at(a, t.a, e / n, l), y = at(b, t.b, l, e % n);
        if constexpr (std::is_integral_v<T>) {
          want.sum = WrapAdd(want.sum, Product(x, y));
        } else {
          const long double product = Exact(x) * Exact(y);
          want.sum += product;
          want.magnitude += static_cast<double>(std::abs(product));
        }
      }
      wanted.push_back(want);
    }
    return wanted;
  }

  // a and b are views of the device's memory.
  template <class T, class O>
  void Check(const std::vector<Wanted<T>>& wanted, const View& a, const View& b, Transposes t,
             Launch launch = {}) {
    const DType out_dtype = GetParam().out_dtype;
    const auto type = Get(MatmulType(a, b, t.a, t.b, out_dtype));
    ASSERT_EQ(type.dtype, out_dtype);
    const std::int64_t m = type.shape[0], n = type.shape[1], k = a.shape[!t.a];
    DeviceArray<O> c(stream(), m * n);
    const auto stats = RunMatmul(stream(), a, b, t.a, t.b, out_dtype, c.data(),
                                 {.strategy = row().name, .launch = launch});
    const MatmulProblem problem{
        .dtype = a.dtype, .out_dtype = out_dtype, .m = m, .n = n, .k = k, .launch = launch};
    if (const std::string refusal = Refusal(row(), problem); !refusal.empty()) {
      EXPECT_EQ(ErrorReason(stats.status()), "STRATEGY_UNSUPPORTED") << stats.status();
      EXPECT_EQ(ErrorMetadata(stats.status())["needs"], refusal);
      return;
    }
    ASSERT_TRUE(stats.ok()) << stats.status();
    EXPECT_EQ(stats->flops, static_cast<std::uint64_t>(2 * m * n * k));
    const std::vector<O> got = c.Values();
    // Below the smallest normal number, the rounding error does not shrink with the value.
    const double subnormal = out_dtype == DType::kF16 ? 0x1p-25
                             : a.dtype == DType::kF32 ? static_cast<double>(k) * 0x1p-149
                                                      : 0;
    for (const Wanted<T>& want : wanted) {
      const O value = At(got, want.place);
      const auto where = [&] {
        return absl::StrCat("element ", want.place / n, ", ", want.place % n, " of ", m, " x ", n,
                            " x ", k, " transposes ", t.a, t.b, ": got ",
                            static_cast<double>(Exact(value)), " want ",
                            static_cast<double>(want.sum));
      };
      if constexpr (std::is_integral_v<T>) {
        ASSERT_EQ(value, static_cast<O>(want.sum)) << where();
      } else if (!std::isfinite(want.sum)) {
        ASSERT_TRUE(std::isnan(want.sum) ? std::isnan(Exact(value)) : Exact(value) == want.sum)
            << where();
      } else {
        ASSERT_LE(std::abs(static_cast<double>(Exact(value) - want.sum)),
                  (sums_are_exact_ ? 0 : stats->roundoff) * want.magnitude +
                      UnitRoundoff(out_dtype) * std::abs(static_cast<double>(want.sum)) + subnormal)
            << where();
      }
    }
    // A bound that allows everything proves nothing.
    if (sums_are_exact_) return;
    EXPECT_LE(stats->roundoff, IsInteger(a.dtype)               ? 0
                               : RoundsOperands(row(), a.dtype) ? 1e-2
                                                                : 1e-3);
  }

  // Set for small whole numbers, whose products and sums need no rounding, in any order.
  bool sums_are_exact_ = false;

  // Matrices of normally distributed numbers, row by row, and expected elements of their product.
  template <class T>
  struct Normal {
    std::vector<T> a, b;
    std::vector<Wanted<T>> wanted;
  };

  // offset: the misalignment of a in elements. The misalignment of b is two elements more, or 0 if
  // offset is 0.
  template <class T, class O>
  void CheckShape(MatmulShape s, Transposes t, std::size_t offset, Launch launch = {}) {
    // On the CPU, the references take longer than the tests that use them, so they are computed
    // once.
    static auto& kept = *new std::map<std::array<std::int64_t, 3>, Normal<T>>;
    if (gpu()) kept.clear();
    Normal<T>& normal = kept[{s.m, s.n, s.k}];
    if (normal.wanted.empty()) {
      normal.a = NormalVector<T>(s.m * s.k, 1);
      normal.b = NormalVector<T>(s.k * s.n, 2);
      normal.wanted = References<T>(MatrixView(normal.a.data(), s.m, s.k, false),
                                    MatrixView(normal.b.data(), s.k, s.n, false), 0);
    }
    const auto laid = [](const std::vector<T>& values, std::int64_t rows, std::int64_t columns,
                         bool transpose) {
      if (!transpose) return values;
      std::vector<T> out;
      out.reserve(values.size());
      for (std::int64_t j = 0; j < columns; ++j)
        for (std::int64_t i = 0; i < rows; ++i) out.push_back(At(values, i * columns + j));
      return out;
    };
    CheckValues<T, O>(s, laid(normal.a, s.m, s.k, t.a), laid(normal.b, s.k, s.n, t.b), t, offset,
                      launch, &normal.wanted);
  }

  // Checks the given elements. wanted: the known elements of the product.
  template <class T, class O>
  void CheckValues(MatmulShape s, const std::vector<T>& a, const std::vector<T>& b, Transposes t,
                   std::size_t offset, Launch launch = {},
                   const std::vector<Wanted<T>>* wanted = nullptr) {
    DeviceArray<T> da(stream(), a, offset), db(stream(), b, offset == 0 ? 0 : offset + 2);
    const auto view_a = [&](const T* data) { return MatrixView(data, s.m, s.k, t.a); };
    const auto view_b = [&](const T* data) { return MatrixView(data, s.k, s.n, t.b); };
    Check<T, O>(wanted != nullptr ? *wanted : References<T>(view_a(a.data()), view_b(b.data()), t),
                view_a(da.data()), view_b(db.data()), t, launch);
  }
};

TESSERA_PRODUCT_TEST(MatmulTest, ShapesAndTransposes) {
  constexpr MatmulShape kShapes[] = {
      {1, 1, 1},     {2, 3, 4},    {31, 33, 32},  {64, 64, 64},    {65, 127, 129}, {1, 4099, 7},
      {257, 1, 255}, {1, 1, 4099}, {128, 128, 8}, {100, 200, 517}, {132, 268, 36}, {129, 257, 1},
      {17, 300, 3},  {0, 5, 3},    {5, 0, 3},     {5, 7, 0},       {0, 0, 0}};
  int shape = 0;
  for (const MatmulShape& s : kShapes) {
    ++shape;
    for (int transposes = 0; transposes < 4; ++transposes)
      for (int offset : {0, 1})
        if (!WatchedClosely() || (shape + transposes + 2 * offset) % 4 == 0)
          CheckShape<T, O>(s, transposes, static_cast<std::size_t>(offset));
  }
}

TESSERA_PRODUCT_TEST(MatmulTest, Launches) {
  std::vector<Launch> launches = Launches(row().limits);
  if (row().limits.items_per_thread.max != 0)
    for (std::uint32_t items : {2u, 4u, 5u, 8u}) launches.push_back({.items_per_thread = items});
  for (const Launch& launch : launches) CheckShape<T, O>({67, 130, 70}, 2, 1, launch);
}

TESSERA_PRODUCT_TEST(MatmulTest, StridedViews) {
  const DType dtype = GetParam().row.dtype;
  const std::vector<T> values = NormalVector<T>(60 * 80, 3);
  DeviceArray<T> array(stream(), values, 1);
  // Blocks with a pitch, transposed, reversed, with steps, repeated and overlapping.
  const StridedWindow windows[] = {{81, {33, 17}, {80, 1}},       {5, {33, 17}, {1, 80}},
                                   {59 * 80, {33, 17}, {-80, 1}}, {2, {33, 17}, {80, 3}},
                                   {7, {33, 17}, {0, 1}},         {7, {33, 17}, {80, 0}},
                                   {7, {33, 17}, {3, 1}},         {7, {33, 17}, {1, 3}}};
  for (const StridedWindow& wa : windows) {
    for (const StridedWindow& wb : windows) {
      for (int transposes : {1, 2})
        Check<T, O>(
            References<T>(wa.Of(values.data(), dtype), wb.Of(values.data(), dtype), transposes),
            wa.Of(array.data(), dtype), wb.Of(array.data(), dtype), transposes);
    }
  }
}

// A product of any ranks as np.matmul defines it, from indices of elements. a and b are views of
// host memory.
template <class T>
struct StackModel {
  Shape shape;
  std::int64_t k = 0;
  std::vector<long double> sums, magnitudes;

  StackModel(View a, View b, Transposes t) {
    const bool rows = a.shape.rank > 1, columns = b.shape.rank > 1;
    const View left = Matrices(a, 0, t.a && rows), right = Matrices(b, 1, t.b && columns);
    const std::int64_t m = left.shape[kMaxRank - 2], n = right.shape[kMaxRank - 1];
    k = left.shape[kMaxRank - 1];
    const int rank = std::max(a.shape.rank, b.shape.rank);
    for (int i = kMaxRank - rank; i < kMaxRank - 2; ++i)
      shape[shape.rank++] = left.shape[i] == 1 ? right.shape[i] : left.shape[i];
    const std::int64_t stack = shape.elements();
    for (std::int64_t e = 0; e < stack * m * n; ++e) {
      std::int64_t place = e / (m * n), at_left = e / n % m * left.strides[kMaxRank - 2],
                   at_right = e % n * right.strides[kMaxRank - 1];
      for (int i = shape.rank - 1; i >= 0; --i) {
        const int axis = kMaxRank - 2 - shape.rank + i;
        const std::int64_t index = place % shape[i];
        place /= shape[i];
        if (left.shape[axis] != 1) at_left += index * At(left.strides, axis);
        if (right.shape[axis] != 1) at_right += index * At(right.strides, axis);
      }
      long double sum = 0, magnitude = 0;
      for (std::int64_t l = 0; l < k; ++l) {
        const long double product =
            static_cast<long double>(
                Exact(static_cast<const T*>(a.data)[at_left + l * left.strides[kMaxRank - 1]])) *
            static_cast<long double>(
                Exact(static_cast<const T*>(b.data)[at_right + l * right.strides[kMaxRank - 2]]));
        sum += product;
        magnitude += std::abs(product);
      }
      sums.push_back(sum);
      magnitudes.push_back(magnitude);
    }
    if (rows) shape[shape.rank++] = m;
    if (columns) shape[shape.rank++] = n;
  }

  // Returns the view with all axes that a view can have. A vector gets an axis of extent 1 before
  // or after its own.
  static View Matrices(const View& x, int vector_axis, bool transposed) {
    View out{.data = x.data, .dtype = x.dtype, .shape = {kMaxRank, {}}, .strides = {}};
    out.shape.dims.fill(1);
    const int rank = x.shape.rank, shift = kMaxRank - rank - (rank == 1 ? vector_axis : 0);
    for (int i = 0; i < rank; ++i) {
      out.shape[i + shift] = x.shape[i];
      At(out.strides, i + shift) = At(x.strides, i);
    }
    if (transposed) {
      std::swap(out.shape[kMaxRank - 2], out.shape[kMaxRank - 1]);
      std::swap(out.strides[kMaxRank - 2], out.strides[kMaxRank - 1]);
    }
    return out;
  }
};

TESSERA_PRODUCT_TEST(MatmulTest, Stacks) {
  struct Case {
    StridedWindow a, b;
    int transposes = 0;
  };
  const Case cases[] = {
      {{0, {2, 3, 5, 4}, {60, 20, 4, 1}}, {7, {3, 4, 6}, {24, 6, 1}}},
      {{0, {5, 4}, {4, 1}}, {3, {2, 1, 4, 3}, {12, 12, 3, 1}}},
      // Both operands repeat their matrices along different axes.
      {{0, {3, 1, 5, 4}, {20, 20, 4, 1}}, {1, {1, 2, 4, 3}, {24, 12, 3, 1}}},
      // Vectors.
      {{0, {4}, {1}}, {0, {3, 4, 5}, {20, 5, 1}}},
      {{9, {4}, {-2}}, {0, {3, 4, 5}, {20, 5, 1}}},
      {{0, {3, 5, 4}, {20, 4, 1}}, {8, {4}, {3}}},
      {{0, {5, 4}, {4, 1}}, {8, {4}, {0}}},
      {{0, {40}, {1}}, {1, {40}, {2}}},
      {{0, {40, 1}, {1, 40}}, {1, {40}, {2}}, 3},
      // Transposed, with pitches, reversed, with steps, repeated.
      {{0, {3, 4, 5}, {20, 5, 1}}, {0, {3, 6, 4}, {24, 4, 1}}, 3},
      {{400, {3, 5, 4}, {-100, 7, 1}}, {0, {3, 4, 6}, {31, 1, 5}}},
      {{0, {3, 5, 4}, {1, 12, 3}}, {23, {3, 4, 6}, {24, -6, -1}}},
      {{0, {50, 5, 4}, {0, 8, 2}}, {0, {50, 4, 6}, {24, 6, 1}}},
      {{0, {2, 3, 5, 4}, {0, 40, 8, 2}}, {0, {2, 1, 4, 6}, {24, 0, 6, 1}}},
      {{0, {2, 2, 3, 5, 4}, {60, 120, 20, 4, 1}}, {0, {2, 2, 3, 4, 2}, {48, 24, 8, 2, 1}}},
      // Stacks that are one product.
      {{0, {6, 5, 4}, {20, 4, 1}}, {0, {4, 6}, {6, 1}}},
      {{0, {6, 5, 1, 4}, {40, 8, 9, 1}}, {0, {4, 6}, {6, 1}}},
      {{0, {6, 4, 5}, {5, 30, 1}}, {0, {4, 6}, {6, 1}}, 1},
      {{0, {1, 4}, {4, 1}}, {0, {3, 6, 4}, {24, 4, 1}}, 2},
      {{0, {1, 4}, {4, 1}}, {0, {3, 4, 6}, {6, 18, 1}}},
      // Several tiles, odd distances between matrices, and many products.
      {{0, {3, 35, 40}, {1403, 40, 1}}, {5, {3, 40, 33}, {1321, 33, 1}}},
      {{0, {2, 130, 17}, {2210, 17, 1}}, {1, {2, 17, 131}, {2227, 131, 1}}},
      {{0, {2000, 2, 2}, {2, 2, 1}}, {0, {2000, 2, 2}, {2, 1, 2}}},
      // Nothing to multiply, or to add.
      {{0, {0, 3, 4}, {12, 4, 1}}, {0, {4, 5}, {5, 1}}},
      {{0, {2, 3, 0}, {0, 0, 1}}, {0, {2, 0, 4}, {0, 4, 1}}},
      {{0, {2, 0, 4}, {0, 4, 1}}, {0, {2, 4, 3}, {12, 3, 1}}},
      {{0, {0}, {1}}, {0, {3, 0, 2}, {0, 2, 1}}},
  };
  const std::vector<T> values = NormalVector<T>(5000, 4);
  DeviceArray<T> array(stream(), values, 1);
  const auto [dtype, out_dtype] = std::pair(GetParam().row.dtype, GetParam().out_dtype);
  int computed = 0;
  for (const Case& one : cases) {
    SCOPED_TRACE(absl::StrCat("case ", &one - cases));
    const Transposes t(one.transposes);
    const StackModel<T> model(one.a.Of(values.data(), dtype), one.b.Of(values.data(), dtype), t);
    const View a = one.a.Of(array.data(), dtype), b = one.b.Of(array.data(), dtype);
    const ArrayType type = Get(MatmulType(a, b, t.a, t.b, out_dtype));
    ASSERT_EQ(ToString(type.shape), ToString(model.shape));
    DeviceArray<O> c(stream(), type.shape.elements());
    const auto stats =
        RunMatmul(stream(), a, b, t.a, t.b, out_dtype, c.data(), {.strategy = row().name});
    if (row().refuses != nullptr && ErrorReason(stats.status()) == "STRATEGY_UNSUPPORTED") continue;
    ASSERT_TRUE(stats.ok()) << stats.status();
    ++computed;
    EXPECT_EQ(stats->flops, static_cast<std::uint64_t>(2 * type.shape.elements() * model.k));
    const std::vector<O> got = c.Values();
    for (std::size_t i = 0; i < got.size(); ++i) {
      if constexpr (std::is_integral_v<T>) {
        ASSERT_EQ(got[i], static_cast<O>(static_cast<std::int64_t>(model.sums[i]))) << i;
      } else {
        const double want = static_cast<double>(model.sums[i]);
        ASSERT_NEAR(static_cast<double>(Exact(got[i])), want,
                    stats->roundoff * static_cast<double>(model.magnitudes[i]) +
                        UnitRoundoff(out_dtype) * std::abs(want) + 0x1p-24)
            << i;
      }
    }
  }
  EXPECT_GE(computed, 4);
}

class MatmulOfFloatsTest : public MatmulTest {};

// Values beyond an edge, in the strategy's tiles or in memory, must not reach the result.
TEST_P(MatmulOfFloatsTest, NonFiniteElementsStayInTheirRowAndColumn) {
  sums_are_exact_ = true;
  // This also tests strategies that take only few columns or few steps along k.
  for (const MatmulShape& s : {MatmulShape{130, 130, 118}, {130, 30, 118}, {130, 130, 7}}) {
    Dispatch([&]<class T, class O>(T, O) {
      std::vector<T> a(static_cast<std::size_t>(s.m * s.k), Element<T>(0.5));
      std::vector<T> b(static_cast<std::size_t>(s.k * s.n), Element<T>(0.25));
      At(a, (s.m - 1) * s.k + s.k / 2) = Element<T>(std::nan(""));
      At(b, s.k / 2 * s.n + s.n - 2) = Element<T>(kInfinity);
      CheckValues<T, O>(s, a, b, 0, 0);
    });
  }
}

// Strategies that round operands are left out, because they lose more if operands are subnormal.
class MatmulOfF32Test : public MatmulTest {};

// No strategy loses more than plain f32, even with subnormal numbers and infinities.
TEST_P(MatmulOfF32Test, ElementsOfAnySize) {
  // The binary exponents of the elements of a and b. No partial sum exceeds the range of f32.
  struct Sizes {
    double a_least, a_most, b_least, b_most;
  };
  const Sizes all_sizes[] = {
      {-120, -119, 0, 1},         // 1e-36
      {-149, -126, 0, 100},       // subnormal
      {-149, 20, -149, 20},       // products that underflow next to normal ones
      {-76, -73, -76, -73},       // subnormal results
      {-126, 127.9, -126, -12},   // from the smallest normal number to the largest, in each row
      {-126, -12, -126, 127.9},   // in each column
      {127.5, 127.9, -126, -12},  // all large
      {50, 58, 50, 58},           // results near the largest number
  };
  Random random(9);
  const auto values = [&](std::int64_t count, double least, double most) {
    std::vector<float> v(static_cast<std::size_t>(count));
    for (float& x : v) {
      const double size = std::exp2(least + (most - least) * random.Uniform());
      x = static_cast<float>(random.Bits() % 2 == 0 ? size : -size);
    }
    return v;
  };
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const MatmulShape several_tiles = gpu() ? MatmulShape{150, 260, 100} : MatmulShape{70, 132, 100};
  for (const MatmulShape& s : {several_tiles, {37, 9, 333}, {20, 21, 1}}) {
    if (WatchedClosely() && s.k > 100) continue;
    for (const Sizes& sizes : all_sizes) {
      SCOPED_TRACE(absl::StrCat("exponents from ", sizes.a_least, " to ", sizes.a_most, " and ",
                                sizes.b_least, " to ", sizes.b_most));
      std::vector<float> a = values(s.m * s.k, sizes.a_least, sizes.a_most);
      std::vector<float> b = values(s.k * s.n, sizes.b_least, sizes.b_most);
      const auto check = [&](std::size_t offset) {
        CheckValues<float, float>(s, a, b, static_cast<int>(random.Bits() % 4), offset);
      };
      check(0);
      check(1);
      a[a.size() / 3] = kInf;
      a[a.size() / 2] = 0;
      b[b.size() / 2] = -kInf;
      check(0);
      a[a.size() / 4] = -kInf;
      b[b.size() / 5] = std::nanf("");
      check(1);
    }
  }
}

TESSERA_PRODUCT_TEST(MatmulTest, Large) {
  // Strategies choose their tiles by the size of the result. These shapes have many, some or few
  // tiles.
  for (int transposes = 0; transposes < 4; transposes += Watched() ? 3 : 1) {
    for (std::size_t offset : {0, 1})
      CheckShape<T, O>(gpu() ? MatmulShape{1100, 1500, 204} : MatmulShape{110, 150, 204},
                       transposes, offset);
    CheckShape<T, O>(gpu() ? MatmulShape{2304, 3004, 520} : MatmulShape{260, 516, 300}, transposes,
                     0);
  }
  // There are more than two tiles per block, for persistent blocks.
  CheckShape<T, O>(gpu() ? MatmulShape{4700, 4500, 72} : MatmulShape{300, 290, 72}, 1, 0);
  CheckShape<T, O>(gpu() ? MatmulShape{2049, 3001, 1027} : MatmulShape{257, 513, 300}, 0, 1);
  CheckShape<T, O>(gpu() ? MatmulShape{70003, 5, 64} : MatmulShape{7003, 5, 64}, 2, 1);
  CheckShape<T, O>(gpu() ? MatmulShape{5, 70003, 64} : MatmulShape{5, 7003, 64}, 2, 1);
}

// Few rows or few columns: every small number of them, with k long enough to be split.
TESSERA_PRODUCT_TEST(MatmulTest, Skinny) {
  const std::int64_t k = Watched() ? 45 : gpu() ? 4201 : 301;
  // A large operand of several tiles with aligned rows, in either layout.
  const bool large = gpu() && !Watched();
  const std::int64_t wide = large ? 1160 : 264, deep = large ? 2056 : 136;
  for (std::int64_t few : {1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33}) {
    const int transposes = static_cast<int>(few % 4);
    CheckShape<T, O>({few, 136, k}, transposes, 0);
    CheckShape<T, O>({136, few, k - 1}, transposes / 2 + transposes % 2 * 2, 0);
    if (few % 4 > 1) continue;
    for (const int transpose : {0, 1}) {
      CheckShape<T, O>({few, wide, deep}, 2 * transpose, 0);
      CheckShape<T, O>({wide, few, deep}, transpose, 0);
    }
  }
  if (!large) return;
  // There are more tiles than blocks, and more tiles than clusters of several blocks.
  CheckShape<T, O>({70000, 16, 520}, 0, 0);
  CheckShape<T, O>({17920, 16, 1032}, 0, 0);
}

// Few rows and few columns. From a k of 2^15 on, `skinny` does not use tiles.
TESSERA_PRODUCT_TEST(MatmulTest, FewResults) {
  const bool made_for = row().name == "skinny";
  sums_are_exact_ = true;
  const auto whole_numbers = [](std::int64_t n, std::uint64_t seed) {
    Random random(seed);
    std::vector<T> values(static_cast<std::size_t>(n));
    for (T& value : values)
      value = Element<T>(static_cast<double>(static_cast<int>(random.Bits() % 5) - 2));
    return values;
  };
  int turn = 0;
  for (const std::int64_t k : {32771, 32767, 32768, 40000, 600011}) {
    if (k != 32771 && (!made_for || Watched())) return;
    for (const auto& [m, n] : {std::pair{1, 1}, {2, 1}, {1, 2}, {3, 2}, {2, 4}, {4, 4}, {5, 4}}) {
      CheckValues<T, O>({m, n, k}, whole_numbers(m * k, 1), whole_numbers(k * n, 2), turn,
                        static_cast<std::size_t>(turn % 3 == 2));
      ++turn;
    }
  }
}

// Few steps along k. The strategy for such products also gets results of many tiles.
TESSERA_PRODUCT_TEST(MatmulTest, FewSteps) {
  const bool made_for = row().name == "outer_product";
  for (int k = 0; k <= 9; ++k)
    for (int turn = 0; turn < (made_for ? 4 : 1); ++turn)
      CheckShape<T, O>({131, 259, k}, k + turn, static_cast<std::size_t>(k % 2));
  if (!made_for || Watched()) return;
  for (int k : {1, 3, 8}) {
    CheckShape<T, O>({1280, 1536, k}, 0, 0);
    CheckShape<T, O>({1021, 2053, k}, k, 1);
    CheckShape<T, O>({40, 70003, k}, k / 2 + k % 2 * 2, 0);
    CheckShape<T, O>({70003, 3, k}, k, 0);
  }
}

class MatmulRoundedTest : public MatmulTest {};

TEST_P(MatmulRoundedTest, FiniteElementsStayFinite) {
  constexpr std::int64_t kSide = 64;
  std::vector<float> largest(kSide * kSide), one(kSide * kSide);
  for (std::size_t i = 0; i < kSide; ++i) {
    largest[i * (kSide + 1)] =
        i % 2 == 0 ? std::numeric_limits<float>::max() : std::numeric_limits<float>::lowest();
    one[i * (kSide + 1)] = 1;
  }
  for (std::size_t offset : {0, 1})
    CheckValues<float, float>({kSide, kSide, kSide}, largest, one, 0, offset);
}

class MatmulOfBytesTest : public MatmulTest {};

// Sums of the largest products leave the range of i32 and wrap.
TESSERA_PRODUCT_TEST(MatmulOfBytesTest, SumsWrap) {
  if constexpr (sizeof(T) == 1) {
    const std::int64_t k = Watched() ? 140'003 : 270'011;
    const auto largest = static_cast<T>(std::is_signed_v<T> ? -128 : 255);
    std::vector<T> a(static_cast<std::size_t>(3 * k), largest), b = a;
    a[0] = b[1] = 1;
    CheckValues<T, O>({3, 3, k}, a, b, 0, 0);
    CheckValues<T, O>({3, 3, k}, a, b, 3, 1);
  }
}

// a and b have different 8-bit types.
TESSERA_PRODUCT_TEST(MatmulOfBytesTest, MixedTypes) {
  if constexpr (sizeof(T) == 1) {
    using U = std::conditional_t<std::is_signed_v<T>, std::uint8_t, std::int8_t>;
    for (const auto& [m, n, k] : {MatmulShape{3, 5, 7}, {130, 70, 200}, {65, 257, 300}}) {
      const std::vector<T> a = NormalVector<T>(m * k, 1);
      const std::vector<U> b = NormalVector<U>(k * n, 2);
      for (int transposes = 0; transposes < 4; ++transposes) {
        const Transposes t = transposes;
        const std::size_t offset = transposes == 1 ? 1 : 0;
        DeviceArray<T> da(stream(), a, offset);
        DeviceArray<U> db(stream(), b, offset);
        for (const std::string_view strategy : {row().name, std::string_view()}) {
          DeviceArray<O> c(stream(), m * n);
          const auto stats = RunMatmul(stream(), MatrixView(da.data(), m, k, t.a),
                                       MatrixView(db.data(), k, n, t.b), t.a, t.b, DType::kI32,
                                       c.data(), {.strategy = strategy});
          if (!row().mixed && !strategy.empty()) {
            EXPECT_EQ(ErrorReason(stats.status()), "STRATEGY_UNSUPPORTED");
            continue;
          }
          ASSERT_TRUE(stats.ok()) << stats.status();
          const std::vector<O> got = c.Values();
          for (std::int64_t e = 0; e < m * n; ++e) {
            const std::int64_t i = e / n, j = e % n;
            O want = 0;
            for (std::int64_t l = 0; l < k; ++l)
              want += At(a, t.a ? l * m + i : i * k + l) * At(b, t.b ? j * k + l : l * n + j);
            ASSERT_EQ(At(got, e), want) << m << " x " << n << " x " << k << ", element " << e;
          }
        }
      }
    }
  }
}

TESSERA_PRODUCTS(MatmulTest, kAny);
TESSERA_PRODUCTS(MatmulRoundedTest, {"tensor_bf16"}, DType::kF32);
TESSERA_PRODUCTS(MatmulOfBytesTest, kOf<DType::kU8, DType::kI8>);
TESSERA_PRODUCTS(MatmulOfFloatsTest, kFloats);
TESSERA_PRODUCTS(MatmulOfF32Test, [](const auto& row, DType dtype) {
  return dtype == DType::kF32 && !RoundsOperands(row, dtype);
});

TEST(MatmulNaive, SixteenBitsAreRoundedOnce) {
  Stream& stream = TestStream(Backend::kCpu);
  const auto check = [&]<class T>(T) {
    const auto [terms, want] = HardToRound<T>();
    DeviceArray<T> a(stream, terms), b(stream, std::vector<T>(3, Element<T>(1))), c(stream, 1);
    Get(RunMatmul(stream, a.view({1, 3}), b.view({3, 1}), false, false, DTypeOf<T>(), c.data(),
                  {.strategy = "cpu_naive"}));
    EXPECT_EQ(static_cast<double>(Exact(c.Values()[0])), want);
  };
  check(Half{});
  check(BFloat16{});
}

// Strategies that split tiles into two parts; see stream_k.h.
class MatmulPartsTest : public MatmulTest {
 protected:
  // Before each product, another product leaves NaN in the shared memory of all multiprocessors.
  template <class T, class O>
  void CheckExactly(MatmulShape s, Transposes t) {
    SCOPED_TRACE(absl::StrCat(s.m, " x ", s.n, " x ", s.k, " transposes ", t.a, t.b));
    constexpr int kStreams = 2, kTimes = 3;
    Random random(11);
    const auto whole = [&](std::int64_t count, int least, int most) {
      std::vector<int> v(static_cast<std::size_t>(count));
      for (int& x : v)
        x = least + static_cast<int>(random.Bits() % static_cast<std::uint64_t>(most - least + 1));
      return v;
    };
    const std::vector<int> row_of = whole(s.m, 1, 3), column_of = whole(s.n, 1, 3);
    const std::vector<int> x = whole(s.k, -1, 2), y = whole(s.k, 0, 2);
    const double sum = std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
    ASSERT_NE(sum, 0);
    std::vector<O> want;
    for (int r : row_of)
      for (int c : column_of) want.push_back(static_cast<O>(static_cast<float>(r * c * sum)));

    Device& device = *TestDevice(GetParam().row.backend);
    const DType out_dtype = GetParam().out_dtype;
    DeviceArray<T> a(stream(), Outer<T>(row_of, x, t.a)), b(stream(), Outer<T>(y, column_of, t.b));
    constexpr std::int64_t kSide = 2048, kDepth = 512;
    const T wrong_element = static_cast<T>(static_cast<ValueOf<T>>(
        std::is_integral_v<T> ? 77 : std::numeric_limits<double>::quiet_NaN()));
    DeviceArray<T> nans(stream(), std::vector<T>(kSide * kDepth, wrong_element));
    int wrong[kStreams] = {};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < kStreams; ++caller) {
      callers.emplace_back([&, caller] {
        const auto own = Get(MakeStream(device));
        DeviceArray<O> c_of_nans(*own, kSide * kSide);
        for (int time = 0; time < kTimes; ++time) {
          if (!WatchedClosely()) {  // Races do not depend on values.
            Get(RunMatmul(*own, nans.view({kSide, kDepth}), nans.view({kDepth, kSide}), false,
                          false, out_dtype, c_of_nans.data(), {.strategy = row().name}));
          }
          DeviceArray<O> c(*own, s.m * s.n);
          Get(RunMatmul(*own, MatrixView(a.data(), s.m, s.k, t.a),
                        MatrixView(b.data(), s.k, s.n, t.b), t.a, t.b, out_dtype, c.data(),
                        {.strategy = row().name}));
          const std::vector<O> got = c.Values();
          wrong[caller] += std::memcmp(got.data(), want.data(), got.size() * sizeof(O)) != 0;
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    EXPECT_EQ(wrong[0], 0);
    EXPECT_EQ(wrong[1], 0);
  }
};

// Each matrix is a column of small whole numbers times a row, so every element is exact and known:
// a[i][l] b[l][j] = row[i] x[l] y[l] column[j].
TESSERA_PRODUCT_TEST(MatmulPartsTest, AllOfC) {
  // The comments say what the model chooses for 16-bit types on an H200.
  constexpr MatmulShape kShapes[] = {
      {1109, 1803, 3705},   // tiles of 128 x 128, each in two parts
      {1957, 2103, 1121},   // tiles of 128 x 192, each in two parts
      {2345, 1712, 963},    // tiles of 128 x 256, each in two parts
      {2189, 2312, 13320},  // pairs of 128 x 256 tiles, in two parts
      {2090, 387, 5187},    // pairs of 64 x 128 tiles, in two parts
      {707, 2935, 3983},    // pairs of 128 x 128 tiles, in two parts
      {381, 419, 1934},     // pairs of 64 x 128 tiles, k split
      {391, 770, 5730},     // pairs of 128 x 128 tiles, k split
      {73, 83, 422},        // pairs of 64 x 128 tiles, whole
      {2987, 263, 322},     // pairs of 128 x 128 tiles, whole
  };
  int transposes = 0;
  for (const MatmulShape& s : kShapes)
    for (int turn = 0; turn < 2; ++turn, ++transposes)
      if (!Watched() || turn == 0) CheckExactly<T, O>(s, transposes);
}

TESSERA_PRODUCTS(MatmulPartsTest, [](const auto& row, DType dtype) {
  return dtype != DType::kU8 &&
         (row.name == "tensor_bf16" || row.name == "tensor_f16" || row.name == "tensor_tf32" ||
          row.name == "tensor_f32x3" || row.name == "tensor_i8" || row.name == "warp_tiled_tma");
});

// Tests each main loop on two streams, with so many tiles per block that the kernel keeps the
// blocks abreast.
class MatmulAbreastTest : public MatmulPartsTest {};

TESSERA_PRODUCT_TEST(MatmulAbreastTest, AllOfLargeC) {
  const std::string_view name = GetParam().row.name;
  const std::int64_t k = name == "tensor_bf16" ? 24576 : 12288;
  CheckExactly<T, O>({8704, 8712, k}, name == "tensor_tf32" ? 3 : 2);
}

TESSERA_PRODUCTS(MatmulAbreastTest, {"tensor_bf16", "tensor_tf32", "tensor_f32x3"});

// The strategy that multiplies integers if its operands allow it, and plain f64 otherwise.
class MatmulIntegersTest : public MatmulTest {
 protected:
  struct Operands {
    MatmulShape shape;
    std::vector<double> a, b;
  };

  static std::vector<double> Run(std::string_view strategy, const Operands& o, Transposes t,
                                 std::size_t offset) {
    const auto& [m, n, k] = o.shape;
    DeviceArray<double> a(stream(), o.a, offset), b(stream(), o.b, 2 * offset), c(stream(), m * n);
    Get(RunMatmul(stream(), MatrixView(a.data(), m, k, t.a), MatrixView(b.data(), k, n, t.b), t.a,
                  t.b, DType::kF64, c.data(), {.strategy = strategy}));
    return c.Values();
  }
};

// Terms of up to 2^100 that cancel except for one term. Each matrix is a column times a row:
// a[i][l] b[l][j] = row[i] x[l] y[l] column[j], with x[l + k / 2] = x[l] except for l = 0, and y[l
// + k / 2] = -y[l]. Whole numbers are exact as integers, but not in f64. The shapes have tiles that
// extend beyond every edge, few rows, sums beyond 32 bits, and more rows and columns than one step
// converts to residues.
TEST_P(MatmulIntegersTest, WholeNumbersAreExact) {
  constexpr MatmulShape kShapes[] = {{300, 520, 2048}, {129, 257, 4100}, {7, 1001, 1000},
                                     {1030, 3, 66},    {513, 255, 128},  {130, 260, 200002},
                                     {4200, 16500, 64}};
  Random random(12);
  int turn = 0;
  for (const MatmulShape& s : kShapes) {
    if (Watched() && s.m * s.n * s.k > 100'000'000) continue;
    const auto whole = [&](std::int64_t count, int bits) {
      std::vector<double> v(static_cast<std::size_t>(count));
      for (double& x : v)
        x = std::exp2(bits - 1) + static_cast<double>(random.Bits() >> (65 - bits));
      return v;
    };
    const std::vector<double> row_of = whole(s.m, 6), column_of = whole(s.n, 6);
    // One shape uses all bits of the integers, so that scaling leaves no trailing zeros.
    const int bits = s.k == 128 ? 44 : 26;
    std::vector<double> x = whole(s.k, bits), y = whole(s.k, bits);
    y[0] = std::exp2(bits - 1);
    const auto half = static_cast<std::size_t>(s.k / 2);
    for (std::size_t l = 0; l < half; ++l) {
      x[half + l] = x[l];
      y[half + l] = -y[l];
    }
    x[0] += 1;
    for (const std::size_t offset : {0, 1}) {
      const Transposes t = turn++;
      SCOPED_TRACE(
          absl::StrCat(s.m, " x ", s.n, " x ", s.k, " transposes ", t.a, t.b, " offset ", offset));
      const Operands operands{s, Outer<double>(row_of, x, t.a), Outer<double>(y, column_of, t.b)};
      const std::vector<double> got = Run(row().name, operands, t, offset);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < s.m; ++i)
        for (std::int64_t j = 0; j < s.n; ++j)
          wrong += At(got, i * s.n + j) != At(row_of, i) * At(column_of, j) * y[0];
      EXPECT_EQ(wrong, 0);
      // Shows that the strategy has multiplied integers.
      if (turn == 1) {
        EXPECT_NE(Run("tensor_f64", operands, t, offset), got);
      }
    }
  }
}

// Rows of a and columns of b differ by powers of two up to the largest allowed power, or are zero.
TEST_P(MatmulIntegersTest, RowsOfAnySize) {
  Random random(13);
  const MatmulShape s{150, 260, Watched() ? 1100 : 3000};
  const auto sized = [&](std::int64_t rows, std::int64_t columns, bool by_row) {
    std::vector<double> v = NormalVector<double>(rows * columns, random.Bits());
    std::vector<double> sizes;
    for (std::int64_t i = 0; i < (by_row ? rows : columns); ++i)
      sizes.push_back(i % 50 == 7 ? 0 : std::exp2(800 * random.Uniform() - 400));
    for (std::int64_t i = 0; i < rows * columns; ++i)
      At(v, i) *= At(sizes, by_row ? i / columns : i % columns);
    return v;
  };
  for (int transposes = 0; transposes < 4; ++transposes) {
    const Transposes t = transposes;
    CheckValues<double, double>(s, t.a ? sized(s.k, s.m, false) : sized(s.m, s.k, true),
                                t.b ? sized(s.n, s.k, true) : sized(s.k, s.n, false), t,
                                static_cast<std::size_t>(transposes % 2));
  }
}

// If integers cannot hold an operand within the bound, the result has the bits of plain f64,
// wherever the offending element is.
TEST_P(MatmulIntegersTest, OtherOperandsHaveTheBitsOfPlainF64) {
  const MatmulShape s{133, 261, 1030};
  const auto check = [&](const Operands& operands, Transposes t) {
    const std::vector<double> got = Run(row().name, operands, t, 0);
    const std::vector<double> want = Run("tensor_f64", operands, t, 0);
    ASSERT_EQ(got.size(), want.size());
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(double)), 0);
  };
  const Operands normal{s, NormalVector<double>(s.m * s.k, 1), NormalVector<double>(s.k * s.n, 2)};
  for (int transposes = 0; transposes < 4; ++transposes) {
    SCOPED_TRACE(transposes);
    for (const double special : {kInfinity, -kInfinity, std::nan(""), 1e30, 1e250}) {
      SCOPED_TRACE(special);
      Operands operands = normal;
      operands.a.back() = special;
      check(operands, transposes);
      operands = normal;
      operands.b[operands.b.size() / 2] = special;
      check(operands, transposes);
    }
    for (const double size : {0x1p-480, 0x1p-1074, 0x1p460}) {
      SCOPED_TRACE(size);
      Operands operands = normal;
      for (double& x : operands.a) x *= size;
      check(operands, transposes);
    }
    // Half of all elements are zero.
    Operands operands = normal;
    for (std::size_t i = 0; i < operands.b.size(); i += 2) operands.b[i] = 0;
    check(operands, transposes);
  }
  for (std::int64_t k : {1, 2, 3, 4}) {
    SCOPED_TRACE(k);
    check({{s.m, s.n, k}, NormalVector<double>(s.m * k, 1), NormalVector<double>(k * s.n, 2)}, 0);
  }
}

TESSERA_PRODUCTS(MatmulIntegersTest, {"ozaki_f64"});

class MatmulOrderTest : public MatmulTest {};

// These strategies add the terms of each element in the same order, so they agree to the last bit.
TEST_P(MatmulOrderTest, SameBitsAsNaive) {
  constexpr std::int64_t kM = 4100, kN = 2900;
  const std::int64_t k = row().name == "outer_product" ? 7 : 333;
  DeviceArray<float> a(stream(), NormalVector<float>(kM * k, 1)),
      b(stream(), NormalVector<float>(k * kN, 2)), c(stream(), kM * kN);
  std::vector<float> results[2];
  for (const bool naive : {false, true}) {
    Get(RunMatmul(stream(), a.view({kM, k}), b.view({k, kN}), false, false, DType::kF32, c.data(),
                  {.strategy = naive ? "naive" : row().name}));
    results[naive] = c.Values();
  }
  ASSERT_EQ(results[0], results[1]);
}

TESSERA_PRODUCTS(MatmulOrderTest, {"warp_tiled", "warp_tiled_tma", "outer_product"}, DType::kF32);

// Products of more than 2^33 multiply-adds. Element [i, j] is row[i] times column[j] times k.
TEST(MatmulLibrary, LongProductsAreDoneInSlabs) {
  TESSERA_NEED_STRATEGY(MatmulProblem, (StrategyCase{"cpu_library", Backend::kCpu, DType::kF32}));
  Stream& stream = TestStream(Backend::kCpu);
  constexpr std::int64_t kFew = 512, kMany = 4096, kK = 4100;
  for (const auto& [m, n] : {std::pair(kFew, kMany), {kMany, kFew}}) {
    for (const bool transpose : {false, true}) {
      if (Watched() && transpose == (m == kFew)) continue;
      std::vector<float> rows, columns, steps(kK, 1);
      for (std::int64_t i = 0; i < m; ++i) rows.push_back(static_cast<float>(i % 5));
      for (std::int64_t j = 0; j < n; ++j) columns.push_back(static_cast<float>(j % 7));
      const std::vector<float> a = Outer<float>(rows, steps, transpose),
                               b = Outer<float>(steps, columns, transpose);
      std::vector<float> c(static_cast<std::size_t>(m * n), -1.0f);
      Get(RunMatmul(stream, MatrixView(a.data(), m, kK, transpose),
                    MatrixView(b.data(), kK, n, transpose), transpose, transpose, DType::kF32,
                    c.data(), {.strategy = "cpu_library"}));
      for (std::int64_t i = 0; i < m * n; ++i)
        ASSERT_EQ(At(c, i), static_cast<float>(kK) * At(rows, i / n) * At(columns, i % n)) << i;
    }
  }
}

// Just below multiples, the estimate by a reciprocal is closest to the next quotient.
TEST(MatmulPieces, QuotientsAreExact) {
  constexpr int kMost = std::numeric_limits<int>::max();
  std::vector<int> divisors = {kMost, kMost - 1, kMost / 2, kMost / 2 + 1, 65535, 65536, 65537};
  for (int value = 1; value <= 300; ++value) divisors.push_back(value);
  Random random(3);
  const auto any = [&](int most) {
    return static_cast<int>(random.Bits() % static_cast<std::uint64_t>(most)) + 1;
  };
  for (int i = 0; i < 300; ++i) divisors.push_back(any(kMost));
  for (int value : divisors) {
    const Divisor divisor(value);
    EXPECT_EQ(divisor.value(), value);
    std::vector<int> numbers = {0, 1, value - 1, value, kMost - 1, kMost};
    numbers.push_back(kMost / value * value - 1);
    numbers.push_back(kMost / value * value);
    for (int i = 0; i < 100; ++i) {
      const int multiple = any(kMost / value) * value;
      numbers.insert(numbers.end(), {multiple - 1, multiple, any(kMost) - 1});
    }
    for (int x : numbers) ASSERT_EQ(divisor.Quotient(x), x / value) << x << " / " << value;
  }
}

// All workers take the same number of steps abreast, all of them in whole tiles.
TEST(MatmulPieces, StepsAbreastAreOfWholeTiles) {
  int abreast = 0;
  for (int workers : {1, 3, 66, 132}) {
    for (int tiles :
         {workers, 16 * workers, 16 * workers + 1, 17 * workers - 1, 100 * workers - 1}) {
      for (int k_tiles : {1, 64, 129}) {
        for (bool share : {false, true}) {
          const Sharing sharing =
              share ? ShareTiles(tiles, k_tiles, workers) : WholeTiles(tiles, k_tiles, workers);
          const int steps = StepsAbreast(sharing, workers);
          const int of_tile = (k_tiles + kStepKTiles - 1) / kStepKTiles;
          ASSERT_EQ(steps % of_tile, 0);
          for (int worker = 0; worker < workers; ++worker) {
            for (int i = 0; i < steps / of_tile; ++i)
              ASSERT_EQ(PieceOf(sharing, worker, workers, i).k_tiles, k_tiles)
                  << worker << " of " << workers << ", " << tiles << " tiles";
          }
          abreast += steps;
        }
      }
    }
  }
  EXPECT_GT(abreast, 1000);
  // The shares of MatmulAbreastTest, in pairs of 128 x 256.
  EXPECT_GT(StepsAbreast(ShareTiles(34 * 35, 384, 66), 66), 0);
  EXPECT_EQ(StepsAbreast(WholeTiles(1'000'000'000, 100'000, 132), 132), 0) << "beyond 32 bits";
}

// The first part of each tile is done when the next worker starts the rest of the tile.
TEST(MatmulPieces, CoverAllTilesEvenly) {
  for (int workers : {1, 2, 3, 66, 132}) {
    for (int tiles = workers; tiles < 3 * workers + 2; ++tiles) {
      for (int k_tiles : {1, 2, 7, 64, 129}) {
        SCOPED_TRACE(absl::StrCat(workers, " workers, ", tiles, " tiles of ", k_tiles, " k_tiles"));
        const Sharing sharing = ShareTiles(tiles, k_tiles, workers);
        std::vector<int> times(static_cast<std::size_t>(tiles * k_tiles));
        int least = tiles * k_tiles, most = 0;
        Piece left{};  // What the previous worker has left.
        int left_at = 0;
        for (int worker = 0; worker < workers; ++worker) {
          Piece leaves{};
          int leaves_at = 0, done = 0, rests = 0;
          for (int i = 0;; ++i) {
            const Piece piece = PieceOf(sharing, worker, workers, i);
            if (piece.k_tiles == 0) break;
            ASSERT_EQ(rests, 0) << "a piece after the rest of a tile";
            ASSERT_EQ(piece.starts, piece.first == 0);
            ASSERT_EQ(piece.ends, piece.first + piece.k_tiles == k_tiles);
            if (!piece.starts) {
              ++rests;
              ASSERT_EQ(piece.tile, left.tile);
              ASSERT_EQ(piece.first, left.k_tiles);
              ASSERT_LE(left_at, done + 1);  // Some workers have one k-tile more.
              left = {};
            }
            for (int k_tile = piece.first; k_tile < piece.first + piece.k_tiles; ++k_tile)
              ++At(times, piece.tile * k_tiles + k_tile);
            done += piece.k_tiles;
            if (!piece.ends) {
              ASSERT_EQ(leaves.k_tiles, 0) << "two first parts";
              leaves = piece;
              leaves_at = done;
            }
          }
          ASSERT_EQ(left.k_tiles, 0) << "no worker computes the rest";
          left = leaves;
          left_at = leaves_at;
          least = std::min(least, done);
          most = std::max(most, done);
        }
        ASSERT_EQ(left.k_tiles, 0) << "no worker computes the rest";
        ASSERT_LE(most - least, 1);
        ASSERT_EQ(std::ranges::count(times, 1), tiles * k_tiles);
      }
    }
  }
}

// Tiles are not shared if 32 bits cannot count their k-tiles.
TEST(MatmulPieces, TilesOfTooManyStepsStayWhole) {
  constexpr int kWorkers = 132, kTiles = 2 * kWorkers + 1, kMost = std::numeric_limits<int>::max();
  const Sharing sharing = ShareTiles(kTiles, kMost / (kWorkers + 1), kWorkers);
  EXPECT_EQ(sharing.shared, kWorkers + 1);
  const Sharing whole = ShareTiles(kTiles, kMost / (kWorkers + 1) + 1, kWorkers);
  EXPECT_EQ(whole.shared, 0);
  EXPECT_EQ(whole.rounds, 3);
}

// The strategy takes one product at a time, and the second product cancels the request.
TEST(MatmulStacks, CancellationStopsBetweenProducts) {
  static std::atomic<bool> stop;
  static int launches;
  static void* scratch;
  stop = false;
  launches = 0;
  constexpr Strategy<MatmulProblem> kStopping = {
      .name = "stopping", .launch = [](const MatmulProblem& p, Stream& stream) {
        EXPECT_EQ(p.stack, 1);
        EXPECT_EQ(static_cast<const float*>(p.a) - static_cast<const float*>(p.b), 3 * launches);
        void* const memory = stream.Scratch(1000);
        EXPECT_EQ(memory, launches == 0 ? memory : scratch) << "the products share it";
        scratch = memory;
        stop = ++launches == 2;
      }};
  Stream& stream = TestStream(Backend::kCpu);
  float values[100];
  MatmulProblem problem{.m = 1, .n = 1, .k = 1, .a = values, .lda = 1, .b = values, .ldb = 1};
  problem.stack = 5;
  problem.stack_rank = 1;
  problem.stack_axes[0] = {5, 3, 0};
  problem.c = values;
  stream.WatchStop(&stop);
  LaunchOn(stream, problem, kStopping);
  stream.WatchStop(nullptr);
  EXPECT_EQ(launches, 2);
}

// The costs and the checks of a stack depend on all its products.
TEST(MatmulStacks, CostsAndScratchMemory) {
  Stream& stream = TestStream(Backend::kCpu);
  // The matrices have steps, so they are copied, but none of them twice.
  const StridedWindow repeated{0, {1000, 4, 3}, {0, 8, 2}}, matrices{0, {1000, 3, 5}, {15, 5, 1}};
  const View a = repeated.Of(nullptr, DType::kF32), b = matrices.Of(nullptr, DType::kF32);
  Pace pace(stream.device().info());
  const auto check = [&](double most_seconds) {
    return RunMatmul(
        stream, a, b, false, false, DType::kF32, nullptr,
        {.strategy = "cpu_naive", .pace = &pace, .max_seconds = most_seconds, .check_only = true});
  };
  const Stats stats = Get(check(1));
  EXPECT_EQ(stats.scratch_bytes, 4 * 3 * sizeof(float));
  EXPECT_EQ(stats.flops, 2 * 1000 * 4 * 5 * 3u);
  EXPECT_EQ(ErrorReason(check(10e-9 * 1000).status()), "OPERATION_TOO_LONG");
}

TEST(MatmulErrors, OperandsThatDoNotFit) {
  const View a = WholeView({DType::kF32, MakeShape({3, 4})}, nullptr);
  const View b = WholeView({DType::kF32, MakeShape({5, 6})}, nullptr);
  const View vector = WholeView({DType::kF32, MakeShape({4})}, nullptr);
  const View doubles = WholeView({DType::kF64, MakeShape({4, 3})}, nullptr);
  EXPECT_EQ(ErrorReason(MatmulType(a, b, false, false, DType::kF32).status()), "BAD_SHAPE");
  EXPECT_EQ(ErrorReason(MatmulType(vector, a, false, false, DType::kF32).status()), "BAD_SHAPE");
  const View number = WholeView({DType::kF32, MakeShape({})}, nullptr);
  EXPECT_THAT(MatmulType(a, number, false, false, DType::kF32).status().message(),
              testing::HasSubstr("both must have rank 1 or more"));
  const View three = WholeView({DType::kF32, MakeShape({3, 4, 4})}, nullptr);
  const View two = WholeView({DType::kF32, MakeShape({2, 4, 4})}, nullptr);
  EXPECT_THAT(MatmulType(three, two, false, false, DType::kF32).status().message(),
              testing::HasSubstr("the leading extents 3 and 2 must agree"));
  EXPECT_EQ(ErrorReason(MatmulType(a, doubles, false, false, DType::kF32).status()), "BAD_DTYPE");
  for (DType dtype : kArrayDTypes) {
    const View x = WholeView({dtype, MakeShape({3, 4})}, nullptr);
    for (DType out_dtype : kAllDTypes) {
      EXPECT_EQ(ErrorReason(MatmulType(x, x, false, true, out_dtype).status()),
                IsMatmulPair(dtype, out_dtype) ? "" : "BAD_DTYPE")
          << Name(dtype) << " to " << Name(out_dtype);
    }
  }
  const View u8 = WholeView({DType::kU8, MakeShape({4, 4})}, nullptr);
  const View i8 = WholeView({DType::kI8, MakeShape({4, 4})}, nullptr);
  const View i32 = WholeView({DType::kI32, MakeShape({4, 4})}, nullptr);
  EXPECT_TRUE(MatmulType(u8, i8, false, false, DType::kI32).ok());
  EXPECT_EQ(ErrorReason(MatmulType(i8, i32, false, false, DType::kI32).status()), "BAD_DTYPE");
  const View wide = WholeView({DType::kF32, MakeShape({std::int64_t{1} << 40, 0})}, nullptr);
  EXPECT_EQ(ErrorReason(MatmulType(wide, wide, false, true, DType::kF32).status()), "BAD_SHAPE");
}

}  // namespace
}  // namespace tessera::test
