// Requests while nearly all of the device's memory is in use. Nothing else can run on the device at
// the same time.
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

// The limit on scratch memory decides the strategy. The free part of that limit and free device
// memory have no influence.
TEST(Memory, TheLimitOfScratchMemoryChoosesTheStrategyAndItsUseDoesNot) {
  TESSERA_NEED_DEVICE(Backend::kCuda);
  constexpr std::int64_t kSide = 4096;
  Stream& stream = TestStream(Backend::kCuda);
  Device& device = stream.device();
  const std::vector<float> values = NormalVector<float>(kSide * kSide, 1);
  DeviceArray<float> a(stream, values), c(stream, kSide * kSide);
  const View x = a.view({kSide, kSide});
  const auto run = [&](Stream& by, std::string_view strategy) {
    return RunMatmul(by, x, x, false, true, DType::kF32, c.data(), {.strategy = strategy});
  };
  const MatmulProblem problem{.dtype = DType::kF32,
                              .m = kSide,
                              .n = kSide,
                              .k = kSide,
                              .a = x.data,
                              .lda = kSide,
                              .b = x.data,
                              .ldb = kSide,
                              .transpose_b = true};
  const auto* best = Choose(problem, device);
  const auto* in_place = ChooseInPlace(problem, device);
  ASSERT_TRUE(best != nullptr && in_place != nullptr);
  const std::uint64_t need = best->scratch == nullptr ? 0 : best->scratch(problem);
  if (device.info().compute_capability == 90) {
    EXPECT_EQ(best->name, "tensor_f32x3");
    EXPECT_GE(need, std::uint64_t{2} * 6 * kSide * kSide);
  }
  {
    Limited enough(Backend::kCuda, need + (std::uint64_t{8} << 20));
    const auto stats = Get(run(*enough.stream, ""));
    EXPECT_EQ(stats.strategy, best->name);
    ASSERT_TRUE(EndRequest(*enough.stream).ok());
    if (need > 0) {
      const std::uint64_t taken = enough.budget.free();
      ASSERT_TRUE(enough.budget.TryTake(taken));
      EXPECT_EQ(ErrorReason(run(*enough.stream, "").status()), "SCRATCH_EXHAUSTED");
      ASSERT_TRUE(EndRequest(*enough.stream).ok());
      enough.budget.Return(taken);
    }
  }
  const Limited little(Backend::kCuda, std::uint64_t{8} << 20);
  const bool in_little = need <= little.budget.limit();
  if (!in_little) {
    EXPECT_EQ(ErrorReason(run(*little.stream, best->name).status()), "SCRATCH_EXHAUSTED");
  }
  EXPECT_EQ(Get(run(*little.stream, "")).strategy, in_little ? best->name : in_place->name);

  std::vector<Memory> rest;
  for (std::size_t bytes = std::size_t{1} << 30; bytes >= std::size_t{16} << 20;) {
    absl::StatusOr<Memory> memory = Allocate(device, bytes);
    if (memory.ok()) {
      rest.push_back(*std::move(memory));
    } else {
      bytes /= 2;
    }
  }
  if (need > std::uint64_t{64} << 20) {
    const std::unique_ptr<Stream> unlimited = *MakeStream(device);
    const auto exhausted = run(*unlimited, "");
    EXPECT_EQ(ErrorReason(exhausted.status()), "GPU_MEMORY_EXHAUSTED") << exhausted.status();
  }
  const auto stats = Get(run(*little.stream, ""));
  rest.clear();
  const std::vector<float> got = c.Values();
  for (const std::int64_t i : {std::int64_t{0}, kSide - 1}) {
    long double want = 0, scale = 0;
    for (std::int64_t l = 0; l < kSide; ++l) {
      const long double term = static_cast<long double>(At(values, i * kSide + l)) * At(values, l);
      want += term;
      scale += std::abs(term);
    }
    EXPECT_LE(std::abs(At(got, i * kSide) - want), stats.roundoff * scale);
  }
}

}  // namespace
}  // namespace tessera::test
