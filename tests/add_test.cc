// Every strategy of Add, from the table: awkward sizes, alignments and strided views, against sums
// that are rounded once.
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

class AddTest : public StrategyTest<AddProblem> {};

TEST_P(AddTest, SizesAndAlignments) {
  ForType([&]<class T>(T) {
    for (std::int64_t n : AwkwardSizes()) {
      const std::vector<T> a = NormalVector<T>(n, 1), b = NormalVector<T>(n, 2);
      DeviceArray<T> da(stream(), a, 1), db(stream(), b, 2), out(stream(), n);
      const auto stats = RunAdd(stream(), VectorView(da.data(), n), VectorView(db.data(), n),
                                out.data(), options());
      ASSERT_TRUE(stats.ok()) << stats.status();
      const std::vector<T> got = out.Values();
      for (std::size_t i = 0; i < got.size(); ++i)
        ASSERT_EQ(Exact(got[i]),
                  Exact(static_cast<T>(WrapAdd<ValueOf<T>>(static_cast<ValueOf<T>>(a[i]),
                                                           static_cast<ValueOf<T>>(b[i])))))
            << i;
    }
  });
}

TEST_P(AddTest, RepeatsARowByStrideZero) {
  ForType([&]<class T>(T) {
    const std::vector<T> matrix = NormalVector<T>(300 * 70, 1), strategy = NormalVector<T>(70, 2);
    DeviceArray<T> dm(stream(), matrix), dr(stream(), strategy), out(stream(), 300 * 70);
    const auto repeated =
        MakeView({GetParam().dtype, MakeShape({70})}, dr.data(), 0, {300, 70}, {0, 1});
    ASSERT_TRUE(repeated.ok()) << repeated.status();
    const View whole = WholeView({GetParam().dtype, MakeShape({300, 70})}, dm.data());
    const auto stats = RunAdd(stream(), whole, *repeated, out.data(), options());
    ASSERT_TRUE(stats.ok()) << stats.status();
    const std::vector<T> got = out.Values();
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(Exact(got[i]), Exact(static_cast<T>(static_cast<ValueOf<T>>(matrix[i]) +
                                                    static_cast<ValueOf<T>>(strategy[i % 70]))))
          << i;
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, AddTest, testing::ValuesIn(StrategyCases<AddProblem>()),
                         CaseName);

}  // namespace
}  // namespace tessera::test
