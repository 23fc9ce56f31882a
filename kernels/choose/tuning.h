// Chooses the strategy of a matrix product if the request names none, with one decision tree per
// operand type. kernels/bench/tune.py fits the trees to the times of random products. Uses only the
// standard library.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "kernels/problem/strategy.h"

namespace tessera {

// The features that the trees compare. Extents are given as base-2 logarithms. Alignments are the
// base-2 logarithms of the alignment of address and pitch in bytes, and are at most 4.
enum class MatmulFeature : std::uint8_t {
  kM,
  kN,
  kK,
  kLeast,    // the smaller of m and n
  kMost,     // the larger of m and n
  kResults,  // m n
  kWork,     // m n k
  kDepth,    // k divided by the smaller of m and n
  kTransposeA,
  kTransposeB,
  kAlignmentA,
  kAlignmentB,
};
inline constexpr std::size_t kMatmulFeatures = 12;
using MatmulFeatures = std::array<float, kMatmulFeatures>;

// Returns the features of the product. A null address counts as aligned.
MatmulFeatures FeaturesOf(const MatmulProblem& p);

// A node of a tree that is stored in preorder. An inner node is followed by the branch for feature
// values up to the threshold; the other branch begins `skip` nodes after the inner node. A leaf
// names a strategy.
struct TuningNode {
  std::string_view strategy;  // empty: an inner node
  MatmulFeature feature{};
  float threshold = 0;
  std::uint16_t skip = 0;
};

// Returns the strategy that was fastest for similar products. The strategy may refuse this product,
// or need something that the device lacks. Returns an empty name for a type without a tree.
std::string_view TunedStrategy(const MatmulProblem& p);

}  // namespace tessera
