// Arrays of pseudo-random numbers that are computed where they are read, so that a test can upload
// one of any size without holding it.
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

// "normal", "uniform", "ones", "zeros".
std::optional<Distribution> ParseDistribution(std::string_view name);

// Element i depends on the seed, the distribution, the type and i alone. Integer types hold 100
// times the value of a random distribution, rounded, u8 its absolute value, and u8 and i8 the
// nearest that they have; bool is whether it is above 0. Offsets must be multiples of 16 bytes.
Source RandomArray(Distribution distribution, DType dtype, std::uint64_t seed);

}  // namespace tessera
