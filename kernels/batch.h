// Batches: many vectors, each folded to a number of its own, in one piece of work. What run.cc and
// the two devices agree on. Standard library only.
#pragma once

#include <cstdint>

#include "kernels/strategy.h"

namespace tessera {

// Contiguous elements in device memory, aligned to the element only; n >= 0, and the addresses
// count only when n > 0.
struct DotSegment {
  const void* a = nullptr;
  const void* b = nullptr;
  std::int64_t n = 0;
};
struct ReduceSegment {
  const void* x = nullptr;
  std::int64_t n = 0;  // > 0 when NeedsElements(op)
};

// results: one for each segment, in host memory that the device can write; whole Scalars are
// written by the time the stream has been synchronised.
struct DotBatchProblem {
  DType dtype = DType::kF32;
  const DotSegment* segments = nullptr;
  std::int64_t count = 0;
  Scalar* results = nullptr;
};
struct ReduceBatchProblem {
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  const ReduceSegment* segments = nullptr;
  std::int64_t count = 0;
  Scalar* results = nullptr;
};

// A segment as a problem of its own.
inline DotProblem ProblemOf(const DotBatchProblem& batch, std::int64_t i) {
  const DotSegment& segment = batch.segments[i];
  DotProblem problem;
  problem.dtype = batch.dtype;
  problem.n = segment.n;
  problem.a = segment.a;
  problem.b = segment.b;
  problem.result = batch.results + i;
  return problem;
}

inline ReduceProblem ProblemOf(const ReduceBatchProblem& batch, std::int64_t i) {
  const ReduceSegment& segment = batch.segments[i];
  ReduceProblem problem;
  problem.dtype = batch.dtype;
  problem.op = batch.op;
  problem.n = segment.n;
  problem.x = segment.x;
  problem.result = batch.results + i;
  return problem;
}

// How one kind of device runs batches. Like a Strategy: stateless, callable from many threads at
// once, each with its own stream. The result of a segment is the same whatever else is in the
// batch.
template <class Problem>
struct Batch {
  // Enqueues the work. Throws DeviceError. The segments may change once it has returned. timing: it
  // starts the stream's timer before the first piece of work on the device, when its tables are
  // made.
  void (*launch)(const Problem&, Stream&, bool timing) = nullptr;
  // Strategy's, of one segment of n elements.
  double (*roundoff)(const Problem&, std::int64_t n, const Device&) = nullptr;
};

extern const Batch<DotBatchProblem> kDotBatchCpu;
extern const Batch<DotBatchProblem> kDotBatchCuda;
extern const Batch<ReduceBatchProblem> kReduceBatchCpu;
extern const Batch<ReduceBatchProblem> kReduceBatchCuda;

}  // namespace tessera
