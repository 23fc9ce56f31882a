// The costs and the error bound that the strategies of Linalg share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/problem/roundoff.h"
#include "kernels/problem/strategy.h"

namespace tessera {

// The most rows and columns of a matrix, and the most right sides. LAPACK's sizes are 32-bit
// numbers, and it needs workspaces of up to four times the size of the matrix.
inline constexpr std::int64_t kMostLinalgExtent = 20'000;
inline constexpr std::int64_t kMostRightSides = std::int64_t{1} << 30;

// Returns the operations for one matrix by Householder's methods and elimination (Golub and Van
// Loan, Matrix Computations, 2013, sections 3.2, 4.2, 5.2, 8.3 and 8.6).
inline double LinalgFlops(const LinalgProblem& p) {
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n);
  const double least = std::min(m, n), most = std::max(m, n);
  switch (p.function) {
    case LinalgFunction::kCholesky:
      return n * n * n / 3;
    case LinalgFunction::kSolve:
      return n * n * (n / 1.5 + 2 * static_cast<double>(p.columns));
    case LinalgFunction::kInverse:
      return n * n * n * 8 / 3;
    case LinalgFunction::kDeterminant:
      return n * n * n / 1.5;
    case LinalgFunction::kEigh:
      return 9 * n * n * n;
    case LinalgFunction::kQr:
      return 4 * m * n * least;
    default:
      return least * least * (6 * most + 16 * least);
  }
}

// Returns the bytes of the operands and of the result.
inline double LinalgBytes(const LinalgProblem& p) {
  const double columns = static_cast<double>(p.n) + static_cast<double>(p.columns);
  return (static_cast<double>(p.stack) * static_cast<double>(p.m) * columns +
          static_cast<double>(p.elements())) *
         static_cast<double>(SizeOf(p.dtype));
}

// Converts a number of operations or bytes, which may be beyond the range of 64 bits.
inline std::uint64_t Whole(double number) {
  return static_cast<std::uint64_t>(std::min(number, 0x1p62));
}

// The operations and the dependent steps that a core does in a second, as Pace assumes before it
// has measured a strategy.
inline constexpr double kCoreFlops = 2e9, kCoreSteps = 1 / 1.2e-9;

// A bound on the backward error: the result is exact for a matrix that differs from x by at most
// this factor times the Frobenius norm of x, and for right sides that differ as little. The errors
// of n operations per element are assumed to add up, and pivots not to grow (Higham, Accuracy and
// Stability of Numerical Algorithms, 2002, chapters 9, 10 and 19). A solution itself may differ
// from the exact one by the condition number of x times as much.
inline double LinalgRoundoff(const LinalgProblem& p) {
  return 8 * static_cast<double>(std::max(p.m, p.n) + 1) *
         (p.dtype == DType::kF32 ? kRoundoffF32 : kRoundoffF64);
}

}  // namespace tessera
