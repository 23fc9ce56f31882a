// Batches: many short problems of Dot or Reduce in one piece of work. Each is folded as the
// strategy fixed_tree folds it, with the same bits. run/ and the two devices share this interface.
// Standard library only.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/problem/strategy.h"
#include "kernels/same_bits/fixed_tree.h"

namespace tessera {

// The longest operand in bytes: one chunk of the fixed tree, in an array of at most this size.
inline constexpr std::int64_t kBatchBytes = 8 * kTreeRowBytes;

// A problem: contiguous operands of n elements, of up to kBatchBytes each.
template <int kOperands>
struct alignas(16) BatchItem {
  const void* x[kOperands];
  std::int64_t n;
};
using DotItem = BatchItem<2>;
using ReduceItem = BatchItem<1>;

// Enqueues problems of one dtype and, for Reduce, one op. The result of items[i] goes to
// results[i], in memory as Strategy::launch requires. The items may change once the call has
// returned. Throws DeviceError.
void LaunchBatch(DType dtype, std::span<const DotItem> items, Scalar* results, Stream& stream);
void LaunchBatch(DType dtype, ReduceOp op, std::span<const ReduceItem> items, Scalar* results,
                 Stream& stream);

// The implementations for the two kinds of device.
void LaunchBatchCpu(DType dtype, std::span<const DotItem> items, Scalar* results, Stream& stream);
void LaunchBatchCpu(DType dtype, ReduceOp op, std::span<const ReduceItem> items, Scalar* results,
                    Stream& stream);
void LaunchBatchCuda(DType dtype, std::span<const DotItem> items, Scalar* results, Stream& stream);
void LaunchBatchCuda(DType dtype, ReduceOp op, std::span<const ReduceItem> items, Scalar* results,
                     Stream& stream);

// An item as a separate problem.
inline DotProblem ProblemOf(DType dtype, const DotItem& item, Scalar* result) {
  return {.dtype = dtype, .n = item.n, .a = item.x[0], .b = item.x[1], .result = result};
}
inline ReduceProblem ProblemOf(DType dtype, ReduceOp op, const ReduceItem& item, Scalar* result) {
  return {.dtype = dtype, .op = op, .n = item.n, .x = item.x[0], .result = result};
}

}  // namespace tessera
