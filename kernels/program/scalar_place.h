// How numbers that later steps read are kept in a program's block.
#pragma once

#include <cstdint>

namespace tessera {

// Everything in the block begins at a multiple of this.
inline constexpr std::uint64_t kBlockAlignment = 256;
// The size of a scalar's place, and where in it the value is before it is rounded.
inline constexpr std::uint64_t kScalarBytes = 2 * kBlockAlignment;
inline constexpr std::uint64_t kUnrounded = kBlockAlignment;

}  // namespace tessera
