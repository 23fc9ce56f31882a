// Linalg by the textbook's loops: each core computes whole matrices.
//
// Cost for a system of n equations: 2 n^3 / 3 operations, each of which reads and writes an element
// of the matrix, so matrices that do not fit in a core's cache take several times longer than with
// the library, which computes in blocks.
#include <cstdint>

#include "kernels/cpu/linalg/stack.h"
#include "kernels/problem/linalg.h"
#include "kernels/problem/linalg_direct.h"

namespace tessera {
namespace {

std::uint64_t ScratchOf(const LinalgProblem& p) {
  return static_cast<std::uint64_t>(StackParts(p) * DirectWork(p)) * SizeOf(p.dtype);
}

template <class T>
void Run(const LinalgProblem& p, Stream& stream) {
  auto* const scratch = static_cast<T*>(stream.Scratch(ScratchOf(p)));
  const std::int64_t work = DirectWork(p);
  ForMatrices<T>(p, stream, StackParts(p), [&](const T* x, const T* b, T* out, std::int64_t part) {
    return Direct(OneThread(), p, x, b, out, scratch + part * work);
  });
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
          return Cost{.bytes = Whole(2 * LinalgBytes(p)),
                      .flops = Whole(seconds * kCoreFlops),
                      .atomics = 0,
                      .depth = Whole(seconds * kCoreSteps / static_cast<double>(StackParts(p)))};
        },
    .launch =
        [](const LinalgProblem& p, Stream& stream) {
          p.dtype == DType::kF32 ? Run<float>(p, stream) : Run<double>(p, stream);
        },
    .refuses = RefusesSvd,
    .scratch = ScratchOf,
};

}  // namespace tessera
