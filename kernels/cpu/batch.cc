// Batches on the CPU: the problems are shared out among the cores, and each is folded by one.
#include "kernels/batch.h"

#include <cstddef>
#include <exception>

#include "kernels/compute.h"

namespace tessera {
namespace {

// Problems that a thread takes at a time.
constexpr int kShare = 16;

// CPU strategies leave the stream alone, so that many threads may hand them the same.
template <class Problem>
void Enqueue(std::span<const Problem> problems, Stream& stream) {
  if (problems.empty()) return;
  const auto launch = Choose(problems.front(), stream.device())->launch;
  std::exception_ptr failure;  // none may leave the parallel loop
#pragma omp parallel for schedule(dynamic, kShare) if (problems.size() > kShare)
  for (std::size_t i = 0; i < problems.size(); ++i) {
    if (stream.stopped()) continue;
    try {
      launch(problems[i], stream);
    } catch (...) {
#pragma omp critical
      failure = std::current_exception();
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace

void LaunchBatchCpu(std::span<const DotProblem> problems, Stream& stream) {
  Enqueue(problems, stream);
}

void LaunchBatchCpu(std::span<const ReduceProblem> problems, Stream& stream) {
  Enqueue(problems, stream);
}

}  // namespace tessera
