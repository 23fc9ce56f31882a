// The reduction operations, and their properties that do not depend on the strategy. Uses only the
// standard library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/base/dtype.h"

namespace tessera {

// The values equal those of tessera.v1.ReduceOp on the wire.
enum class ReduceOp : std::uint8_t {
  kSum = 1,
  kProduct,
  kMin,
  kMax,
  kArgMin,
  kArgMax,
  kMean,
  kNormL1,
  kNormL2,
  kSumSquares,
  kVariance,
  kAll,
  kAny,
  kStd,
};

struct ReduceOpInfo {
  ReduceOp op;
  std::string_view name;  // as the CLI and the documents spell it
};

// The list of all reduction operations, in the order of their values.
// kernels/same_bits/reduction.h defines what each one computes.
inline constexpr std::array<ReduceOpInfo, 14> kReduceOpInfos = {{
    {ReduceOp::kSum, "sum"},
    {ReduceOp::kProduct, "product"},
    {ReduceOp::kMin, "min"},
    {ReduceOp::kMax, "max"},
    {ReduceOp::kArgMin, "argmin"},
    {ReduceOp::kArgMax, "argmax"},
    {ReduceOp::kMean, "mean"},
    {ReduceOp::kNormL1, "norm_l1"},
    {ReduceOp::kNormL2, "norm_l2"},
    {ReduceOp::kSumSquares, "sum_squares"},
    {ReduceOp::kVariance, "variance"},
    {ReduceOp::kAll, "all"},
    {ReduceOp::kAny, "any"},
    {ReduceOp::kStd, "std"},
}};

inline constexpr auto kAllReduceOps = [] {
  std::array<ReduceOp, kReduceOpInfos.size()> all{};
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = kReduceOpInfos[i].op;
  return all;
}();

// Returns "?" for a value that is not in the list.
constexpr std::string_view Name(ReduceOp op) {
  const auto i = static_cast<std::size_t>(op) - 1;
  return i < kReduceOpInfos.size() ? kReduceOpInfos[i].name : "?";
}

constexpr bool IsArg(ReduceOp op) { return op == ReduceOp::kArgMin || op == ReduceOp::kArgMax; }

// Whether the operation picks an element.
constexpr bool IsOrdering(ReduceOp op) {
  return IsArg(op) || op == ReduceOp::kMin || op == ReduceOp::kMax;
}

// Whether the operation tests elements for zero.
constexpr bool IsLogical(ReduceOp op) { return op == ReduceOp::kAll || op == ReduceOp::kAny; }

// Whether the operation is computed from the squared deviations from the mean.
constexpr bool IsDeviation(ReduceOp op) {
  return op == ReduceOp::kVariance || op == ReduceOp::kStd;
}

// Whether Scan accepts the operation.
constexpr bool Scans(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kProduct || op == ReduceOp::kMin ||
         op == ReduceOp::kMax || IsLogical(op);
}

// Whether the operation has no value for an empty input.
constexpr bool NeedsElements(ReduceOp op) {
  return IsOrdering(op) || op == ReduceOp::kMean || IsDeviation(op);
}

// Whether the operation accepts elements of this type. Only the operations that count or test
// elements accept bool.
constexpr bool Folds(ReduceOp op, DType dtype) {
  return dtype != DType::kBool || IsLogical(op) || op == ReduceOp::kSum || op == ReduceOp::kMean;
}

// The element type of a reduction's result. One-byte elements are folded as I32. Sums and products
// of integers need 64 bits. Means, variances, standard deviations and L2 norms of integers are
// fractions.
constexpr DType ResultDType(ReduceOp op, DType dtype) {
  if (!IsComputed(dtype)) dtype = DType::kI32;
  if (IsArg(op)) return DType::kI64;
  if (IsLogical(op)) return DType::kI32;
  if (!IsInteger(dtype) || IsOrdering(op)) return dtype;
  const bool fraction = op == ReduceOp::kMean || op == ReduceOp::kNormL2 || IsDeviation(op);
  return fraction ? DType::kF64 : DType::kI64;
}

// Whether the operation never rounds on this type.
constexpr bool IsExact(ReduceOp op, DType dtype) {
  return IsOrdering(op) || IsLogical(op) || ResultDType(op, dtype) == DType::kI64;
}

// Whether the operation is a mean whose sum is exact in any order. Only the final conversion to
// double and the division round.
constexpr bool IsExactMean(ReduceOp op, DType dtype) {
  return op == ReduceOp::kMean && IsInteger(dtype);
}

}  // namespace tessera
