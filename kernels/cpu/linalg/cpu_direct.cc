// Linalg by the textbook's loops: each core computes whole matrices.
//
// Cost for a system of n equations: 2 n^3 / 3 operations, each of which reads and writes an element
// of the matrix, so matrices that do not fit in a core's cache take several times longer than with
// the library, which computes in blocks.
#include <algorithm>
#include <cstdint>

#include "kernels/cpu/runtime/chunks.h"
#include "kernels/problem/linalg.h"
#include "kernels/problem/linalg_direct.h"

namespace tessera {
namespace {

// The least number of matrices for which another core is worthwhile.
constexpr std::int64_t kTogether = 16;

// The number of parts into which the stack is divided. Each part has its own scratch memory.
std::int64_t Cores(const LinalgProblem& p) {
  return std::min<std::int64_t>(64, (p.stack + kTogether - 1) / kTogether);
}

std::uint64_t ScratchOf(const LinalgProblem& p) {
  return static_cast<std::uint64_t>(Cores(p) * DirectWork(p)) * SizeOf(p.dtype);
}

template <class T>
void Run(const LinalgProblem& p, Stream& stream) {
  auto* const scratch = static_cast<T*>(stream.Scratch(ScratchOf(p)));
  const std::int64_t cores = Cores(p), work = DirectWork(p);
  std::int64_t bad = p.stack;
#pragma omp parallel for schedule(static) reduction(min : bad) if (cores > 1)
  for (std::int64_t core = 0; core < cores; ++core) {
    const std::int64_t end = (core + 1) * p.stack / cores;
    for (std::int64_t i = core * p.stack / cores; i < end && !stream.stopped(); ++i) {
      const bool found = Direct(OneThread(), p, static_cast<const T*>(p.x) + i * p.m * p.n,
                                static_cast<const T*>(p.b) + i * p.n * p.columns,
                                static_cast<T*>(p.out) + i * p.out_rows() * p.out_columns(),
                                scratch + core * work);
      if (!found) bad = std::min(bad, i);
    }
  }
  p.result->index = bad < p.stack ? bad : -1;
}

}  // namespace

extern constexpr Strategy<LinalgProblem> kLinalgCpuDirect = {
    .name = "cpu_direct",
    .summary = "the textbook's loops, one matrix per core at a time",
    .source = "Golub and Van Loan, Matrix Computations, 2013",
    .dtypes = DTypesOf(DType::kF32, DType::kF64),
    .deterministic = true,
    .roundoff = LinalgRoundoff,
    .cost =
        [](const LinalgProblem& p) {
          const double seconds = static_cast<double>(p.stack) * DirectSeconds(p);
          const auto cores = static_cast<double>(std::max<std::int64_t>(1, Cores(p)));
          return Cost{.bytes = Whole(2 * LinalgBytes(p)),
                      .flops = Whole(seconds * kCoreFlops),
                      .atomics = 0,
                      .depth = Whole(seconds * kCoreSteps / cores)};
        },
    .launch =
        [](const LinalgProblem& p, Stream& stream) {
          p.dtype == DType::kF32 ? Run<float>(p, stream) : Run<double>(p, stream);
        },
    .refuses = RefusesSvd,
    .scratch = ScratchOf,
};

}  // namespace tessera
