#include "kernels/choose/tuning.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <span>

namespace tessera {
namespace {

#include "kernels/choose/matmul_sm90.inc"

float Log2(double x) { return static_cast<float>(std::log2(x)); }

float Alignment(const void* data, std::int64_t pitch, DType dtype) {
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(data) |
                             (static_cast<std::uint64_t>(pitch) * SizeOf(dtype)) | 16;
  return static_cast<float>(std::countr_zero(bits));
}

std::span<const TuningNode> TreeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return kTreeF32;
    case DType::kF64:
      return kTreeF64;
    case DType::kF16:
    case DType::kBF16:
      return kTreeF16;
    case DType::kI32:
      return kTreeI32;
    default:
      return {};
  }
}

}  // namespace

MatmulFeatures FeaturesOf(const MatmulProblem& p) {
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n),
             k = static_cast<double>(p.k);
  const double least = std::min(m, n);
  return {Log2(m),
          Log2(n),
          Log2(k),
          Log2(least),
          Log2(std::max(m, n)),
          Log2(m * n),
          Log2(m * n * k),
          Log2(k / least),
          p.transpose_a ? 1.0f : 0.0f,
          p.transpose_b ? 1.0f : 0.0f,
          Alignment(p.a, p.lda, p.dtype),
          Alignment(p.b, p.ldb, p.dtype)};
}

std::string_view TunedStrategy(const MatmulProblem& p) {
  const std::span<const TuningNode> tree = TreeOf(p.dtype);
  if (tree.empty()) return {};
  const MatmulFeatures features = FeaturesOf(p);
  std::size_t at = 0;
  while (tree[at].strategy.empty()) {
    const TuningNode& node = tree[at];
    const bool up_to = features[static_cast<std::size_t>(node.feature)] <= node.threshold;
    at += up_to ? 1 : node.skip;
  }
  const std::string_view strategy = tree[at].strategy;
  return strategy == "tensor_f16" && p.dtype == DType::kBF16 ? "tensor_bf16" : strategy;
}

}  // namespace tessera
