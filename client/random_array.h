// Arrays of pseudo-random numbers. The elements are computed when they are read, so that a test can
// upload an array of any size without holding it in memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "client/client.h"
#include "kernels/base/dtype.h"

namespace tessera {

enum class Distribution {
  kNormal,   // mean 0, standard deviation 1
  kUniform,  // [0, 1)
  kOnes,
  kZeros,
};

// Parses "normal", "uniform", "ones" or "zeros". Returns nullopt for anything else.
std::optional<Distribution> ParseDistribution(std::string_view name);

// Element i depends only on the seed, the distribution, the type and i. For the random
// distributions, an integer element is 100 times the random number, rounded. A u8 element is the
// absolute value of that integer, and u8 and i8 are clamped to their ranges. A bool is true if the
// number is above 0. Offsets must be multiples of 16 bytes.
Source RandomArray(Distribution distribution, DType dtype, std::uint64_t seed);

}  // namespace tessera
