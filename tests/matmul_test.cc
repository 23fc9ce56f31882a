// Every strategy of Matmul and Add, from the table: awkward shapes, all transposes, pitches and
// strided views, against references in double with the row's own bound.
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

struct MatmulShape {
  std::int64_t m, n, k;
};

class MatmulTest : public testing::TestWithParam<RowCase> {
 protected:
  // a and b are views of host memory, shaped alike to the device's views.
  template <class T>
  void Check(const View& host_a, const View& host_b, const View& a, const View& b, bool transpose_a,
             bool transpose_b, Launch launch = {}) {
    Lane& lane = TestLane(GetParam().backend);
    const auto type = MatmulType(a, b, transpose_a, transpose_b, GetParam().dtype);
    ASSERT_TRUE(type.ok()) << type.status();
    const std::int64_t m = type->shape[0], n = type->shape[1], k = a.shape[transpose_a ? 0 : 1];
    DeviceArray<T> c(lane, m * n);
    const auto stats = RunMatmul(lane, a, b, transpose_a, transpose_b, GetParam().dtype, c.data(),
                                 {.strategy = GetParam().name, .launch = launch});
    ASSERT_TRUE(stats.ok()) << stats.status();
    EXPECT_EQ(stats->flops, static_cast<std::uint64_t>(2 * m * n * k));
    const std::vector<T> got = c.Values();
    const auto at = [](const View& v, bool transpose, std::int64_t i, std::int64_t j) {
      return static_cast<double>(static_cast<const T*>(
          v.data)[i * v.strides[transpose ? 1 : 0] + j * v.strides[transpose ? 0 : 1]]);
    };
    const double output = sizeof(T) == 4 ? kRoundoffF32 : kRoundoffF64;
    // Large results are checked at random places, small ones everywhere.
    Random random(42);
    const std::int64_t checks =
        std::min<std::int64_t>(m * n, 2'000'000 / std::max<std::int64_t>(1, k) + 64);
    for (std::int64_t check = 0; check < checks; ++check) {
      const std::int64_t e =
          checks == m * n
              ? check
              : static_cast<std::int64_t>(random.Bits() % static_cast<std::uint64_t>(m * n));
      const std::int64_t i = e / n, j = e % n;
      long double sum = 0, magnitude = 0;
      for (std::int64_t l = 0; l < k; ++l) {
        const long double product =
            static_cast<long double>(at(host_a, transpose_a, i, l)) * at(host_b, transpose_b, l, j);
        sum += product;
        magnitude += std::abs(product);
      }
      ASSERT_LE(std::abs(static_cast<double>(got[static_cast<std::size_t>(e)] - sum)),
                stats->roundoff * static_cast<double>(magnitude) +
                    output * std::abs(static_cast<double>(sum)))
          << "element " << i << ", " << j << " of " << m << " x " << n << " x " << k
          << " transposes " << transpose_a << transpose_b << " got "
          << got[static_cast<std::size_t>(e)] << " want " << static_cast<double>(sum);
    }
  }

  template <class T>
  void CheckShape(MatmulShape s, bool transpose_a, bool transpose_b, Launch launch = {}) {
    const ArrayType type_a{GetParam().dtype,
                           transpose_a ? MakeShape({s.k, s.m}) : MakeShape({s.m, s.k})};
    const ArrayType type_b{GetParam().dtype,
                           transpose_b ? MakeShape({s.n, s.k}) : MakeShape({s.k, s.n})};
    const std::vector<T> a = NormalVector<T>(s.m * s.k, 1), b = NormalVector<T>(s.k * s.n, 2);
    Lane& lane = TestLane(GetParam().backend);
    DeviceArray<T> da(lane, a, 1), db(lane, b, 3);
    Check<T>(WholeView(type_a, a.data()), WholeView(type_b, b.data()), WholeView(type_a, da.data()),
             WholeView(type_b, db.data()), transpose_a, transpose_b, launch);
  }
};

TEST_P(MatmulTest, ShapesAndTransposes) {
  TESSERA_NEED_ROW(MatmulProblem, GetParam());
  DispatchType(GetParam().dtype, [&](auto t) {
    using T = decltype(t);
    for (const MatmulShape& s : {MatmulShape{1, 1, 1},
                                 {2, 3, 4},
                                 {31, 33, 32},
                                 {64, 64, 64},
                                 {65, 127, 129},
                                 {1, 4099, 7},
                                 {257, 1, 255},
                                 {1, 1, 4099},
                                 {128, 128, 8},
                                 {100, 200, 517},
                                 {129, 257, 1},
                                 {17, 300, 3}})
      for (int transposes = 0; transposes < 4; ++transposes)
        CheckShape<T>(s, transposes & 1, transposes & 2);
  });
}

TEST_P(MatmulTest, EmptyExtents) {
  TESSERA_NEED_ROW(MatmulProblem, GetParam());
  DispatchType(GetParam().dtype, [&](auto t) {
    using T = decltype(t);
    for (const MatmulShape& s : {MatmulShape{0, 5, 3}, {5, 0, 3}, {5, 7, 0}, {0, 0, 0}})
      for (int transposes = 0; transposes < 4; ++transposes)
        CheckShape<T>(s, transposes & 1, transposes & 2);
  });
}

TEST_P(MatmulTest, Launches) {
  TESSERA_NEED_ROW(MatmulProblem, GetParam());
  DispatchType(GetParam().dtype, [&](auto t) {
    for (const Launch& launch : Launches(Row<MatmulProblem>(GetParam()).limits))
      CheckShape<decltype(t)>({67, 130, 70}, false, true, launch);
  });
}

TEST_P(MatmulTest, StridedViews) {
  TESSERA_NEED_ROW(MatmulProblem, GetParam());
  DispatchType(GetParam().dtype, [&](auto t) {
    using T = decltype(t);
    const ArrayType type{GetParam().dtype, MakeShape({60, 80})};
    const std::vector<T> values = NormalVector<T>(60 * 80, 3);
    Lane& lane = TestLane(GetParam().backend);
    DeviceArray<T> array(lane, values, 1);
    struct Window {
      std::int64_t offset;
      std::vector<std::int64_t> shape, strides;
    };
    // [33, 17] windows: a block with a pitch, its transpose, reversed rows, every third column, one
    // row repeated.
    const Window windows[] = {{81, {33, 17}, {80, 1}},       {5, {33, 17}, {1, 80}},
                              {59 * 80, {33, 17}, {-80, 1}}, {2, {33, 17}, {80, 3}},
                              {7, {33, 17}, {0, 1}},         {7, {33, 17}, {80, 0}}};
    for (const Window& wa : windows) {
      for (const Window& wb : windows) {
        const auto ha = MakeView(type, values.data(), wa.offset, wa.shape, wa.strides);
        const auto hb = MakeView(type, values.data(), wb.offset, wb.shape, wb.strides);
        const auto a = MakeView(type, array.data(), wa.offset, wa.shape, wa.strides);
        const auto b = MakeView(type, array.data(), wb.offset, wb.shape, wb.strides);
        ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
        Check<T>(*ha, *hb, *a, *b, false, true);
        Check<T>(*ha, *hb, *a, *b, true, false);
      }
    }
  });
}

TEST_P(MatmulTest, Large) {
  TESSERA_NEED_ROW(MatmulProblem, GetParam());
  const bool gpu = GetParam().backend == Backend::kCuda;
  DispatchType(GetParam().dtype, [&](auto t) {
    CheckShape<decltype(t)>(gpu ? MatmulShape{2049, 3001, 1027} : MatmulShape{257, 513, 300}, false,
                            false);
    CheckShape<decltype(t)>(gpu ? MatmulShape{70003, 5, 64} : MatmulShape{7003, 5, 64}, false,
                            true);
    CheckShape<decltype(t)>(gpu ? MatmulShape{5, 70003, 64} : MatmulShape{5, 7003, 64}, false,
                            true);
  });
}

INSTANTIATE_TEST_SUITE_P(Rows, MatmulTest, testing::ValuesIn(RowCases<MatmulProblem>()), CaseName);

TEST(MatmulErrors, OperandsThatDoNotFit) {
  const View a = WholeView({DType::kF32, MakeShape({3, 4})}, nullptr);
  const View b = WholeView({DType::kF32, MakeShape({5, 6})}, nullptr);
  const View vector = WholeView({DType::kF32, MakeShape({4})}, nullptr);
  const View doubles = WholeView({DType::kF64, MakeShape({4, 3})}, nullptr);
  EXPECT_EQ(ErrorReason(MatmulType(a, b, false, false, DType::kF32).status()), "BAD_SHAPE");
  EXPECT_EQ(ErrorReason(MatmulType(a, vector, false, false, DType::kF32).status()), "BAD_SHAPE");
  EXPECT_EQ(ErrorReason(MatmulType(a, doubles, false, false, DType::kF32).status()), "BAD_DTYPE");
  EXPECT_EQ(ErrorReason(MatmulType(a, a, false, true, DType::kF64).status()), "BAD_DTYPE");
  const View wide = WholeView({DType::kF32, MakeShape({std::int64_t{1} << 40, 0})}, nullptr);
  EXPECT_EQ(ErrorReason(MatmulType(wide, wide, false, true, DType::kF32).status()), "BAD_SHAPE");
}

class AddTest : public testing::TestWithParam<RowCase> {};

TEST_P(AddTest, SizesAndAlignments) {
  TESSERA_NEED_ROW(AddProblem, GetParam());
  DispatchType(GetParam().dtype, [&](auto t) {
    using T = decltype(t);
    Lane& lane = TestLane(GetParam().backend);
    for (std::int64_t n : AwkwardSizes()) {
      const std::vector<T> a = NormalVector<T>(n, 1), b = NormalVector<T>(n, 2);
      DeviceArray<T> da(lane, a, 1), db(lane, b, 2), out(lane, n);
      const auto stats = RunAdd(lane, VectorView(da.data(), n), VectorView(db.data(), n),
                                out.data(), {.strategy = GetParam().name});
      ASSERT_TRUE(stats.ok()) << stats.status();
      const std::vector<T> got = out.Values();
      for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], a[i] + b[i]) << i;
    }
  });
}

TEST_P(AddTest, RepeatsARowByStrideZero) {
  TESSERA_NEED_ROW(AddProblem, GetParam());
  DispatchType(GetParam().dtype, [&](auto t) {
    using T = decltype(t);
    Lane& lane = TestLane(GetParam().backend);
    const std::vector<T> matrix = NormalVector<T>(300 * 70, 1), row = NormalVector<T>(70, 2);
    DeviceArray<T> dm(lane, matrix), dr(lane, row), out(lane, 300 * 70);
    const auto repeated =
        MakeView({GetParam().dtype, MakeShape({70})}, dr.data(), 0, {300, 70}, {0, 1});
    ASSERT_TRUE(repeated.ok()) << repeated.status();
    const View whole = WholeView({GetParam().dtype, MakeShape({300, 70})}, dm.data());
    const auto stats = RunAdd(lane, whole, *repeated, out.data(), {.strategy = GetParam().name});
    ASSERT_TRUE(stats.ok()) << stats.status();
    const std::vector<T> got = out.Values();
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], matrix[i] + row[i % 70]) << i;
  });
}

INSTANTIATE_TEST_SUITE_P(Rows, AddTest, testing::ValuesIn(RowCases<AddProblem>()), CaseName);

}  // namespace
}  // namespace tessera::test
