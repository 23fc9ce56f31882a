// Matmul, an expression and TopK as one operation (kernels/problem/product_top_k.h), for whoever
// has them as steps.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/compute.h"
#include "kernels/problem/product_top_k.h"

namespace tessera {

// The steps as one request. The expression's operand `product` is the result of Matmul, and where
// there is no expression the scores are the product itself.
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

// The strategy that does the same as Matmul by `product`, the strategy that it would take, Map and
// TopK by theirs. Null: there is none. Addresses need not be those of memory yet, but are aligned
// as those will be.
const ProductTopKStrategy* FindProductTopK(const ProductTopK& request, std::string_view product,
                                           const Device& device);
// The same, if it is sooner done.
const ProductTopKStrategy* ChooseProductTopK(const ProductTopK& request, std::string_view product,
                                             const Device& device);

// Scratch memory that it takes at most.
std::uint64_t ProductTopKScratch(const ProductTopK& request, const ProductTopKStrategy& strategy,
                                 const Device& device);

// Launches it, and waits unless the options have enqueue_only. Of the options timing counts
// besides. Stats are those of the whole.
absl::StatusOr<Stats> RunProductTopK(Stream& stream, const ProductTopK& request,
                                     const ProductTopKStrategy& strategy, const Output& values,
                                     const Output& indices, const RunOptions& options);

}  // namespace tessera
