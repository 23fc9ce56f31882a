#include "client/expression_text.h"

#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

struct Operator {
  std::size_t level;  // the level of precedence
  std::string_view text;
  MapOp op;
};

// Left-associative binary operators. If one operator is a prefix of another, the longer one comes
// first.
constexpr Operator kOperators[] = {
    {0, "or", MapOp::kOr},      {1, "xor", MapOp::kXor},         {2, "and", MapOp::kAnd},
    {3, "==", MapOp::kEqual},   {3, "!=", MapOp::kNotEqual},     {3, "<=", MapOp::kLessEqual},
    {3, "<", MapOp::kLess},     {3, ">=", MapOp::kGreaterEqual}, {3, ">", MapOp::kGreater},
    {4, "+", MapOp::kAdd},      {4, "-", MapOp::kSubtract},      {5, "//", MapOp::kFloorDivide},
    {5, "*", MapOp::kMultiply}, {5, "/", MapOp::kDivide},        {5, "%", MapOp::kRemainder},
};
constexpr std::size_t kComparisons = 3, kLevels = 6;

bool IsWordCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_';
}

bool IsDigit(char c) { return absl::ascii_isdigit(static_cast<unsigned char>(c)); }

// A recursive-descent parser. It stops at the first error, which status_ reports with its position.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  absl::StatusOr<Expr> Parse() {
    Expr expression = Level(0);
    SkipSpace();
    if (status_.ok() && at_ < text_.size()) Fail("an operator or the end is expected");
    if (!status_.ok()) return status_;
    return expression;
  }

 private:
  // The maximum depth of nesting. An expression has at most 64 nodes, but may have more parentheses
  // than that.
  static constexpr int kDeepest = 256;

  Expr Fail(std::string_view what) {
    if (status_.ok()) {
      status_ = MakeError(
          absl::StatusCode::kInvalidArgument, "BAD_EXPRESSION",
          absl::StrCat("the expression cannot be parsed at character ", at_, ": ", Absl(what)),
          {{"position", absl::StrCat(at_)}});
    }
    at_ = text_.size();
    return 0;
  }

  void SkipSpace() {
    while (at_ < text_.size() && absl::ascii_isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }

  // Consumes the token if it comes next. A word must match in full.
  bool Take(std::string_view token) {
    SkipSpace();
    if (text_.substr(at_, token.size()) != token) return false;
    const std::size_t end = at_ + token.size();
    if (IsWordCharacter(token.back()) && end < text_.size() && IsWordCharacter(text_[end]))
      return false;
    if (token == "*" && text_.substr(at_, 2) == "**") return false;
    at_ = end;
    return true;
  }
  void Expect(std::string_view token) {
    if (!Take(token)) Fail(absl::StrCat("'", Absl(token), "' is expected"));
  }

  Expr Level(std::size_t level) {
    if (level == kComparisons && Take("not")) return Nested([&] { return !Level(level); });
    if (level == kLevels) return Negated();
    Expr left = Level(level + 1);
    while (status_.ok()) {
      const std::optional<MapOp> op = TakeOperator(level);
      if (!op) break;
      left = Expr(*op, {left, Level(level + 1)});
      if (level == kComparisons) break;
    }
    return left;
  }

  std::optional<MapOp> TakeOperator(std::size_t level) {
    for (const Operator& candidate : kOperators)
      if (candidate.level == level && Take(candidate.text)) return candidate.op;
    return std::nullopt;
  }

  // -a ** b is -(a ** b), and a ** -b ** c is a ** (-(b ** c)).
  Expr Negated() {
    if (Take("-")) {
      SkipSpace();
      const std::size_t begin = at_;
      return Nested([&] {
        const Expr value = Negated();
        return Minus(value, Absl(text_.substr(begin, at_ - begin)));
      });
    }
    Expr base = Primary();
    if (Take("**")) return Nested([&] { return Expr(MapOp::kPower, {base, Negated()}); });
    return base;
  }

  // Folds the sign into a constant, which saves a node. text: the value as it is written.
  static Expr Minus(const Expr& value, absl::string_view text) {
    std::int64_t integer = 0;
    if (absl::SimpleAtoi(absl::StrCat("-", text), &integer)) return integer;
    const v1::Expression message = value.ToMessage();
    const v1::Expression::Node& node = message.nodes(message.nodes_size() - 1);
    constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
    if (node.has_integer() && node.integer() != kLeast) return -node.integer();
    if (node.has_integer()) return -static_cast<double>(kLeast);
    if (node.has_real()) return -node.real();
    return -value;
  }

  template <class F>
  Expr Nested(F f) {
    if (depth_ >= kDeepest) return Fail("it is nested too deeply");
    ++depth_;
    Expr value = f();
    --depth_;
    return value;
  }

  Expr Primary() {
    if (Take("(")) {
      return Nested([&] {
        Expr inner = Level(0);
        Expect(")");
        return inner;
      });
    }
    SkipSpace();
    if (at_ == text_.size()) return Fail("an operand is expected");
    const char c = text_[at_];
    if (IsDigit(c) || c == '.') return Number();
    if (IsWordCharacter(c)) return Word();
    return Fail("an operand or a number is expected");
  }

  Expr Number() {
    const std::size_t begin = at_;
    bool real = false;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      const bool exponent = c == 'e' || c == 'E';
      if (!IsDigit(c) && c != '.' && !exponent) break;
      real |= c == '.' || exponent;
      ++at_;
      if (exponent && at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
    }
    const absl::string_view digits = Absl(text_.substr(begin, at_ - begin));
    std::int64_t integer = 0;
    if (!real && absl::SimpleAtoi(digits, &integer)) return integer;
    double value = 0;
    const bool valid = absl::SimpleAtod(digits, &value);
    if (valid && (real || std::isfinite(value))) return value;
    at_ = begin;
    return Fail(valid ? "the integer is beyond the range of f64" : "the number is not valid");
  }

  Expr Word() {
    const std::size_t begin = at_;
    while (at_ < text_.size() && IsWordCharacter(text_[at_])) ++at_;
    const std::string_view word = text_.substr(begin, at_ - begin);
    if (word.size() == 1 && word[0] >= 'a' && word[0] <= 'h')
      return Element(static_cast<std::uint32_t>(word[0] - 'a'));
    if (word == "true") return true;
    if (word == "false") return false;
    if (word == "inf") return std::numeric_limits<double>::infinity();
    if (word == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (word == "coordinate") return Axis();
    for (const DTypeInfo& info : kDTypeInfos)
      if (word == info.name) return Nested([&] { return Call(MapOp::kCast, 1, info.dtype); });
    for (const MapOpInfo& info : kMapOpInfos) {
      if (word == info.name && info.rule != MapRule::kCast)
        return Nested([&] { return Call(info.op, info.arguments, std::nullopt); });
    }
    at_ = begin;
    return Fail(absl::StrCat("the name '", Absl(word), "' is unknown"));
  }

  Expr Axis() {
    Expect("(");
    const std::size_t begin = at_;
    while (at_ < text_.size() && text_[at_] != ')') ++at_;
    std::int32_t axis = 0;
    if (!absl::SimpleAtoi(Absl(text_.substr(begin, at_ - begin)), &axis)) {
      at_ = begin;
      return Fail("the number of an axis is expected");
    }
    Expect(")");
    return Coordinate(axis);
  }

  Expr Call(MapOp op, int arguments, std::optional<DType> dtype) {
    std::vector<Expr> args;
    Expect("(");
    for (int i = 0; i < arguments && status_.ok(); ++i) {
      if (i > 0) Expect(",");
      args.push_back(Level(0));
    }
    Expect(")");
    return Expr(op, std::move(args), dtype);
  }

  const std::string_view text_;
  std::size_t at_ = 0;
  int depth_ = 0;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<Expr> ParseExpression(std::string_view text) { return Parser(text).Parse(); }

}  // namespace tessera
