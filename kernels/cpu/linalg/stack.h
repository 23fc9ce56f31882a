// How the CPU's strategies of Linalg divide a stack of matrices among cores.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/device/device.h"

namespace tessera {

// Returns the number of parts into which a stack is divided. Each part has its own scratch memory,
// so the number does not depend on the number of cores.
constexpr std::int64_t StackParts(const LinalgProblem& p) {
  constexpr std::int64_t kMost = 64, kMatrices = 16;  // parts, and the least matrices in a part
  return std::clamp<std::int64_t>((p.stack + kMatrices - 1) / kMatrices, 1, kMost);
}

// Calls compute(x, b, out, part) for each matrix, and sets result->index to the first position for
// which it returns false. Stops between matrices once the stream is stopped.
template <class T, class F>
void ForMatrices(const LinalgProblem& p, const Stream& stream, std::int64_t parts,
                 const F& compute) {
  std::int64_t bad = p.stack;
#pragma omp parallel for schedule(dynamic) reduction(min : bad) if (parts > 1)
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t end = (part + 1) * p.stack / parts;
    for (std::int64_t i = part * p.stack / parts; i < end && !stream.stopped(); ++i) {
      const bool found = compute(static_cast<const T*>(p.x) + i * p.m * p.n,
                                 static_cast<const T*>(p.b) + i * p.n * p.columns,
                                 static_cast<T*>(p.out) + i * p.out_rows() * p.out_columns(), part);
      if (!found) bad = std::min(bad, i);
    }
  }
  p.result->index = bad < p.stack ? bad : -1;
}

}  // namespace tessera
