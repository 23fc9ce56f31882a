// The client's expressions, written in C++ and read from text.
#include "client/expression.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/expression_text.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

// Returns the last node as a call of its arguments, such as "add(a, multiply(b, 2))".
std::string Written(const v1::Expression& expression, int index) {
  const v1::Expression::Node& node = expression.nodes(index);
  const std::string type =
      node.dtype() == 0 ? "" : absl::StrCat(":", Absl(Name(static_cast<DType>(node.dtype()))));
  switch (node.value_case()) {
    case v1::Expression::Node::kOperand:
      return std::string(1, static_cast<char>('a' + node.operand()));
    case v1::Expression::Node::kCoordinate:
      return absl::StrCat("coordinate(", node.coordinate(), ")");
    case v1::Expression::Node::kReal:
      return absl::StrCat(node.real(), "r", type);
    case v1::Expression::Node::kInteger:
      return absl::StrCat(node.integer(), type);
    case v1::Expression::Node::kBoolean:
      return node.boolean() ? "true" : "false";
    case v1::Expression::Node::kOp:
      break;
    case v1::Expression::Node::VALUE_NOT_SET:
      return "?";
  }
  std::string text(InfoOf(static_cast<MapOp>(node.op()))->name);
  absl::StrAppend(&text, type, "(");
  for (int i = 0; i < node.args_size(); ++i)
    absl::StrAppend(&text, i == 0 ? "" : ", ", Written(expression, static_cast<int>(node.args(i))));
  return text + ")";
}
std::string Written(const Expr& expr) {
  const v1::Expression message = expr.ToMessage();
  return Written(message, message.nodes_size() - 1);
}
std::string Read(std::string_view text) {
  const absl::StatusOr<Expr> expr = ParseExpression(text);
  return expr.ok() ? Written(*expr) : ErrorMetadata(expr.status())["position"];
}

TEST(ExprTest, OperatorsAndConstants) {
  const Expr a = Element(0), b = Element(1);
  EXPECT_EQ(Written((a - b) * 2 + 0.5), "add(multiply(subtract(a, b), 2), 0.5r)");
  EXPECT_EQ(Written(Where((a < b) & !(a == 1), -a, Cast(b, DType::kF16))),
            "where(and(less(a, b), not(equal(a, 1))), negate(a), cast:f16(b))");
  EXPECT_EQ(Written(Expr(3, DType::kI32) / true), "divide(3:i32, true)");
  constexpr std::uint64_t kLargest = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(Written(Expr(kLargest)), "9223372036854775807");
  EXPECT_EQ(Written(Expr(kLargest + 1)), "9.22337e+18r");
}

TEST(ExprTest, WhatOccursTwiceIsOneNode) {
  const Expr x = Element(0) - 1;
  const Expr square = x * x;
  EXPECT_EQ((square + square).ToMessage().nodes_size(), 5);
}

TEST(ExprTest, MovingLeavesTheExpression) {
  Expr a = Element(0), b = std::move(a);
  EXPECT_EQ(Written(a + b), "add(a, a)");  // NOLINT(bugprone-use-after-move)
}

TEST(ExprTest, ALongChainNeedsNoStack) {
  Expr sum = Element(0);
  for (int i = 0; i < 300'000; ++i) sum = sum + 1;
  EXPECT_EQ(sum.ToMessage().nodes_size(), 600'001);
}

TEST(ParseTest, PrecedenceIsThatOfPython) {
  EXPECT_EQ(Read("a + b * c"), "add(a, multiply(b, c))");
  EXPECT_EQ(Read("coordinate(0) * coordinate( -2 )"), "multiply(coordinate(0), coordinate(-2))");
  EXPECT_EQ(Read("coordinate(a)"), "11");
  EXPECT_EQ(Read("a - b - c"), "subtract(subtract(a, b), c)");
  EXPECT_EQ(Read("(a + b) // c % 2"), "remainder(floor_divide(add(a, b), c), 2)");
  EXPECT_EQ(Read("-a ** -b ** c"), "negate(power(a, negate(power(b, c))))");
  EXPECT_EQ(Read("-2 ** 2"), "negate(power(2, 2))");
  EXPECT_EQ(Read("a<b or not a == b and c >= 1e-3"),
            "or(less(a, b), and(not(equal(a, b)), greater_equal(c, 0.001r)))");
  EXPECT_EQ(Read("a > 0 xor b != 0"), "xor(greater(a, 0), not_equal(b, 0))");
}

TEST(ParseTest, CallsCastsAndConstants) {
  EXPECT_EQ(Read("where(true, fma(a, b, -1.5), f32(h))"),
            "where(true, fma(a, b, -1.5r), cast:f32(h))");
  EXPECT_EQ(Read("minimum(a,-inf)"), "minimum(a, -infr)");
  EXPECT_EQ(Read("bool(a)"), "cast:bool(a)");
  EXPECT_EQ(Read("-9223372036854775807"), "-9223372036854775807");
}

TEST(ParseTest, Numbers) {
  for (const char* text : {"1e5", "1E5", "1e+5", "1E+5", "100000.", "1.e5", "10.0E4", ".1E6"})
    EXPECT_EQ(Read(text), "100000r") << text;
  for (const char* text : {"1e-2", "1E-2", ".01", "0.01", ".1e-1", "10E-3"})
    EXPECT_EQ(Read(text), "0.01r") << text;
  EXPECT_EQ(Read("a+1E5-2"), "subtract(add(a, 100000r), 2)");
  EXPECT_EQ(Read("2-1e-2+a"), "add(subtract(2, 0.01r), a)");
  EXPECT_EQ(Read("007"), "7");
  EXPECT_EQ(Read("-0.0"), "-0r");
  EXPECT_EQ(Read("-1E5"), "-100000r");
  EXPECT_EQ(Read("9223372036854775807"), "9223372036854775807");
  EXPECT_EQ(Read("9223372036854775808.0"), "9.22337e+18r");
  EXPECT_EQ(Read("a < 9223372036854775808"), "less(a, 9.22337e+18r)");
  EXPECT_EQ(Read("18446744073709551615"), "1.84467e+19r");
  EXPECT_EQ(Read("1" + std::string(300, '0')), "1e+300r");
  EXPECT_EQ(Read("-9223372036854775808"), "-9223372036854775808");
  EXPECT_EQ(Read("- 9223372036854775808.0"), "-9.22337e+18r");
  EXPECT_EQ(Read("--9223372036854775808"), "9.22337e+18r");
  EXPECT_EQ(Read("-9223372036854775808 ** 2"), "negate(power(9.22337e+18r, 2))");
  EXPECT_EQ(Read("-9223372036854775809"), "-9.22337e+18r");
  for (const char* text : {"1e", "1E", "1e+", "1E-", ".", "1.2.3", "1e5e5", "1e2.5", "e5"})
    EXPECT_EQ(Read(text), "0") << text;
  EXPECT_EQ(Read("1 e5"), "2");
  EXPECT_EQ(Read("1x"), "1");
}

TEST(ParseTest, WhatCannotBeReadHasItsPlace) {
  EXPECT_EQ(Read(""), "0");
  EXPECT_EQ(Read("a +"), "3");
  EXPECT_EQ(Read("a b"), "2");
  EXPECT_EQ(Read("a < b < c"), "6");
  EXPECT_EQ(Read("sqrt(a, b)"), "6");
  EXPECT_EQ(Read("(a"), "2");
  EXPECT_EQ(Read("i + 1"), "0");
  EXPECT_EQ(Read("sqrt"), "4");
  EXPECT_EQ(Read("a + 1e"), "4");
  EXPECT_EQ(Read("1" + std::string(400, '0')), "0");
  EXPECT_EQ(Read("a and"), "5");
  for (const char* nested : {"(", "-", "not ", "a ** ", "sqrt("}) {
    std::string text;
    for (int i = 0; i < 100000; ++i) text += nested;
    EXPECT_NE(Read(text), "");
  }
}

}  // namespace
}  // namespace tessera
