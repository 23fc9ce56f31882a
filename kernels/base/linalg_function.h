// The functions of Linalg.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tessera {

// The values equal those of tessera.v1.LinalgFunction on the wire.
enum class LinalgFunction : std::uint8_t {
  kCholesky = 1,
  kSolve,
  kInverse,
  kDeterminant,
  kEigh,
  kQr,
  kSvd
};

inline constexpr std::array<LinalgFunction, 7> kAllLinalgFunctions = {
    LinalgFunction::kCholesky,    LinalgFunction::kSolve, LinalgFunction::kInverse,
    LinalgFunction::kDeterminant, LinalgFunction::kEigh,  LinalgFunction::kQr,
    LinalgFunction::kSvd};

constexpr std::string_view Name(LinalgFunction function) {
  constexpr std::string_view kNames[] = {"",     "cholesky", "solve", "inverse", "determinant",
                                         "eigh", "qr",       "svd"};
  return kNames[static_cast<std::size_t>(function)];
}

}  // namespace tessera
