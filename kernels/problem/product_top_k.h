// A product that selects: the best elements of each row of a matrix product, or of scores that are
// made of it, without the product in memory. It stands for three steps of a program, Matmul, Map
// and TopK, whose results nobody else reads, and has their bits. Standard library only.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/problem/map.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// What an element c of the product becomes before it is compared, rounded to the scores' type after
// every operation:
//
//     outer * (vector + scale * c)
//
// A factor of 1 and no vector change nothing, whatever c is: -0 is added for want of a vector.
struct Score {
  float scale = 1;
  float outer = 1;
  int vector = -1;       // an operand of the expression; -1: none
  bool negated = false;  // the vector is subtracted
};

// The expression as such a score of operand `product`, if it is one: s * c, v + c, v - c, c - v,
// v - s * c, s * (v - c), and their like, in any order of arguments, in one floating-point type.
std::optional<Score> FindScore(const MapProgram& program, int product);

// product.c is not used; product.out_dtype is the type of the scores, of the vector and of values.
// values and indices are [m, k].
struct ProductTopKProblem {
  MatmulProblem product;
  Score score;
  const void* vector = nullptr;  // its element for column j: at j * stride
  std::int64_t stride = 0;
  bool smallest = false;
  std::int64_t k = 0;
  void* values = nullptr;
  std::int64_t* indices = nullptr;
};

// One way to do it: a constant defined in its own file.
struct ProductTopKStrategy {
  std::string_view name;
  std::string_view product;  // the strategy of Matmul whose bits scores are made of
  // What it asks of a problem that this one does not meet; empty: it takes it.
  std::string (*refuses)(const ProductTopKProblem&, const Device&);
  Cost (*cost)(const ProductTopKProblem&);
  // Scratch memory that a launch takes at most: less than the scores would.
  std::uint64_t (*scratch)(const ProductTopKProblem&, const Device&);
  // Throws DeviceError.
  void (*launch)(const ProductTopKProblem&, Stream&);
};

}  // namespace tessera
