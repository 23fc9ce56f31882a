// The operations of an expression (Map), and their properties that do not depend on the strategy.
// Uses only the standard library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

// The values equal those of tessera.v1.MapOp on the wire.
enum class MapOp : std::uint8_t {
  kAdd = 1,
  kSubtract,
  kMultiply,
  kDivide,
  kFloorDivide,
  kRemainder,
  kPower,
  kMinimum,
  kMaximum,
  kFma,
  kClip,
  kNegate,
  kAbs,
  kSign,
  kFloor,
  kCeil,
  kTrunc,
  kRound,
  kSqrt,
  kExp,
  kLog,
  kTanh,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kAnd,
  kOr,
  kXor,
  kNot,
  kWhere,
  kCast,
  kRandomBits,
  kNdtri,
  kSin,
  kCos,
  kTan,
  kAsin,
  kAcos,
  kAtan,
  kAtan2,
  kSinh,
  kCosh,
  kAsinh,
  kAcosh,
  kAtanh,
  kExpm1,
  kLog1p,
  kLog2,
  kLog10,
  kCbrt,
  kHypot,
  kShiftLeft,
  kShiftRight,
};

// The rule for the types of an operation's arguments and of its result.
enum class MapRule : std::uint8_t {
  kNumbers,     // one numeric type for all arguments and the result
  kReals,       // the same, but integers become F64
  kComparison,  // one type for all arguments; the result is BOOL
  kLogic,       // only BOOL, or one integer type for all arguments and the result
  kIntegers,    // one integer type for all arguments and the result
  kSelect,      // BOOL first; one type for the other arguments and the result
  kCast,        // any type; the result has the type that the node names
  kBits,        // integers, which are converted to I64; the result is I64
};

struct MapOpInfo {
  MapOp op;
  std::string_view name;  // as the CLI and the documents spell it
  int arguments;
  MapRule rule;
  int flops;  // cost per element in additions, for the slowest operands
};

// The list of all operations of an expression, in the order of their values.
// kernels/expression/map_math.h defines what each one computes.
inline constexpr std::array<MapOpInfo, 56> kMapOpInfos = {{
    {MapOp::kAdd, "add", 2, MapRule::kNumbers, 1},
    {MapOp::kSubtract, "subtract", 2, MapRule::kNumbers, 1},
    {MapOp::kMultiply, "multiply", 2, MapRule::kNumbers, 1},
    {MapOp::kDivide, "divide", 2, MapRule::kReals, 4},
    {MapOp::kFloorDivide, "floor_divide", 2, MapRule::kNumbers, 32},
    {MapOp::kRemainder, "remainder", 2, MapRule::kNumbers, 256},
    {MapOp::kPower, "power", 2, MapRule::kNumbers, 96},
    {MapOp::kMinimum, "minimum", 2, MapRule::kNumbers, 1},
    {MapOp::kMaximum, "maximum", 2, MapRule::kNumbers, 1},
    {MapOp::kFma, "fma", 3, MapRule::kNumbers, 8},
    {MapOp::kClip, "clip", 3, MapRule::kNumbers, 2},
    {MapOp::kNegate, "negate", 1, MapRule::kNumbers, 1},
    {MapOp::kAbs, "abs", 1, MapRule::kNumbers, 1},
    {MapOp::kSign, "sign", 1, MapRule::kNumbers, 2},
    {MapOp::kFloor, "floor", 1, MapRule::kNumbers, 2},
    {MapOp::kCeil, "ceil", 1, MapRule::kNumbers, 2},
    {MapOp::kTrunc, "trunc", 1, MapRule::kNumbers, 2},
    {MapOp::kRound, "round", 1, MapRule::kNumbers, 2},
    {MapOp::kSqrt, "sqrt", 1, MapRule::kReals, 8},
    {MapOp::kExp, "exp", 1, MapRule::kReals, 24},
    {MapOp::kLog, "log", 1, MapRule::kReals, 16},
    {MapOp::kTanh, "tanh", 1, MapRule::kReals, 32},
    {MapOp::kEqual, "equal", 2, MapRule::kComparison, 1},
    {MapOp::kNotEqual, "not_equal", 2, MapRule::kComparison, 1},
    {MapOp::kLess, "less", 2, MapRule::kComparison, 1},
    {MapOp::kLessEqual, "less_equal", 2, MapRule::kComparison, 1},
    {MapOp::kGreater, "greater", 2, MapRule::kComparison, 1},
    {MapOp::kGreaterEqual, "greater_equal", 2, MapRule::kComparison, 1},
    {MapOp::kAnd, "and", 2, MapRule::kLogic, 1},
    {MapOp::kOr, "or", 2, MapRule::kLogic, 1},
    {MapOp::kXor, "xor", 2, MapRule::kLogic, 1},
    {MapOp::kNot, "not", 1, MapRule::kLogic, 1},
    {MapOp::kWhere, "where", 3, MapRule::kSelect, 1},
    {MapOp::kCast, "cast", 1, MapRule::kCast, 1},
    {MapOp::kRandomBits, "random_bits", 3, MapRule::kBits, 64},
    {MapOp::kNdtri, "ndtri", 1, MapRule::kReals, 96},
    {MapOp::kSin, "sin", 1, MapRule::kReals, 96},
    {MapOp::kCos, "cos", 1, MapRule::kReals, 96},
    {MapOp::kTan, "tan", 1, MapRule::kReals, 96},
    {MapOp::kAsin, "asin", 1, MapRule::kReals, 32},
    {MapOp::kAcos, "acos", 1, MapRule::kReals, 32},
    {MapOp::kAtan, "atan", 1, MapRule::kReals, 48},
    {MapOp::kAtan2, "atan2", 2, MapRule::kReals, 64},
    {MapOp::kSinh, "sinh", 1, MapRule::kReals, 48},
    {MapOp::kCosh, "cosh", 1, MapRule::kReals, 40},
    {MapOp::kAsinh, "asinh", 1, MapRule::kReals, 40},
    {MapOp::kAcosh, "acosh", 1, MapRule::kReals, 48},
    {MapOp::kAtanh, "atanh", 1, MapRule::kReals, 40},
    {MapOp::kExpm1, "expm1", 1, MapRule::kReals, 32},
    {MapOp::kLog1p, "log1p", 1, MapRule::kReals, 32},
    {MapOp::kLog2, "log2", 1, MapRule::kReals, 24},
    {MapOp::kLog10, "log10", 1, MapRule::kReals, 48},
    {MapOp::kCbrt, "cbrt", 1, MapRule::kReals, 64},
    {MapOp::kHypot, "hypot", 2, MapRule::kReals, 96},
    {MapOp::kShiftLeft, "shift_left", 2, MapRule::kIntegers, 2},
    {MapOp::kShiftRight, "shift_right", 2, MapRule::kIntegers, 2},
}};

inline constexpr int kMostArguments = 3;

// Returns null for a value that is not in the list.
constexpr const MapOpInfo* InfoOf(MapOp op) {
  const auto i = static_cast<std::size_t>(op) - 1;
  return i < kMapOpInfos.size() ? &kMapOpInfos[i] : nullptr;
}

}  // namespace tessera
