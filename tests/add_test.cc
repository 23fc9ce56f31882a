// Compares every strategy of Add in the table with sums that are rounded once.
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

class AddTest : public StrategyTest<AddProblem> {};

TESSERA_TYPED_TEST(AddTest, SizesAndAlignments) {
  for (std::int64_t n : AwkwardSizes()) {
    const std::vector<T> a = NormalVector<T>(n, 1), b = NormalVector<T>(n, 2);
    DeviceArray<T> da(stream(), a, 1), db(stream(), b, 2), out(stream(), n);
    Get(RunAdd(stream(), da.view(), db.view(), out.data(), options()));
    const std::vector<T> got = out.Values();
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(Exact(got[i]), Exact(static_cast<T>(WrapAdd<ValueOf<T>>(
                                   static_cast<ValueOf<T>>(a[i]), static_cast<ValueOf<T>>(b[i])))))
          << i;
  }
}

TESSERA_STRATEGIES(AddTest);

}  // namespace
}  // namespace tessera::test
