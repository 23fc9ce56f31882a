// Every strategy of Linalg in the table. Results are not unique (vectors may have either sign), so
// they are checked by what defines them, with products in long double: L L' = x, x y = b and so on,
// within the stated bound on the backward error.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/run/operation.h"
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

using Real = long double;

// A small matrix with exact arithmetic, as far as these checks are concerned.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
  std::vector<Real> all = {};

  Matrix(std::int64_t r, std::int64_t c)
      : rows(r), columns(c), all(static_cast<std::size_t>(r * c)) {}
  Real& operator()(std::int64_t i, std::int64_t j) {
    return all[static_cast<std::size_t>(i * columns + j)];
  }
  Real operator()(std::int64_t i, std::int64_t j) const {
    return all[static_cast<std::size_t>(i * columns + j)];
  }
  Real Norm() const {
    Real sum = 0;
    for (Real x : all) sum += x * x;
    return std::sqrt(sum);
  }
  Matrix Transposed() const {
    Matrix out(columns, rows);
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < columns; ++j) out(j, i) = (*this)(i, j);
    return out;
  }
  // Returns rows [first, end).
  Matrix Rows(std::int64_t first, std::int64_t end) const {
    Matrix out(end - first, columns);
    for (std::int64_t i = first; i < end; ++i)
      for (std::int64_t j = 0; j < columns; ++j) out(i - first, j) = (*this)(i, j);
    return out;
  }
};

Matrix Identity(std::int64_t n) {
  Matrix out(n, n);
  for (std::int64_t i = 0; i < n; ++i) out(i, i) = 1;
  return out;
}

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix out(a.rows, b.columns);
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t l = 0; l < a.columns; ++l)
      for (std::int64_t j = 0; j < b.columns; ++j) out(i, j) += a(i, l) * b(l, j);
  return out;
}

Matrix operator-(Matrix a, const Matrix& b) {
  for (std::size_t i = 0; i < a.all.size(); ++i) a.all[i] -= b.all[i];
  return a;
}

// Returns the sign and the logarithm of the determinant, by elimination with full pivoting.
std::pair<Real, Real> Determinant(Matrix x) {
  Real sign = 1, log = 0;
  for (std::int64_t j = 0; j < x.rows; ++j) {
    std::int64_t row = j, column = j;
    for (std::int64_t i = j; i < x.rows; ++i)
      for (std::int64_t c = j; c < x.rows; ++c)
        if (std::abs(x(i, c)) > std::abs(x(row, column))) row = i, column = c;
    if (x(row, column) == 0) return {0, -std::numeric_limits<Real>::infinity()};
    for (std::int64_t c = 0; row != j && c < x.rows; ++c) std::swap(x(row, c), x(j, c));
    for (std::int64_t i = 0; column != j && i < x.rows; ++i) std::swap(x(i, column), x(i, j));
    if ((row != j) != (column != j)) sign = -sign;
    sign = x(j, j) < 0 ? -sign : sign;
    log += std::log(std::abs(x(j, j)));
    for (std::int64_t i = j + 1; i < x.rows; ++i) {
      const Real factor = x(i, j) / x(j, j);
      for (std::int64_t c = j; c < x.rows; ++c) x(i, c) -= factor * x(j, c);
    }
  }
  return {sign, log};
}

class LinalgTest : public StrategyTest<LinalgProblem> {
 protected:
  // Whether the strategy computes the function.
  static bool Has(LinalgFunction function) {
    return Refusal(strategy(), LinalgProblem{.function = function, .m = 2, .n = 2}).empty();
  }

  static absl::StatusOr<ScalarResult> Run(LinalgFunction function, std::vector<View> operands,
                                          void* out) {
    return tessera::Run(LinalgSpec{function}, stream(), operands, {out}, options());
  }

  // Returns the matrix at `at` of a stack, as the function reads it: EIGH and CHOLESKY read the
  // lower triangle.
  template <class T>
  static Matrix MatrixOf(const std::vector<T>& all, std::int64_t at, std::int64_t rows,
                         std::int64_t columns) {
    Matrix out(rows, columns);
    for (std::int64_t i = 0; i < rows * columns; ++i)
      out.all[static_cast<std::size_t>(i)] = Exact(At(all, at * rows * columns + i));
    return out;
  }

  static void Symmetrise(Matrix& x) {
    for (std::int64_t i = 0; i < x.rows; ++i)
      for (std::int64_t j = i + 1; j < x.columns; ++j) x(i, j) = x(j, i);
  }

  // Makes a matrix positive definite by a large diagonal.
  template <class T>
  static void AddToDiagonal(std::vector<T>& all, std::int64_t n, double more) {
    for (std::size_t at = 0; at < all.size(); ++at) {
      const auto i = static_cast<std::int64_t>(at) % (n * n);
      if (i / n == i % n) all[at] = static_cast<T>(std::abs(all[at]) + static_cast<T>(more));
    }
  }

  // Checks the result of one matrix.
  static void CheckOne(LinalgFunction function, Matrix x, const Matrix& b, const Matrix& out,
                       Real bound) {
    const std::int64_t m = x.rows, n = x.columns, k = std::min(m, n);
    const auto orthonormal = [&](const Matrix& q) {
      EXPECT_LE((q.Transposed() * q - Identity(k)).Norm(), bound * std::sqrt(Real(k)));
    };
    const Real size = x.Norm();
    switch (function) {
      case LinalgFunction::kCholesky:
        Symmetrise(x);
        for (std::int64_t i = 0; i < n; ++i)
          for (std::int64_t j = i + 1; j < n; ++j) ASSERT_EQ(out(i, j), 0);
        EXPECT_LE((out * out.Transposed() - x).Norm(), bound * x.Norm());
        break;
      case LinalgFunction::kSolve:
        EXPECT_LE((x * out - b).Norm(), bound * (size * out.Norm() + b.Norm()));
        break;
      case LinalgFunction::kInverse:
        EXPECT_LE((x * out - Identity(n)).Norm(), bound * (size * out.Norm() + 1));
        break;
      case LinalgFunction::kDeterminant: {
        const auto [sign, log] = Determinant(x);
        EXPECT_EQ(out(0, 0), sign);
        if (sign == 0) EXPECT_EQ(out(0, 1), log);
        if (sign != 0) EXPECT_NEAR(out(0, 1), log, bound * 1000 * (1 + std::abs(log)));
        break;
      }
      case LinalgFunction::kEigh: {
        Symmetrise(x);
        const Matrix v = out.Rows(1, n + 1);
        Matrix scaled = v;
        for (std::int64_t i = 0; i < n; ++i)
          for (std::int64_t j = 0; j < n; ++j) scaled(i, j) *= out(0, j);
        for (std::int64_t j = 1; j < n; ++j) EXPECT_LE(out(0, j - 1), out(0, j));
        EXPECT_LE((x * v - scaled).Norm(), bound * x.Norm());
        orthonormal(v);
        break;
      }
      case LinalgFunction::kQr: {
        const Matrix q = out.Rows(0, m), r = out.Rows(m, m + n).Transposed();
        for (std::int64_t i = 0; i < k; ++i)
          for (std::int64_t j = 0; j < i; ++j) ASSERT_EQ(r(i, j), 0);
        EXPECT_LE((q * r - x).Norm(), bound * size);
        orthonormal(q);
        break;
      }
      case LinalgFunction::kSvd: {
        const Matrix u = out.Rows(0, m), v = out.Rows(m + 1, m + 1 + n);
        Matrix scaled = u;
        for (std::int64_t i = 0; i < m; ++i)
          for (std::int64_t j = 0; j < k; ++j) scaled(i, j) *= out(m, j);
        for (std::int64_t j = 0; j < k; ++j) {
          EXPECT_GE(out(m, j), 0);
          if (j > 0) EXPECT_GE(out(m, j - 1), out(m, j));
        }
        EXPECT_LE((scaled * v.Transposed() - x).Norm(), bound * size);
        orthonormal(u);
        orthonormal(v);
        break;
      }
    }
  }

  // Computes a stack and checks each of its matrices, or some of them if there are many.
  template <class T>
  static void Check(LinalgFunction function, const std::vector<T>& host, std::int64_t stack,
                    std::int64_t m, std::int64_t n, std::int64_t columns = 1) {
    SCOPED_TRACE(testing::Message() << Name(function) << " " << stack << " of " << m << "x" << n
                                    << ", " << columns << " right sides");
    const bool solves = function == LinalgFunction::kSolve;
    const auto right = NormalVector<T>(solves ? stack * n * columns : 0, 77);
    DeviceArray<T> x(stream(), host), b(stream(), right);
    std::vector<View> operands = {Whole({stack, m, n}).Of(x.data(), GetParam().dtype)};
    if (solves) operands.push_back(Whole({stack, n, columns}).Of(b.data(), GetParam().dtype));
    const ResultType type = Get(TypeOf(LinalgSpec{function}, operands));
    DeviceArray<T> out(stream(), type.arrays.at(0).shape.elements());
    const auto run = Run(function, operands, out.data());
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->stats.strategy, GetParam().name);
    x.ExpectUnchanged(host);
    b.ExpectUnchanged(right);
    if (out.Values().empty()) return;
    const std::vector<T> got = out.Values();
    const LinalgProblem p{.function = function, .stack = stack, .m = m, .n = n, .columns = columns};
    const std::int64_t step = 1 + stack / 20;
    for (std::int64_t i = 0; i < stack; i += step) {
      CheckOne(function, MatrixOf(host, i, m, n),
               solves ? MatrixOf(right, i, n, columns) : Matrix(0, 0),
               MatrixOf(got, i, p.out_rows(), p.out_columns()), run->stats.roundoff);
    }
  }

  // Checks random matrices of this size.
  template <class T>
  static void CheckSize(std::int64_t stack, std::int64_t m, std::int64_t n,
                        std::uint64_t seed = 1) {
    for (LinalgFunction function : kAllLinalgFunctions) {
      const bool square = function != LinalgFunction::kQr && function != LinalgFunction::kSvd;
      if (!Has(function) || (square && m != n)) continue;
      auto x = NormalVector<T>(stack * m * n, seed);
      if (function == LinalgFunction::kCholesky) AddToDiagonal(x, n, static_cast<double>(n) * 2);
      Check(function, x, stack, m, n, 1 + (m + n) % 5);
    }
  }
};

TESSERA_TYPED_TEST_OF(FloatElement, LinalgTest, EverySize) {
  if constexpr (!HalfElement<T>) {
    for (std::int64_t n : {1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 64, 65, 100, 129})
      if (!WatchedClosely() || n < 20) CheckSize<T>(1 + 100 / (n * n), n, n);
    if (!WatchedClosely()) CheckSize<T>(1, 260, 260);
  }
}

TESSERA_TYPED_TEST_OF(FloatElement, LinalgTest, TallAndWideMatrices) {
  if constexpr (!HalfElement<T>) {
    for (std::int64_t m : {1, 2, 5, 32, 33, 70})
      for (std::int64_t n : {1, 3, 20, 33, 90})
        if (!WatchedClosely() || m * n < 200) CheckSize<T>(2, m, n);
  }
}

TESSERA_TYPED_TEST_OF(FloatElement, LinalgTest, ManySmallMatrices) {
  if constexpr (!HalfElement<T>) {
    // OpenBLAS divides even small triangular systems among threads, which wait for each other.
    const std::int64_t stack = WatchedClosely() || strategy().vendor ? 100 : 5000;
    for (std::int64_t n : {1, 2, 4, 8}) CheckSize<T>(stack, n, n, 5);
    CheckSize<T>(stack / 5, 6, 3, 6);
  }
}

// Equal eigenvalues, zeros, matrices of low rank, and elements of very different sizes.
TESSERA_TYPED_TEST_OF(FloatElement, LinalgTest, SpecialMatrices) {
  if constexpr (!HalfElement<T>) {
    const std::int64_t n = 12;
    const auto fill = [&](auto element) {
      std::vector<T> x;
      for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t j = 0; j < n; ++j) x.push_back(static_cast<T>(element(i, j)));
      return x;
    };
    const auto zero = fill([](auto, auto) { return 0; });
    const auto one = fill([](auto i, auto j) { return i == j; });
    const auto same = fill([](auto, auto) { return 3; });
    const auto low = fill([](auto i, auto j) { return (i - 3) * (j + 1); });
    const auto graded = fill([](auto i, auto j) { return std::exp2(-i - j) * (1 + (i * j) % 3); });
    const auto large =
        fill([](auto i, auto j) { return (i == j ? 3e18 : 1e18) * ((i + j) % 2 + 1); });
    const auto permuted = fill([](auto i, auto j) { return (i + 5) % 12 == j; });
    for (double unit : {1e-40, 3e37}) {
      auto x = NormalVector<T>(n * n, 4);
      for (T& element : x) element *= static_cast<T>(unit);
      Check(LinalgFunction::kEigh, x, 1, n, n);
    }
    for (LinalgFunction function :
         {LinalgFunction::kEigh, LinalgFunction::kQr, LinalgFunction::kSvd}) {
      if (!Has(function)) continue;
      for (const auto& x : {zero, one, same, low, graded, large}) Check(function, x, 1, n, n);
    }
    for (LinalgFunction function :
         {LinalgFunction::kSolve, LinalgFunction::kInverse, LinalgFunction::kDeterminant})
      for (const auto& x : {one, permuted, large}) Check(function, x, 1, n, n);
    for (const auto& x : {zero, same}) Check(LinalgFunction::kDeterminant, x, 1, n, n);
    Check(LinalgFunction::kCholesky, one, 1, n, n);
  }
}

// The first matrix without a result is named, and an error leaves no trace in the next result.
TESSERA_TYPED_TEST_OF(FloatElement, LinalgTest, BadMatrices) {
  if constexpr (!HalfElement<T>) {
    const std::int64_t n = 5;
    const auto bad = [&](LinalgFunction function, std::int64_t stack, std::int64_t at, T element) {
      if (!Has(function)) return;
      SCOPED_TRACE(testing::Message() << Name(function) << " " << at);
      auto x = NormalVector<T>(stack * n * n, 9);
      AddToDiagonal(x, n, 20);
      for (std::int64_t i = 0; i < n; ++i) At(x, (at * n + i) * n) = element;
      if (element == 0) At(x, (stack - 1) * n * n) = 0;
      DeviceArray<T> in(stream(), x), out(stream(), stack * (n + 1 + n) * n);
      std::vector<View> operands = {Whole({stack, n, n}).Of(in.data(), GetParam().dtype)};
      if (function == LinalgFunction::kSolve) operands.push_back(operands[0]);
      const absl::Status status = Run(function, operands, out.data()).status();
      EXPECT_EQ(ErrorReason(status), "BAD_MATRIX") << status;
      EXPECT_EQ(ErrorMetadata(status)["position"], absl::StrCat(at));
    };
    const T nan = std::numeric_limits<T>::quiet_NaN(), infinite = static_cast<T>(kInfinity);
    for (std::int64_t at : {0, 40, 99}) {
      for (LinalgFunction function :
           {LinalgFunction::kCholesky, LinalgFunction::kSolve, LinalgFunction::kInverse})
        bad(function, 100, at, 0);
      bad(LinalgFunction::kCholesky, 100, at, -1);
      for (LinalgFunction function :
           {LinalgFunction::kEigh, LinalgFunction::kSvd, LinalgFunction::kCholesky}) {
        bad(function, 100, at, nan);
        bad(function, 1, 0, infinite);
      }
    }
    CheckSize<T>(3, n, n);
  }
}

// NaN goes through elimination, and does not count as a singular matrix.
TESSERA_TYPED_TEST_OF(FloatElement, LinalgTest, SolutionsWithNaN) {
  if constexpr (!HalfElement<T>) {
    auto x = NormalVector<T>(16, 3);
    At(x, 5) = std::numeric_limits<T>::quiet_NaN();
    DeviceArray<T> in(stream(), x), out(stream(), 16);
    const View view = Whole({4, 4}).Of(in.data(), GetParam().dtype);
    for (LinalgFunction function : {LinalgFunction::kInverse, LinalgFunction::kDeterminant}) {
      ASSERT_TRUE(Run(function, {view}, out.data()).ok());
      EXPECT_TRUE(std::isnan(out.Values()[0]) || std::isnan(out.Values()[1]));
    }
  }
}

// Strided matrices, and stacks that are broadcast.
TESSERA_TYPED_TEST_OF(FloatElement, LinalgTest, Views) {
  if constexpr (!HalfElement<T>) {
    const auto host = NormalVector<T>(6000, 21);
    DeviceArray<T> array(stream(), host);
    const auto read = [&](const StridedWindow& window, std::int64_t rows, std::int64_t columns,
                          std::int64_t at) {
      Matrix out(rows, columns);
      for (std::int64_t i = 0; i < rows * columns; ++i)
        out.all[static_cast<std::size_t>(i)] =
            Exact(At(host, PlaceIn(window, at * rows * columns + i)));
      return out;
    };
    const StridedWindow x{5999, {3, 1, 7, 7}, {-1, 0, -300, -11}};
    const StridedWindow b{2, {4, 7, 2}, {1000, 3, 29}};
    const View left = x.Of(array.data(), GetParam().dtype),
               right = b.Of(array.data(), GetParam().dtype);
    const ResultType type = Get(TypeOf(LinalgSpec{LinalgFunction::kSolve}, {left, right}));
    ASSERT_EQ(ToString(type.arrays[0].shape), "[3, 4, 7, 2]");
    DeviceArray<T> out(stream(), 3 * 4 * 7 * 2);
    const auto run = Run(LinalgFunction::kSolve, {left, right}, out.data());
    ASSERT_TRUE(run.ok()) << run.status();
    for (std::int64_t i = 0; i < 12; ++i)
      CheckOne(LinalgFunction::kSolve, read(x, 7, 7, i / 4), read(b, 7, 2, i % 4),
               MatrixOf(out.Values(), i, 7, 2), run->stats.roundoff);
    const StridedWindow turned{0, {30, 20}, {1, 30}};
    DeviceArray<T> factors(stream(), 50 * 20);
    ASSERT_TRUE(
        Run(LinalgFunction::kQr, {turned.Of(array.data(), GetParam().dtype)}, factors.data()).ok());
    CheckOne(LinalgFunction::kQr, read(turned, 30, 20, 0), Matrix(0, 0),
             MatrixOf(factors.Values(), 0, 50, 20), run->stats.roundoff * 5);
  }
}

TESSERA_TYPED_TEST_OF(FloatElement, LinalgTest, EmptyMatrices) {
  if constexpr (!HalfElement<T>) {
    for (LinalgFunction function : kAllLinalgFunctions) {
      if (!Has(function)) continue;
      Check<T>(function, {}, 0, 3, 3);
      Check<T>(function, {}, 2, 0, 0);
    }
    for (LinalgFunction function : {LinalgFunction::kQr, LinalgFunction::kSvd})
      if (Has(function)) Check<T>(function, {}, 2, 4, 0);
    Check(LinalgFunction::kSolve, NormalVector<T>(9, 1), 1, 3, 3, 0);
  }
}

TESSERA_STRATEGIES(LinalgTest);

TEST(LinalgErrors, OperandsThatDoNotFit) {
  using Extents = std::vector<std::int64_t>;
  const auto view = [](const Extents& shape, DType dtype = DType::kF32) {
    return Whole(shape).Of(nullptr, dtype);
  };
  const auto reason = [](LinalgFunction function, std::vector<View> operands) {
    return ErrorReason(TypeOf(LinalgSpec{function}, operands).status());
  };
  const View x = view({2, 3, 3});
  for (LinalgFunction function : kAllLinalgFunctions) {
    const bool solves = function == LinalgFunction::kSolve;
    const bool square = function != LinalgFunction::kQr && function != LinalgFunction::kSvd;
    const auto of = [&](const View& one) {
      return reason(function, solves ? std::vector<View>{one, one} : std::vector<View>{one});
    };
    EXPECT_EQ(of(x), "");
    EXPECT_EQ(reason(function, solves ? std::vector<View>{x} : std::vector<View>{x, x}),
              "BAD_OPERAND");
    EXPECT_EQ(of(view({})), "BAD_SHAPE");
    EXPECT_EQ(of(view({3})), "BAD_SHAPE");
    EXPECT_EQ(of(view({2, 3})), square ? "BAD_SHAPE" : "");
    EXPECT_EQ(of(view({20'000, 20'000})), "");
    EXPECT_EQ(of(view({20'001, 20'001})), "BAD_SHAPE");
    for (DType dtype : kArrayDTypes) {
      const bool fits = dtype == DType::kF32 || dtype == DType::kF64;
      EXPECT_EQ(of(view({3, 3}, dtype)), fits ? "" : "BAD_DTYPE") << Name(dtype);
    }
  }
  const auto solve = [&](const View& b) { return reason(LinalgFunction::kSolve, {x, b}); };
  EXPECT_EQ(solve(view({3, 9})), "");
  EXPECT_EQ(solve(view({5, 1, 3, 9})), "");
  for (const Extents& shape : {Extents{3}, {4, 9}, {3, 3, 9}})
    EXPECT_EQ(solve(view(shape)), "BAD_SHAPE");
  EXPECT_EQ(solve(view({3, 9}, DType::kF64)), "BAD_DTYPE");
}

}  // namespace
}  // namespace tessera::test
