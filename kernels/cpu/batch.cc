// Batches on the CPU: each segment by the strategy that a request of its own would get, and so with
// that strategy's bits. Short segments are shared out among the cores; long ones come one after the
// other, and the strategy shares out their elements.
#include "kernels/batch.h"

#include <cstddef>
#include <exception>

#include "kernels/compute.h"

namespace tessera {
namespace {

// From here on a segment has work for several cores.
constexpr std::int64_t kLong = std::int64_t{1} << 16;
// Segments that a thread takes at a time.
constexpr int kShare = 16;

// CPU strategies leave the stream alone, so that many threads may hand them the same.
template <class Problem>
void RunSegment(const Problem& batch, std::int64_t i, Stream& stream) {
  batch.results[i] = Scalar{};
  const auto problem = ProblemOf(batch, i);
  Choose(problem, stream.device())->launch(problem, stream);
}

template <class Problem>
void RunBatch(const Problem& batch, Stream& stream, bool timing) {
  if (timing) stream.StartTimer();
  std::exception_ptr failure;  // none may leave the parallel loop
#pragma omp parallel for schedule(dynamic, kShare) if (batch.count > kShare)
  for (std::int64_t i = 0; i < batch.count; ++i) {
    if (batch.segments[i].n >= kLong || stream.stopped()) continue;
    try {
      RunSegment(batch, i, stream);
    } catch (...) {
#pragma omp critical
      failure = std::current_exception();
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  for (std::int64_t i = 0; i < batch.count; ++i)
    if (batch.segments[i].n >= kLong && !stream.stopped()) RunSegment(batch, i, stream);
}

}  // namespace

const Batch<DotBatchProblem> kDotBatchCpu = {
    .launch = RunBatch<DotBatchProblem>,
    .roundoff =
        [](const DotBatchProblem& batch, std::int64_t n, const Device& device) {
          const DotProblem problem{.dtype = batch.dtype, .n = n};
          return Choose(problem, device)->roundoff(problem);
        },
};

const Batch<ReduceBatchProblem> kReduceBatchCpu = {
    .launch = RunBatch<ReduceBatchProblem>,
    .roundoff =
        [](const ReduceBatchProblem& batch, std::int64_t n, const Device& device) {
          const ReduceProblem problem{.dtype = batch.dtype, .op = batch.op, .n = n};
          return Choose(problem, device)->roundoff(problem);
        },
};

}  // namespace tessera
