// What becomes of requests when the device's memory is all but used up. An executable of its own,
// because nothing else can run on the device meanwhile.
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

TEST(Memory, ChoiceThatNeedsScratchGivesWayToOneThatNeedsNone) {
  TESSERA_NEED_DEVICE(Backend::kCuda);
  constexpr std::int64_t kSide = 4096;
  Device& device = TestLane(Backend::kCuda).device();
  const std::vector<float> values = NormalVector<float>(kSide * kSide, 1);
  DeviceArray<float> a(TestLane(Backend::kCuda), values),
      c(TestLane(Backend::kCuda), kSide * kSide);
  const View x = WholeView({DType::kF32, MakeShape({kSide, kSide})}, a.data());
  const auto run = [&](Lane& lane, std::string_view strategy) {
    return RunMatmul(lane, x, x, false, true, DType::kF32, c.data(), {.strategy = strategy});
  };
  {
    absl::StatusOr<std::unique_ptr<Lane>> lane = MakeLane(device);
    ASSERT_TRUE(lane.ok()) << lane.status();
    const auto stats = run(**lane, "");
    ASSERT_TRUE(stats.ok()) << stats.status();
    if (device.info().compute_capability == 90) {
      EXPECT_EQ(stats->strategy, "tensor_f32x3");
    }
  }
  absl::StatusOr<std::unique_ptr<Lane>> lane = MakeLane(device);
  ASSERT_TRUE(lane.ok()) << lane.status();
  const auto* in_place = ChooseInPlace(
      MatmulProblem{.dtype = DType::kF32, .m = kSide, .n = kSide, .k = kSide}, device);
  ASSERT_NE(in_place, nullptr);
  ASSERT_TRUE(run(**lane, in_place->name).ok());  // loads its code, which takes memory as well

  std::vector<Memory> rest;
  for (std::size_t bytes = std::size_t{1} << 30; bytes >= std::size_t{16} << 20;) {
    absl::StatusOr<Memory> memory = Allocate(device, bytes);
    if (memory.ok())
      rest.push_back(*std::move(memory));
    else
      bytes /= 2;
  }
  const auto named = run(**lane, "tensor_f32x3");
  if (device.info().compute_capability == 90) {
    EXPECT_EQ(named.status().code(), absl::StatusCode::kResourceExhausted) << named.status();
  }
  const auto stats = run(**lane, "");
  rest.clear();
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->strategy, in_place->name);
  const std::vector<float> got = c.Values();
  for (const std::int64_t i : {std::int64_t{0}, kSide - 1}) {
    long double want = 0, scale = 0;
    for (std::int64_t l = 0; l < kSide; ++l) {
      const long double term =
          static_cast<long double>(values[static_cast<std::size_t>(i * kSide + l)]) *
          values[static_cast<std::size_t>(l)];
      want += term;
      scale += std::abs(term);
    }
    EXPECT_LE(std::abs(got[static_cast<std::size_t>(i * kSide)] - want), stats->roundoff * scale);
  }
}

}  // namespace
}  // namespace tessera::test
