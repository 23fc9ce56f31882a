// Batches on the CPU: the problems are divided among the cores, and each problem is folded by one
// core.
#include "kernels/same_bits/batch.h"

#include <cstddef>
#include <exception>

#include "kernels/compute.h"

namespace tessera {
namespace {

// Number of problems that a thread takes at a time.
constexpr int kShare = 16;

// problem_of(i) returns problem i of `count`. CPU strategies do not modify the stream, so several
// threads may pass them the same stream.
template <class F>
void Enqueue(std::size_t count, Stream& stream, const F& problem_of) {
  if (count == 0) return;
  const auto launch = Choose(problem_of(0), stream.device())->launch;
  std::exception_ptr failure;  // no exception may leave the parallel loop
#pragma omp parallel for schedule(dynamic, kShare) if (count > kShare)
  for (std::size_t i = 0; i < count; ++i) {
    if (stream.stopped()) continue;
    try {
      launch(problem_of(i), stream);
    } catch (...) {
#pragma omp critical
      failure = std::current_exception();
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace

void LaunchBatchCpu(DType dtype, std::span<const DotItem> items, Scalar* results, Stream& stream) {
  Enqueue(items.size(), stream,
          [=](std::size_t i) { return ProblemOf(dtype, items[i], results + i); });
}

void LaunchBatchCpu(DType dtype, ReduceOp op, std::span<const ReduceItem> items, Scalar* results,
                    Stream& stream) {
  Enqueue(items.size(), stream,
          [=](std::size_t i) { return ProblemOf(dtype, op, items[i], results + i); });
}

}  // namespace tessera
