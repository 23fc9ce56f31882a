// Device and Lane, both kinds: memory, copies of awkward sizes, gathers of every element size,
// scratch, many lanes at once, and what running out of memory looks like.
#include <atomic>
#include <thread>

#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

class DeviceTest : public testing::TestWithParam<Backend> {};

TEST_P(DeviceTest, DescribesItself) {
  TESSERA_NEED_DEVICE(GetParam());
  const Device& device = *TestDevice(GetParam());
  EXPECT_EQ(device.info().backend, GetParam());
  EXPECT_FALSE(device.info().model.empty());
  EXPECT_GT(device.info().multiprocessors, 0);
  EXPECT_GT(device.FreeBytes(), 0u);
  EXPECT_LE(device.FreeBytes(), device.info().memory_bytes);
}

TEST_P(DeviceTest, CopiesEverySize) {
  TESSERA_NEED_DEVICE(GetParam());
  Lane& lane = TestLane(GetParam());
  for (std::size_t bytes :
       {std::size_t{1}, std::size_t{3}, std::size_t{4096}, std::size_t{65537}, std::size_t{1} << 20,
        (std::size_t{1} << 20) + 1, (std::size_t{5} << 20) + 13}) {
    const auto memory = Allocate(*TestDevice(GetParam()), bytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    Random random(bytes);
    std::string in(bytes, '\0'), out(bytes, '\0');
    for (char& c : in) c = static_cast<char>(random.Bits());
    const std::string kept = in;
    ASSERT_TRUE(CopyToDevice(lane, memory->data(), in.data(), bytes).ok());
    std::fill(in.begin(), in.end(), 'x');  // the contract: free to reuse on return
    ASSERT_TRUE(CopyToHost(lane, out.data(), memory->data(), bytes).ok());
    EXPECT_TRUE(out == kept) << bytes;
  }
}

TEST_P(DeviceTest, GathersEveryElementSize) {
  TESSERA_NEED_DEVICE(GetParam());
  struct Window {
    std::vector<std::int64_t> shape, strides;
    std::int64_t offset;
  };
  // Of a [24, 30, 36] array: transposes, reversals, steps, repetition, a scalar, rank 8.
  const Window windows[] = {{{36, 24}, {1, 1080}, 40},
                            {{720, 36}, {36, 1}, 0},
                            {{36, 720}, {1, 36}, 0},
                            {{24, 30, 36}, {-1080, -36, -1}, 25919},
                            {{12, 10, 9}, {2160, 108, 4}, 3},
                            {{5, 7}, {0, 0}, 17},
                            {{}, {}, 5},
                            {{2, 2, 2, 3, 2, 2, 2, 2}, {1080, 36, 1, 72, 2, 4, 8, 16}, 1},
                            {{1000}, {7}, 2},
                            {{3, 0, 2}, {1, 1, 1}, 0}};
  for (DType dtype :
       {DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI32, DType::kI64}) {
    Lane& lane = TestLane(GetParam());
    const ArrayType type{dtype, MakeShape({24, 30, 36})};
    Random random(1);
    std::vector<unsigned char> bytes(type.bytes());
    for (unsigned char& b : bytes) b = static_cast<unsigned char>(random.Bits());
    const auto memory = Allocate(*TestDevice(GetParam()), bytes.size());
    ASSERT_TRUE(memory.ok() && CopyToDevice(lane, memory->data(), bytes.data(), bytes.size()).ok());
    for (const Window& w : windows) {
      const auto view = MakeView(type, memory->data(), w.offset, w.shape, w.strides);
      ASSERT_TRUE(view.ok()) << view.status();
      const std::size_t size = SizeOf(dtype);
      const auto n = static_cast<std::size_t>(view->elements());
      const auto out = Scratch(lane, std::max<std::size_t>(1, n * size));
      ASSERT_TRUE(out.ok());
      lane.Gather(*view, *out);
      std::vector<unsigned char> got(n * size);
      ASSERT_TRUE(CopyToHost(lane, got.data(), *out, got.size()).ok());
      for (std::size_t e = 0; e < n; ++e) {
        auto rest = static_cast<std::int64_t>(e);
        std::int64_t from = w.offset;
        for (std::size_t i = w.shape.size(); i-- > 0;) {
          from += rest % w.shape[i] * w.strides[i];
          rest /= w.shape[i];
        }
        ASSERT_EQ(std::memcmp(got.data() + e * size,
                              bytes.data() + static_cast<std::size_t>(from) * size, size),
                  0)
            << Name(dtype) << " element " << e << " of shape " << ToString(view->shape);
      }
    }
  }
}

TEST_P(DeviceTest, ScratchDoesNotOverlapAndIsReused) {
  TESSERA_NEED_DEVICE(GetParam());
  Lane& lane = TestLane(GetParam());
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(BeginRequest(lane).ok());
    std::vector<std::pair<char*, std::size_t>> pieces;
    for (std::size_t bytes : {std::size_t{1}, std::size_t{1000}, std::size_t{3} << 20,
                              std::size_t{256}, std::size_t{80} << 20, std::size_t{5}}) {
      const auto piece = Scratch(lane, bytes);
      ASSERT_TRUE(piece.ok()) << piece.status();
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(*piece) % 256, 0u);
      auto* begin = static_cast<char*>(*piece);
      for (const auto& [other, size] : pieces)
        EXPECT_TRUE(begin + bytes <= other || other + size <= begin);
      pieces.emplace_back(begin, bytes);
    }
  }
}

TEST_P(DeviceTest, TooMuchMemoryIsAnErrorWithFigures) {
  TESSERA_NEED_DEVICE(GetParam());
  const auto memory = Allocate(*TestDevice(GetParam()), std::size_t{1} << 50);
  ASSERT_FALSE(memory.ok());
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(memory.status()), "GPU_MEMORY_EXHAUSTED");
  auto figures = ErrorMetadata(memory.status());
  EXPECT_EQ(figures["requested"], absl::StrCat(std::size_t{1} << 50));
  EXPECT_NE(figures["free"], "");
  EXPECT_NE(figures["total"], "");
  EXPECT_FALSE(TestDevice(GetParam())->lost());
  EXPECT_TRUE(Allocate(*TestDevice(GetParam()), 1 << 20).ok());
}

TEST_P(DeviceTest, LanesOfManyThreadsDoNotDisturbEachOther) {
  TESSERA_NEED_DEVICE(GetParam());
  Device& device = *TestDevice(GetParam());
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&, thread] {
      auto lane = MakeLane(device);
      if (!lane.ok()) {
        ++wrong;
        return;
      }
      const std::int64_t n = 10007 + 1000 * thread;
      const std::vector<float> x(static_cast<std::size_t>(n), static_cast<float>(thread + 1));
      auto memory = Allocate(device, static_cast<std::size_t>(n) * 4);
      if (!memory.ok() || !CopyToDevice(**lane, memory->data(), x.data(), x.size() * 4).ok()) {
        ++wrong;
        return;
      }
      const View view = WholeView({DType::kF32, MakeShape({n})}, memory->data());
      for (int i = 0; i < 50; ++i) {
        if (!BeginRequest(**lane).ok()) ++wrong;
        const auto dot = RunDot(**lane, view, view, {});
        const auto sum = RunReduce(**lane, view, ReduceOp::kSum, {});
        const double value = thread + 1;
        if (!dot.ok() || dot->value.real != value * value * static_cast<double>(n)) ++wrong;
        if (!sum.ok() || sum->value.real != value * static_cast<double>(n)) ++wrong;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, DeviceTest, testing::Values(Backend::kCpu, Backend::kCuda),
                         [](const auto& test) { return std::string(Name(test.param)); });

TEST(OpenDeviceTest, Names) {
  EXPECT_EQ((*OpenDevice("cpu"))->info().name, "cpu");
  EXPECT_TRUE(OpenDevice("auto").ok());
  for (const char* bad : {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "CPU"}) {
    const auto device = OpenDevice(bad);
    EXPECT_EQ(ErrorReason(device.status()), "BAD_DEVICE") << bad;
  }
  const auto absent = OpenDevice("cuda:4000");
  EXPECT_EQ(absent.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(absent.status()), "DEVICE_UNAVAILABLE");
}

}  // namespace
}  // namespace tessera::test
