// Shapes and views as a hostile client would send them, and conversions of halves.
#include "tests/kernel_fixture.h"

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace tessera::test {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

TEST(ArrayTypeTest, AcceptsWhatFits) {
  EXPECT_EQ(MakeArrayType(DType::kF32, {})->bytes(), 4u);
  EXPECT_EQ(MakeArrayType(DType::kF16, {3, 5})->bytes(), 30u);
  EXPECT_EQ(MakeArrayType(DType::kF64, {0, 7})->bytes(), 0u);
  EXPECT_EQ(MakeArrayType(DType::kI64, {std::int64_t{1} << 59})->bytes(), std::uint64_t{1} << 62);
}

TEST(ArrayTypeTest, RefusesWhatDoesNot) {
  const std::vector<std::vector<std::int64_t>> bad = {
      {-1},
      {3, -4},
      {kMin},
      {kMax},
      {kMax, 2},
      {std::int64_t{1} << 32, std::int64_t{1} << 32},
      {0, kMax, kMax},
      {1, 1, 1, 1, 1, 1, 1, 1, 1}};
  for (const auto& shape : bad) {
    const auto type = MakeArrayType(DType::kF64, shape);
    EXPECT_EQ(type.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorReason(type.status()), "BAD_SHAPE");
    EXPECT_EQ(ErrorMetadata(type.status())["field"], "shape");
  }
  EXPECT_EQ(ErrorReason(MakeArrayType(static_cast<DType>(77), {1}).status()), "BAD_DTYPE");
}

TEST(ViewTest, AcceptsEveryWindowInside) {
  const ArrayType type{DType::kF32, MakeShape({10, 10})};
  float data[100];
  const auto ok = [&](std::int64_t offset, std::vector<std::int64_t> shape,
                      std::vector<std::int64_t> strides) {
    return MakeView(type, data, offset, shape, strides);
  };
  EXPECT_TRUE(ok(0, {10, 10}, {})->contiguous());
  EXPECT_TRUE(ok(99, {}, {})->contiguous());
  EXPECT_EQ(ok(99, {10, 10}, {-10, -1})->data, data + 99);
  EXPECT_FALSE(ok(99, {10, 10}, {-10, -1})->contiguous());
  EXPECT_TRUE(ok(0, {kMax / 8}, {0}).ok());              // one element, repeated
  EXPECT_TRUE(ok(100, {0}, {}).ok());                    // no elements, at the end
  EXPECT_TRUE(ok(50, {5, 0}, {kMax, kMin}).ok());        // no elements, for any strides
  EXPECT_TRUE(ok(0, {1, 10}, {kMax, 1})->contiguous());  // the stride of an extent of 1 is unused
}

TEST(ViewTest, RefusesEveryWindowOutside) {
  const ArrayType type{DType::kF32, MakeShape({10, 10})};
  float data[100];
  struct Case {
    std::int64_t offset;
    std::vector<std::int64_t> shape, strides;
    const char* field;
  };
  const Case cases[] = {
      {-1, {1}, {}, "view.offset"},
      {101, {0}, {}, "view.offset"},
      {kMin, {1}, {}, "view.offset"},
      {kMax, {1}, {}, "view.offset"},
      {100, {1}, {}, "view.shape"},
      {1, {10, 10}, {}, "view.shape"},
      {0, {101}, {}, "view.shape"},
      {0, {2}, {-1}, "view.shape"},
      {0, {2}, {100}, "view.shape"},
      {98, {10, 10}, {-10, -1}, "view.shape"},
      {0, {3}, {kMax}, "view.strides"},
      {0, {3, 3}, {kMax / 2, kMax / 2}, "view.strides"},
      {50, {4}, {kMin / 2}, "view.strides"},
      {0, {-1}, {}, "view.shape"},
      {0, {kMax, kMax}, {0, 0}, "view.shape"},
      {0, {2, 2}, {1}, "view.strides"},
      {0, {1, 1, 1, 1, 1, 1, 1, 1, 1}, {}, "view.shape"},
  };
  for (const Case& c : cases) {
    const auto view = MakeView(type, data, c.offset, c.shape, c.strides);
    ASSERT_FALSE(view.ok()) << c.offset << " " << c.shape[0];
    EXPECT_EQ(view.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorReason(view.status()), "BAD_VIEW");
    EXPECT_EQ(ErrorMetadata(view.status())["field"], c.field) << view.status();
    EXPECT_NE(ErrorMetadata(view.status())["limit"], "");
  }
}

// The value that IEEE 754 gives a half without its sign.
float MagnitudeOf(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31u);
  const auto fraction = static_cast<float>(bits & 1023u);
  if (exponent == 0) return std::ldexp(fraction, -24);
  if (exponent < 31) return std::ldexp(1024 + fraction, exponent - 25);
  return std::bit_cast<float>(0x7f800000u | (bits & 1023u) << 13);  // NaNs keep their fraction
}

TEST(HalfTest, AllValuesBecomeFloatsWithoutSlowArithmeticOnSubnormalNumbers) {
  std::vector<Half> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i].bits = static_cast<std::uint16_t>(i);
  std::vector<float> floats(halves.size());
#ifdef __SSE2__
  _mm_setcsr(_mm_getcsr() & ~static_cast<unsigned>(_MM_EXCEPT_DENORM));
#endif
  asm volatile("" ::: "memory");
  std::transform(halves.begin(), halves.end(), floats.begin(),
                 [](Half half) { return static_cast<float>(half); });
  asm volatile("" ::: "memory");
#ifdef __SSE2__  // Any operation on a subnormal number sets the flag.
  EXPECT_EQ(_mm_getcsr() & _MM_EXCEPT_DENORM, 0u) << "an operand was a subnormal float";
#endif
  for (unsigned i = 0; i < 65536; ++i) {
    const std::uint32_t want =
        std::bit_cast<std::uint32_t>(MagnitudeOf(i & 0x7fffu)) | (i & 0x8000u) << 16;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(floats[i]), want) << i;
  }
}

}  // namespace
}  // namespace tessera::test
