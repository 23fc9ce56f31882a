// Device and Stream of both kinds: memory, copies, gathers, conversions, scratch, many streams.
#include "tests/kernel_fixture.h"

namespace tessera::test {
namespace {

std::string RandomBytes(std::size_t size) {
  Random random(size);
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>(random.Bits());
  return bytes;
}

class DeviceTest : public BackendTest {};

TEST_P(DeviceTest, DescribesItself) {
  const Device& device = *TestDevice(GetParam());
  EXPECT_EQ(device.info().backend, GetParam());
  EXPECT_FALSE(device.info().model.empty());
  EXPECT_GT(device.info().multiprocessors, 0);
  EXPECT_GT(device.FreeBytes(), 0u);
  EXPECT_LE(device.FreeBytes(), device.info().memory_bytes);
}

TEST_P(DeviceTest, CopiesPieces) {
  Random random(1);
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  for (const std::size_t longest : {std::size_t{7}, std::size_t{16384}, 3 * kMiB}) {
    std::string in = RandomBytes(longest == 7 ? 10'000 : 5 * kMiB + 13);
    const std::string kept = in;
    std::vector<HostBytes> pieces = {{nullptr, 0}};
    for (std::size_t at = 0; at < in.size();) {
      const std::size_t size = std::min(random.Bits() % (longest + 1), in.size() - at);
      pieces.push_back({in.data() + at, size});
      at += size;
    }
    pieces.push_back({nullptr, 0});
    const auto memory = Get(Allocate(*TestDevice(GetParam()), in.size()));
    ASSERT_TRUE(CopyToDevice(stream(), memory.data(), pieces).ok());
    std::fill(in.begin(), in.end(), 'x');  // `in` may be reused on return.
    std::string out(in.size(), '\0');
    ASSERT_TRUE(CopyToHost(stream(), out.data(), memory.data(), out.size()).ok());
    EXPECT_TRUE(out == kept) << longest;
    EXPECT_TRUE(CopyToDevice(stream(), memory.data(), {}).ok());
    EXPECT_TRUE(CopyToDevice(stream(), memory.data(), {pieces.data(), 1}).ok());
  }
}

// Copies through memory whose owner outlives the device's use of it, at every alignment.
TEST_P(DeviceTest, CopiesToStaging) {
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  auto staging = MakeStaging(*TestDevice(GetParam()), kBytes);
  ASSERT_TRUE(staging.ok()) << staging.status();
  auto* out = static_cast<char*>(staging->get());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(out) % 64, 0u);
  const std::string in = RandomBytes(kBytes);
  const auto memory = Get(Allocate(*TestDevice(GetParam()), kBytes));
  const auto* data = static_cast<const char*>(memory.data());
  ASSERT_TRUE(CopyToDevice(stream(), memory.data(), in.data(), kBytes).ok());
  for (const std::size_t offset : {0, 1, 255, 4097}) {
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, kBytes / 2, kBytes - offset}) {
      if (offset + size > kBytes) continue;
      std::fill(out, out + kBytes, 'x');
      ASSERT_TRUE(CopyToHost(stream(), out + offset, data + offset, size).ok());
      EXPECT_TRUE(std::string_view(out + offset, size) == std::string_view(in).substr(offset, size))
          << size << " at " << offset;
      EXPECT_TRUE(offset == 0 || out[offset - 1] == 'x');
      EXPECT_TRUE(offset + size == kBytes || out[offset + size] == 'x');
    }
  }
}

TEST_P(DeviceTest, GathersEveryElementSize) {
  // Windows of an array of 25920 elements: transposes, reversals, steps, repetition, a scalar, rank
  // 8.
  const StridedWindow windows[] = {{40, {36, 24}, {1, 1080}},
                                   {0, {720, 36}, {36, 1}},
                                   {0, {36, 720}, {1, 36}},
                                   {25919, {24, 30, 36}, {-1080, -36, -1}},
                                   {3, {12, 10, 9}, {2160, 108, 4}},
                                   {17, {5, 7}, {0, 0}},
                                   {5, {}, {}},
                                   {1, {2, 2, 2, 3, 2, 2, 2, 2}, {1080, 36, 1, 72, 2, 4, 8, 16}},
                                   {2, {1000}, {7}},
                                   {0, {3, 0, 2}, {1, 1, 1}}};
  for (DType dtype : kArrayDTypes) {
    const std::size_t size = SizeOf(dtype);
    const std::string bytes = RandomBytes(25920 * size);
    const auto memory = Allocate(*TestDevice(GetParam()), bytes.size());
    ASSERT_TRUE(memory.ok() &&
                CopyToDevice(stream(), memory->data(), bytes.data(), bytes.size()).ok());
    for (const StridedWindow& w : windows) {
      const View view = w.Of(memory->data(), dtype);
      std::string want;
      for (std::int64_t e = 0; e < view.elements(); ++e) {
        std::int64_t rest = e, from = w.first;
        for (std::size_t i = w.shape.size(); i-- > 0;) {
          from += rest % w.shape[i] * w.strides[i];
          rest /= w.shape[i];
        }
        want += bytes.substr(static_cast<std::size_t>(from) * size, size);
      }
      Stream& by = stream();
      void* const out = Get(Scratch(by, std::max<std::size_t>(1, want.size())));
      by.Gather(view, out);
      std::string got(want.size(), '\0');
      ASSERT_TRUE(CopyToHost(by, got.data(), out, got.size()).ok());
      EXPECT_TRUE(got == want) << Name(dtype) << " of shape " << ToString(view.shape);
    }
  }
}

// Elements that a faulty conversion is most likely to convert wrongly, and many others.
template <class T>
std::vector<T> ConversionCases() {
  std::vector<T> cases;
  Random random(1);
  if constexpr (std::is_integral_v<T>) {
    for (T x :
         {T(0), T(1), T(-1), T(65519), T(65520), T(-65520), T((1 << 24) + 1), T((257 << 16) + 1),
          T((257 << 16) - 1), std::numeric_limits<T>::max(), std::numeric_limits<T>::min()})
      cases.push_back(x);
    if constexpr (sizeof(T) == 8) {
      for (T x : {T(INT32_MAX) + 1, T(INT32_MIN) - 1, (T(257) << 40) + 1, (T(257) << 40) - 1,
                  (T(1) << 53) + 1})
        cases.push_back(x);
    }
    cases.push_back(T((257 << 18) + 5));  // Its nearest float is odd, and the float below is a tie.
    for (int i = 0; i < 4000; ++i)
      cases.push_back(static_cast<T>(random.Bits() >> random.Bits() % 64));
  } else {
    // The last numbers are next to ties of 16-bit types, and their nearest floats are odd.
    const auto push = [&](auto... x) { (cases.push_back(Element<T>(x)), ...); };
    push(0.0, -0.0, 0.99, -0.99, 1.5, 2.5, -2.5, 65504.0, 65519.9, 65520.0, 1e10, 0x1p31,
         2147483647.0, -0x1p31, -2147483649.0, -2147483904.0, 0x1p63, -0x1p63,
         9223372036854774784.0, 1e30, -1e300, 1e-5, 1e-7, 0x1p-25, -0x1p-25, 0x1.8p-25, 0x1.8p-24,
         0x1.006p0, 0x1.00202p0, 65519.996, 3.4028234663852886e38, 0x1p-24, 1e-40, 1e-300,
         0x1.002p0, 0x1.0020000001p0, 0x1.01p0, 0x1.00ffffffffp0, kInfinity, -kInfinity,
         0x1.0020014p0, 0x1.0100014p0, -0x1.0100014p0, 0x1.005ffecp0);
    cases.push_back(Element<T>(std::nan("")));
    for (int i = 0; i < 4000; ++i) {
      const std::uint64_t bits = random.Bits();
      T x;
      std::memcpy(&x, &bits, sizeof x);
      cases.push_back(x);
      cases.push_back(Element<T>(random.Normal() * std::exp2(random.Uniform() * 40)));
    }
  }
  return cases;
}

// Returns the value of T that is nearest to x, with ties to even.
template <class T>
long double NearestHalf(long double x) {
  constexpr bool kF16 = std::is_same_v<T, Half>;
  if (!std::isfinite(x) || x == 0) return x;
  int exponent = 0;
  std::frexp(x, &exponent);
  const int step = std::max(exponent - (kF16 ? 11 : 8), kF16 ? -24 : -133);
  const long double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -step)), step);
  const long double largest = kF16 ? 0x1.ffcp15L : 0x1.fep127L;
  return rounded > largest ? kInfinity : rounded < -largest ? -kInfinity : rounded;
}

template <class To>
long double Converted(long double x) {
  using Limits = std::numeric_limits<To>;
  if constexpr (std::is_integral_v<To>) {
    if (std::isnan(x) || std::abs(x) < 1) return 0;  // The result is never -0.
    return std::clamp(std::trunc(x), static_cast<long double>(Limits::min()),
                      static_cast<long double>(Limits::max()));
  } else if constexpr (sizeof(To) == 2) {
    return NearestHalf<To>(x);
  } else {
    return static_cast<To>(x);
  }
}

template <class F>
void ForNumbers(F f) {
  for (DType dtype : kArrayDTypes) {
    DispatchElement(dtype, [&](auto t) {
      if constexpr (!std::is_same_v<decltype(t), bool>) f(t);
    });
  }
}

TEST_P(DeviceTest, ConvertsEveryTypeToEveryOther) {
  ForNumbers([&](auto f) {
    const DType from = DTypeOf<decltype(f)>();
    const auto in = ConversionCases<decltype(f)>();
    DeviceArray<decltype(f)> array(stream(), in, 1);
    ForNumbers([&](auto t) {
      const DType to = DTypeOf<decltype(t)>();
      SCOPED_TRACE(absl::StrCat(std::string(Name(from)), " to ", std::string(Name(to))));
      for (std::size_t n :
           {std::size_t{0}, std::size_t{1}, std::size_t{255}, std::size_t{2048}, in.size()}) {
        DeviceArray<decltype(t)> out(stream(), static_cast<std::int64_t>(n));
        const View view = VectorView(array.data(), static_cast<std::int64_t>(n));
        ASSERT_TRUE(RunCopy(stream(), view, to, out.data()).ok());
        const auto got = out.Values();
        for (std::size_t i = 0; i < n; ++i) {
          const long double want = Converted<decltype(t)>(Exact(in[i]));
          const long double value = Exact(got[i]);
          ASSERT_TRUE(std::isnan(want) ? std::isnan(value)
                                       : value == want && std::signbit(value) == std::signbit(want))
              << "element " << i << ", " << static_cast<double>(Exact(in[i])) << ", became "
              << static_cast<double>(value) << " instead of " << static_cast<double>(want);
        }
      }
    });
  });
}

TEST_P(DeviceTest, TooMuchMemoryIsAnErrorWithFigures) {
  const auto memory = Allocate(*TestDevice(GetParam()), std::size_t{1} << 50);
  ASSERT_FALSE(memory.ok());
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorReason(memory.status()),
            GetParam() == Backend::kCpu ? "HOST_MEMORY_EXHAUSTED" : "GPU_MEMORY_EXHAUSTED");
  auto figures = ErrorMetadata(memory.status());
  EXPECT_EQ(figures["requested"], absl::StrCat(std::size_t{1} << 50));
  EXPECT_NE(figures["free"], "");
  EXPECT_NE(figures["total"], "");
  EXPECT_FALSE(TestDevice(GetParam())->lost());
  EXPECT_TRUE(Allocate(*TestDevice(GetParam()), 1 << 20).ok());
}

TEST_P(DeviceTest, ScratchMemoryIsTriedAgainWithoutWhatIsSpare) {
  struct Spare final : SpareMemory {
    std::uint64_t frees() const override { return freed; }
    void Clear() noexcept override {
      ++asked;
      if (kept > 0) --kept, ++freed;
    }
    std::uint64_t freed = 0;
    int kept = 1;
    int asked = 0;
  };
  Device& device = *TestDevice(GetParam());
  const std::unique_ptr<Stream> stream = *MakeStream(device);
  Spare spare;
  device.SetSpare(&spare);
  EXPECT_TRUE(Scratch(*stream, 2 << 20).ok());
  EXPECT_EQ(spare.asked, 0);
  const auto memory = Scratch(*stream, std::size_t{1} << 50);
  EXPECT_EQ(spare.asked, 1) << "the second failure is the last one";
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted) << memory.status();
  int attempts = 0;
  const auto fails = [&] {
    ++attempts;
    throw DeviceError(DeviceError::Kind::kOutOfMemory, "call", "error");
  };
  EXPECT_THROW(device.WithSpare(fails), DeviceError);
  EXPECT_EQ(attempts, 1) << "nothing was left to be freed";
  spare.kept = 1;
  EXPECT_THROW(device.WithSpare(fails), DeviceError);
  EXPECT_EQ(attempts, 3);
  device.SetSpare(nullptr);
}

class RoomTest : public testing::Test {
 protected:
  void SetUp() override {
    TESSERA_NEED_DEVICE(Backend::kCuda);
    device_ = *OpenDevice(TestDevice(Backend::kCuda)->info().name);
    all_ = device_->info().multiprocessors;
    ASSERT_TRUE(KeepRoom(*device_).ok());
    large_ = *MakeLargeStream(*device_);
    other_ = *MakeStream(*device_);
  }

  int all_ = 0;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> large_, other_;
};

// Products that fill all available SMs run one after the other, and short Dots run alongside them.
// Without reserved SMs, each Dot would wait until a product ends. Then there would be at most as
// many Dots as products, or up to five times that many if other processes share the GPU.
TEST_F(RoomTest, ShortWorkFindsRoomBesideProducts) {
  constexpr int kProducts = 20;
  constexpr std::int64_t kSide = 8192, kLength = 4096;
  EXPECT_LT(device_->info().multiprocessors, all_);
  const auto a = *Allocate(*device_, kSide * kSide * 2), c = *Allocate(*device_, kSide * kSide * 2);
  const auto x = *Allocate(*device_, kLength * 4);
  ASSERT_TRUE(Zero(*large_, a.data(), kSide * kSide * 2).ok());
  ASSERT_TRUE(Zero(*large_, x.data(), kLength * 4).ok());
  const View matrix = WholeView({DType::kBF16, MakeShape({kSide, kSide})}, a.data());
  const View vector = WholeView({DType::kF32, MakeShape({kLength})}, x.data());
  const auto product = [&] {
    EXPECT_TRUE(BeginRequest(*large_).ok());
    EXPECT_TRUE(RunMatmul(*large_, matrix, matrix, false, false, DType::kBF16, c.data(), {}).ok());
  };
  const auto dot = [&] {
    EXPECT_TRUE(BeginRequest(*other_).ok());
    EXPECT_TRUE(RunDot(*other_, vector, vector, {}).ok());
  };
  product();
  dot();
  std::atomic<bool> done{false};
  std::thread flood([&] {
    for (int i = 0; i < kProducts; ++i) product();
    done = true;
  });
  int dots = 0;
  for (; !done; ++dots) dot();
  flood.join();
  EXPECT_GT(dots, 3 * kProducts);
}

// Strategies that distribute their tiles among all SMs do so in the same way on both kinds of
// streams.
TEST_F(RoomTest, BothKindsOfStreamsComputeTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    DispatchDType(dtype, [&]<class T>(T) {
      for (const std::int64_t side : {129, 1000, 2048, 3072}) {
        const DeviceArray<T> a(*large_, NormalVector<T>(side * side, 7));
        std::vector<T> results[2];
        for (int i = 0; i < 2; ++i) {
          Stream& by = i == 0 ? *large_ : *other_;
          ASSERT_TRUE(BeginRequest(by).ok());
          DeviceArray<T> c(by, side * side);
          const View view = a.view({side, side});
          ASSERT_TRUE(RunMatmul(by, view, view, false, false, dtype, c.data(), {}).ok());
          results[i] = c.Values();
        }
        EXPECT_EQ(std::memcmp(results[0].data(), results[1].data(), results[0].size() * sizeof(T)),
                  0)
            << Name(dtype) << " " << side;
      }
    });
  }
}

TESSERA_BACKENDS(DeviceTest);

TEST(OpenDeviceTest, Names) {
  EXPECT_EQ((*OpenDevice("cpu"))->info().name, "cpu");
  EXPECT_EQ((*OpenDevice("cpu:7"))->info().name, "cpu:7");
  EXPECT_TRUE(OpenDevice("auto").ok());
  for (const char* bad : {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda:01", "CPU",
                          "cpu:", "cpu:-1", "cpu:01", "cpu:0x1", "cpu:99999999999"}) {
    const auto device = OpenDevice(bad);
    EXPECT_EQ(ErrorReason(device.status()), "BAD_DEVICE") << bad;
  }
  const auto absent = OpenDevice("cuda:4000");
  EXPECT_EQ(absent.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(absent.status()), "DEVICE_UNAVAILABLE");
}

}  // namespace
}  // namespace tessera::test
