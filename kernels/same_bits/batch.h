// Batches: many short Dot or Reduce problems that share one launch. The results have the same bits
// as those of the strategy `fixed_tree`. kernels/run/ calls this interface, and the CPU and CUDA
// backends implement it. Uses only the standard library.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/problem/strategy.h"
#include "kernels/same_bits/fixed_tree.h"

namespace tessera {

// The maximum size of an operand in bytes. An array of at most this size is one chunk of the fixed
// tree.
inline constexpr std::int64_t kBatchBytes = 8 * kTreeRowBytes;

// A problem with contiguous operands of n elements and at most kBatchBytes each.
template <int kOperands>
struct alignas(16) BatchItem {
  const void* x[kOperands];
  std::int64_t n;
};
using DotItem = BatchItem<2>;
using ReduceItem = BatchItem<1>;

// Enqueues problems of one dtype and, for Reduce, one op. The result of items[i] is written to
// results[i], in memory of the kind that Strategy::launch requires. The items may change once the
// call has returned. Throws DeviceError.
void LaunchBatch(DType dtype, std::span<const DotItem> items, Scalar* results, Stream& stream);
void LaunchBatch(DType dtype, ReduceOp op, std::span<const ReduceItem> items, Scalar* results,
                 Stream& stream);

// The implementations of LaunchBatch for the CPU and for CUDA.
void LaunchBatchCpu(DType dtype, std::span<const DotItem> items, Scalar* results, Stream& stream);
void LaunchBatchCpu(DType dtype, ReduceOp op, std::span<const ReduceItem> items, Scalar* results,
                    Stream& stream);
void LaunchBatchCuda(DType dtype, std::span<const DotItem> items, Scalar* results, Stream& stream);
void LaunchBatchCuda(DType dtype, ReduceOp op, std::span<const ReduceItem> items, Scalar* results,
                     Stream& stream);

// Returns the problem of one item of a batch.
inline DotProblem ProblemOf(DType dtype, const DotItem& item, Scalar* result) {
  return {.dtype = dtype, .n = item.n, .a = item.x[0], .b = item.x[1], .result = result};
}
inline ReduceProblem ProblemOf(DType dtype, ReduceOp op, const ReduceItem& item, Scalar* result) {
  return {.dtype = dtype, .op = op, .n = item.n, .x = item.x[0], .result = result};
}

}  // namespace tessera
