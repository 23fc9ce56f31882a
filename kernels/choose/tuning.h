// Which strategy a matrix product gets that names none: a decision tree for each type of operands,
// fitted to the times of random products by kernels/bench/tune.py. Standard library only.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "kernels/problem/strategy.h"

namespace tessera {

// What the trees ask about. Extents are logarithms to base 2; alignments are of address and pitch
// in bytes, as logarithms, at most 4.
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

// An address that is null counts as aligned.
MatmulFeatures FeaturesOf(const MatmulProblem& p);

// A node of a tree, in preorder: of an inner one, the branch for features up to the threshold comes
// next, and the other one `skip` nodes later. A leaf names a strategy.
struct TuningNode {
  std::string_view strategy;  // empty: an inner node
  MatmulFeature feature{};
  float threshold = 0;
  std::uint16_t skip = 0;
};

// The strategy that was fastest for products like this one; it may refuse this one, or need what
// the device does not have. Empty for a type without a tree.
std::string_view TunedStrategy(const MatmulProblem& p);

}  // namespace tessera
