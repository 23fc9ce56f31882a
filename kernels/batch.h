// Batches: many short problems of Dot or Reduce in one piece of work, each folded as the strategy
// fixed_tree folds it, with its bits. What run/ and the two devices agree on. Standard library
// only.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/fixed_tree.h"
#include "kernels/strategy.h"

namespace tessera {

// The longest operand in bytes: one chunk of the fixed tree, in an array of no more.
inline constexpr std::int64_t kBatchBytes = 8 * kTreeRowBytes;

// Enqueues problems of one dtype and, of Reduce, one op, with contiguous operands of up to
// kBatchBytes. Each problem has a result of its own, in memory as Strategy::launch wants it. The
// problems may change once it has returned. Throws DeviceError.
void LaunchBatch(std::span<const DotProblem> problems, Stream& stream);
void LaunchBatch(std::span<const ReduceProblem> problems, Stream& stream);

// The same on either device.
void LaunchBatchCpu(std::span<const DotProblem> problems, Stream& stream);
void LaunchBatchCpu(std::span<const ReduceProblem> problems, Stream& stream);
void LaunchBatchCuda(std::span<const DotProblem> problems, Stream& stream);
void LaunchBatchCuda(std::span<const ReduceProblem> problems, Stream& stream);

}  // namespace tessera
