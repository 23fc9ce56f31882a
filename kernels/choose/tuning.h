// Which strategy a matrix product gets if the request names none: a decision tree for each type of
// operands, fitted by kernels/bench/tune.py to the times of random products. Standard library only.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "kernels/problem/strategy.h"

namespace tessera {

// The features that the trees compare. Extents are logarithms to base 2. Alignments are logarithms
// of the alignment in bytes of address and pitch, at most 4.
enum class MatmulFeature : std::uint8_t {
  kM,
  kN,
  kK,
  kLeast,    // the smaller of m and n
  kMost,     // the larger
  kResults,  // m n
  kWork,     // m n k
  kDepth,    // k over the smaller of m and n
  kTransposeA,
  kTransposeB,
  kAlignmentA,
  kAlignmentB,
};
inline constexpr std::size_t kMatmulFeatures = 12;
using MatmulFeatures = std::array<float, kMatmulFeatures>;

// A null address counts as aligned.
MatmulFeatures FeaturesOf(const MatmulProblem& p);

// A node of a tree, in preorder. After an inner node comes the branch for features up to the
// threshold; the other branch is `skip` nodes later. A leaf names a strategy.
struct TuningNode {
  std::string_view strategy;  // empty: an inner node
  MatmulFeature feature{};
  float threshold = 0;
  std::uint16_t skip = 0;
};

// Returns the strategy that was fastest for similar products. It may refuse this one, or need
// something that the device does not have. Empty for a type without a tree.
std::string_view TunedStrategy(const MatmulProblem& p);

}  // namespace tessera
