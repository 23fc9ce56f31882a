// The syntax of operands on the command line, and random arrays.
#include "client/slice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "client/random_array.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::SizeIs;

// --- Operand syntax ------------------------------------------------------------------------------

ViewSpec Slice(std::string_view text, std::vector<std::int64_t> shape) {
  const auto operand = ParseOperand(text);
  EXPECT_TRUE(operand.ok()) << operand.status();
  const auto view = ResolveSubscripts(operand->subscripts, shape);
  EXPECT_TRUE(view.ok()) << view.status();
  return view.value_or(ViewSpec());
}

TEST(OperandSyntax, Names) {
  EXPECT_EQ(ParseOperand("a/b-c.d_e")->name, "a/b-c.d_e");
  const auto file = ParseOperand("file:some/x[0].npy");
  EXPECT_EQ(file->kind, ParsedOperand::Kind::kFile);
  EXPECT_EQ(file->name, "some/x[0].npy");
}

// Compares the result with Python's range(extent)[slice], for every combination of bounds around
// the ends.
TEST(OperandSyntax, SlicesFollowPython) {
  const std::vector<std::string> bounds = {"",  "-9", "-5", "-4", "-1", "0",
                                           "1", "3",  "4",  "5",  "9"};
  for (std::int64_t extent : {0, 1, 4}) {
    for (const std::string& start : bounds) {
      for (const std::string& stop : bounds) {
        for (std::int64_t step :
             {-9223372036854775807, -5l, -2l, -1l, 1l, 2l, 3l, 9223372036854775807}) {
          const std::string text = "x[" + start + ":" + stop + ":" + std::to_string(step) + "]";
          const auto clip = [&](const std::string& bound, std::int64_t otherwise) {
            if (bound.empty()) return otherwise;
            std::int64_t value = std::stoll(bound);
            if (value < 0) value += extent;
            return step > 0 ? std::clamp<std::int64_t>(value, 0, extent)
                            : std::clamp<std::int64_t>(value, -1, extent - 1);
          };
          std::vector<std::int64_t> expected;
          const std::int64_t end = clip(stop, step > 0 ? extent : -1);
          for (std::int64_t i = clip(start, step > 0 ? 0 : extent - 1);
               step > 0 ? i < end : i > end;) {
            expected.push_back(i);
            if (__builtin_add_overflow(i, step, &i)) break;
          }
          const ViewSpec view = Slice(text, {extent});
          ASSERT_THAT(view.shape, SizeIs(1));
          std::vector<std::int64_t> actual;
          for (std::int64_t i = 0; i < view.shape[0]; ++i) {
            actual.push_back(view.offset + i * view.strides[0]);
          }
          EXPECT_EQ(actual, expected) << text << " of " << extent;
        }
      }
    }
  }
}

TEST(OperandSyntax, SubscriptsOfSeveralAxes) {
  ViewSpec view = Slice("x[1, ::-1]", {3, 4, 5});
  EXPECT_EQ(view.offset, 20 + 15);
  EXPECT_THAT(view.shape, ElementsAre(4, 5));
  EXPECT_THAT(view.strides, ElementsAre(-5, 1));
  view = Slice("x[ 2 , ... , 1:3 , ]", {3, 4, 5});
  EXPECT_EQ(view.offset, 41);
  EXPECT_THAT(view.shape, ElementsAre(4, 2));
  EXPECT_THAT(view.strides, ElementsAre(5, 1));
  view = Slice("x[2, 3, 4]", {3, 4, 5});
  EXPECT_EQ(view.offset, 59);
  EXPECT_TRUE(view.shape.empty());
  view = Slice("x[1:1, 3]", {3, 4});
  EXPECT_EQ(view.offset, 0);
  EXPECT_THAT(view.shape, ElementsAre(0));
}

TEST(OperandSyntax, RawViews) {
  auto operand = ParseOperand("norms@5:540x1257:0x-1");
  ASSERT_TRUE(operand.ok());
  EXPECT_EQ(operand->name, "norms");
  EXPECT_EQ(operand->view->offset, 5);
  EXPECT_THAT(operand->view->shape, ElementsAre(540, 1257));
  EXPECT_THAT(operand->view->strides, ElementsAre(0, -1));
  operand = ParseOperand("x@7");
  ASSERT_TRUE(operand.ok());
  EXPECT_EQ(operand->view->offset, 7);
  EXPECT_TRUE(operand->view->shape.empty());
}

TEST(OperandSyntax, ResultsOfSteps) {
  auto operand = ParseOperand("step:7");
  ASSERT_TRUE(operand.ok());
  EXPECT_EQ(operand->kind, ParsedOperand::Kind::kStep);
  EXPECT_EQ(operand->step, 7u);
  EXPECT_FALSE(operand->indices);
  operand = ParseOperand("step:12.indices@3:2:1");
  ASSERT_TRUE(operand.ok());
  EXPECT_EQ(operand->step, 12u);
  EXPECT_TRUE(operand->indices);
  EXPECT_EQ(operand->view->offset, 3);
  for (const char* text : {"step:", "step:.indices", "step:1.values", "step:1.indices[0]",
                           "step:-1", "step:4294967296"})
    EXPECT_EQ(ErrorReason(ParseOperand(text).status()), "BAD_OPERAND") << text;
}

TEST(OperandSyntax, Mistakes) {
  for (const char* text :
       {"", "[0]", "@0:1", "x[", "x[]", "x[0]y", "x[0", "x[a]", "x[1:2:3:4]", "x[0,,1]", "x[1.5]",
        "x@", "x@a", "x@0:1:2:3", "x@0:1xx2", "file:", "x[99999999999999999999]"}) {
    EXPECT_EQ(ErrorReason(ParseOperand(text).status()), "BAD_OPERAND") << text;
  }
  const auto reason = [](const char* text, std::vector<std::int64_t> shape) {
    return ErrorReason(ResolveSubscripts(ParseOperand(text)->subscripts, shape).status());
  };
  EXPECT_EQ(reason("x[3]", {3}), "BAD_VIEW");
  EXPECT_EQ(reason("x[-4]", {3}), "BAD_VIEW");
  EXPECT_EQ(reason("x[0, 0]", {3}), "BAD_VIEW");
  EXPECT_EQ(reason("x[::0]", {3}), "BAD_VIEW");
  EXPECT_EQ(reason("x[..., ...]", {3}), "BAD_VIEW");
}

// --- Random arrays -------------------------------------------------------------------------------

TEST(RandomArray, DoesNotDependOnHowItIsRead) {
  for (DType dtype :
       {DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI32, DType::kI64}) {
    const Source source = RandomArray(Distribution::kNormal, dtype, 3);
    std::string whole(1000 * SizeOf(dtype), '\0');
    ASSERT_TRUE(source(0, absl::MakeSpan(whole)).ok());
    std::string parts;
    while (parts.size() < whole.size()) {
      std::string part(std::min<std::size_t>(48, whole.size() - parts.size()), '\0');
      ASSERT_TRUE(source(parts.size(), absl::MakeSpan(part)).ok());
      parts += part;
    }
    EXPECT_EQ(parts, whole);
  }
}

TEST(RandomArray, HasItsMoments) {
  std::vector<double> x(1 << 16);
  const auto fill = [&](Distribution distribution) {
    const Source source = RandomArray(distribution, DType::kF64, 1);
    const absl::Span<char> bytes(reinterpret_cast<char*>(x.data()), x.size() * sizeof(double));
    ASSERT_TRUE(source(0, bytes).ok());
  };
  const auto moment = [&](int power) {
    double sum = 0;
    for (double value : x) sum += std::pow(value, power);
    return sum / static_cast<double>(x.size());
  };
  // The tolerance is five standard errors of each mean. A standard error is 1/256 of the standard
  // deviation.
  fill(Distribution::kNormal);
  EXPECT_NEAR(moment(1), 0, 5 / 256.0);
  EXPECT_NEAR(moment(2), 1, 5 * std::sqrt(2.0) / 256);
  EXPECT_NEAR(moment(4), 3, 5 * std::sqrt(96.0) / 256);
  fill(Distribution::kUniform);
  EXPECT_NEAR(moment(1), 0.5, 5 * std::sqrt(1 / 12.0) / 256);
  EXPECT_THAT(x, ::testing::Each(AllOf(Ge(0.0), ::testing::Lt(1.0))));
  fill(Distribution::kOnes);
  EXPECT_EQ(moment(1), 1);
}

}  // namespace
}  // namespace tessera
