// Shapes and views as a hostile client would send them.
#include "tests/kernel_fixture.h"

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

}  // namespace
}  // namespace tessera::test
