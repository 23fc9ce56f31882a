// Expressions for Map, written in C++:
//
//   const tessera::Expr x = tessera::Element(0), mean = tessera::Element(1);
//   client.Map({"samples", "means"}, (x - mean) * 0.5);
//
// Nothing is computed here, because an Expr is a small graph that is sent as a v1::Expression.
// MapOp in proto/tessera/v1/compute.proto says what the operations compute and which types their
// results have.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/base/dtype.h"
#include "kernels/base/map_op.h"
#include "tessera/v1/compute.pb.h"

namespace tessera {

// An expression that has a value for each element. Copies share their nodes. A node that occurs
// twice is computed once.
class Expr {
 public:
  // Creates a constant. Without a dtype, the constant takes the type of the value with which it is
  // combined. An integer of 2^63 or more becomes a floating-point constant.
  template <class T>
  requires std::is_arithmetic_v<T> Expr(T value,  // NOLINT(google-explicit-constructor)
                                        std::optional<DType> dtype = std::nullopt) {
    v1::Expression::Node node;
    if (dtype) node.set_dtype(static_cast<v1::Dtype>(*dtype));
    if constexpr (std::is_same_v<T, bool>) {
      node.set_boolean(value);
    } else if constexpr (std::is_integral_v<T>) {
      if (value > 0 && static_cast<std::int64_t>(value) < 0) {
        node.set_real(static_cast<double>(value));
      } else {
        node.set_integer(static_cast<std::int64_t>(value));
      }
    } else {
      node.set_real(static_cast<double>(value));
    }
    data_ = std::make_shared<const Data>(std::move(node), std::vector<Expr>());
  }
  // Creates an operation. There must be as many `args` as the operation takes. `dtype` is the type
  // to cast to, for CAST only.
  Expr(MapOp op, std::vector<Expr> args, std::optional<DType> dtype = std::nullopt);
  // A move is a copy, so no expression is ever without a value.
  Expr(const Expr&) = default;
  Expr& operator=(const Expr&) = default;

  friend Expr Element(std::uint32_t operand);
  friend Expr Coordinate(std::int32_t axis);
  // Returns all nodes, each once. The last node is the expression itself.
  v1::Expression ToMessage() const;

 private:
  struct Data {
    Data(v1::Expression::Node n, std::vector<Expr> a) : node(std::move(n)), args(std::move(a)) {}
    ~Data();

    v1::Expression::Node node;  // without its arguments
    std::vector<Expr> args;
  };
  explicit Expr(v1::Expression::Node node);

  std::shared_ptr<const Data> data_;
};

// Returns the element of the operand with this index.
Expr Element(std::uint32_t operand);
// Returns the element's coordinate along an axis of the shape to which operands are broadcast.
Expr Coordinate(std::int32_t axis);

inline Expr operator+(const Expr& a, const Expr& b) { return {MapOp::kAdd, {a, b}}; }
inline Expr operator-(const Expr& a, const Expr& b) { return {MapOp::kSubtract, {a, b}}; }
inline Expr operator*(const Expr& a, const Expr& b) { return {MapOp::kMultiply, {a, b}}; }
inline Expr operator/(const Expr& a, const Expr& b) { return {MapOp::kDivide, {a, b}}; }
inline Expr operator-(const Expr& a) { return {MapOp::kNegate, {a}}; }
inline Expr operator==(const Expr& a, const Expr& b) { return {MapOp::kEqual, {a, b}}; }
inline Expr operator!=(const Expr& a, const Expr& b) { return {MapOp::kNotEqual, {a, b}}; }
inline Expr operator<(const Expr& a, const Expr& b) { return {MapOp::kLess, {a, b}}; }
inline Expr operator<=(const Expr& a, const Expr& b) { return {MapOp::kLessEqual, {a, b}}; }
inline Expr operator>(const Expr& a, const Expr& b) { return {MapOp::kGreater, {a, b}}; }
inline Expr operator>=(const Expr& a, const Expr& b) { return {MapOp::kGreaterEqual, {a, b}}; }
// Logical operators for booleans.
inline Expr operator&(const Expr& a, const Expr& b) { return {MapOp::kAnd, {a, b}}; }
inline Expr operator|(const Expr& a, const Expr& b) { return {MapOp::kOr, {a, b}}; }
inline Expr operator^(const Expr& a, const Expr& b) { return {MapOp::kXor, {a, b}}; }
inline Expr operator!(const Expr& a) { return {MapOp::kNot, {a}}; }

inline Expr Where(const Expr& condition, const Expr& a, const Expr& b) {
  return {MapOp::kWhere, {condition, a, b}};
}
inline Expr Cast(const Expr& a, DType dtype) { return {MapOp::kCast, {a}, dtype}; }

}  // namespace tessera
