// Two kernels with data races, on a GPU that exposes them, and strategies that avoid them.
#include "tests/race_lesson.h"

#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

constexpr std::int64_t kElements = 1 << 20;

// The values are positive, so every lost value makes the sum smaller.
template <class T>
std::vector<T> PositiveVector(std::uint64_t seed) {
  return NormalVector<T>(kElements, seed, 2.0, 0.25);
}

TEST(RaceLesson, ThreadsThatAddToOneCellLoseMostOfTheirProducts) {
  TESSERA_NEED_DEVICE(Backend::kCuda);
  Stream& stream = TestStream(Backend::kCuda);
  const std::vector<float> a = PositiveVector<float>(1), b = PositiveVector<float>(2);
  double want = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    want += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  DeviceArray<float> da(stream, a), db(stream, b);

  // In each warp, the write of at most one of the 32 threads survives.
  EXPECT_LT(RacyDot(da.data(), db.data(), kElements, stream), want / 16);

  const auto right =
      Get(RunDot(stream, VectorView(da.data(), kElements), VectorView(db.data(), kElements),
                 {.strategy = "block_serial_atomic"}));
  EXPECT_NEAR(right.value.real, want, (right.stats.roundoff + 1e-9) * want);
}

TEST(RaceLesson, ThreadsThatWriteToTheirBlocksCellLeaveOnePartialSum) {
  TESSERA_NEED_DEVICE(Backend::kCuda);
  Stream& stream = TestStream(Backend::kCuda);
  constexpr unsigned kBlocks = 128;
  const std::vector<double> x = PositiveVector<double>(3);
  double want = 0;
  for (double v : x) want += v;
  DeviceArray<double> dx(stream, x);

  // In each block, the write of only one of the 256 threads survives.
  const double racy = RacySum(dx.data(), kElements, kBlocks, stream);
  EXPECT_GT(racy, 0);
  EXPECT_LT(racy, want / (kRaceBlock / 2));

  const auto right = Get(RunReduce(stream, VectorView(dx.data(), kElements), ReduceOp::kSum,
                                   {.strategy = "two_pass"}));
  const double bound = (right.stats.roundoff + 1e-9) * want;
  EXPECT_NEAR(right.value.real, want, bound);

  // Multiplying the surviving value by the block size is right only if all elements are equal.
  DeviceArray<double> ones(stream, std::vector<double>(static_cast<std::size_t>(kElements), 1.0));
  EXPECT_EQ(RacySum(ones.data(), kElements, kBlocks, stream) * kRaceBlock,
            static_cast<double>(kElements));
  EXPECT_GT(std::abs(racy * kRaceBlock - want), bound);
}

}  // namespace
}  // namespace tessera::test
