// A fused product and TopK: it selects the best elements of each row of a matrix product, or of
// scores that are computed from the product, without writing the product to memory. It replaces
// three steps of a program (Matmul, Map and TopK) if nothing else reads the results of the first
// two, and gives the same bits. Uses only the standard library.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/problem/map.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// The score that is computed from an element c of the product and then compared. Every operation
// rounds to the scores' type:
//
//     outer * (vector + scale * c)
//
// For any c, factors of 1 change nothing, and neither does a missing vector, which counts as -0.
struct Score {
  float scale = 1;
  float outer = 1;
  int vector = -1;       // an operand of the expression; -1: none
  bool negated = false;  // the vector is subtracted
};

// Returns the expression as a score of operand `product` if it has that form. Examples are s * c, v
// + c, v - c, c - v, v - s * c and s * (v - c). Arguments may be in any order, and all values must
// have one floating-point type.
std::optional<Score> FindScore(const MapProgram& program, int product);

// product.c is not used; product.out_dtype is the type of the scores, the vector and the values.
// values and indices are [m, k].
struct ProductTopKProblem {
  MatmulProblem product;
  Score score;
  const void* vector = nullptr;  // the element for column j is at j * stride
  std::int64_t stride = 0;
  bool smallest = false;
  std::int64_t k = 0;
  void* values = nullptr;
  std::int64_t* indices = nullptr;
};

// An implementation of the fused operation. Each strategy is a constant in a separate file.
struct ProductTopKStrategy {
  std::string_view name;
  std::string_view product;  // the Matmul strategy that gives the same bits
  // Returns why the strategy does not accept the problem, or an empty string if it accepts it.
  std::string (*refuses)(const ProductTopKProblem&, const Device&);
  Cost (*cost)(const ProductTopKProblem&);
  // Returns the maximum scratch memory of a launch, which is less than the scores would take.
  std::uint64_t (*scratch)(const ProductTopKProblem&, const Device&);
  // Throws DeviceError.
  void (*launch)(const ProductTopKProblem&, Stream&);
};

}  // namespace tessera
