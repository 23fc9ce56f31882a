// Matmul, an expression and TopK as one operation (kernels/problem/product_top_k.h), for callers
// that have them as steps of a program.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "kernels/compute.h"
#include "kernels/problem/product_top_k.h"

namespace tessera {

// The steps as one request. Operand `product` of the expression is the result of Matmul. Without an
// expression, the scores are the product itself.
struct ProductTopK {
  View a, b;
  bool transpose_a = false, transpose_b = false;
  DType out_dtype = DType::kF32;
  const Expression* expression = nullptr;
  absl::InlinedVector<View, 2> operands;  // of the expression
  int product = 0;
  std::int64_t k = 0;
  bool smallest = false;
};

// Returns the strategy with the same results as Matmul, Map and TopK in sequence, or null if there
// is none. `product` is the strategy that Matmul would use. Addresses need not be real yet, but
// must be aligned as the real ones will be.
const ProductTopKStrategy* FindProductTopK(const ProductTopK& request, std::string_view product,
                                           const Device& device);
// Returns the same strategy, but only if it is faster than the separate steps.
const ProductTopKStrategy* ChooseProductTopK(const ProductTopK& request, std::string_view product,
                                             const Device& device);

// Returns the maximum scratch memory that the strategy needs.
std::uint64_t ProductTopKScratch(const ProductTopK& request, const ProductTopKStrategy& strategy,
                                 const Device& device);

// Launches the strategy, and waits unless options.enqueue_only is set. Of the other options, only
// timing has an effect. Stats cover the whole operation.
absl::StatusOr<Stats> RunProductTopK(Stream& stream, const ProductTopK& request,
                                     const ProductTopKStrategy& strategy, const Output& values,
                                     const Output& indices, const RunOptions& options);

}  // namespace tessera
