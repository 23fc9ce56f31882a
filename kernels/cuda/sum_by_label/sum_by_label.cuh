// Code that the strategies of SumByLabel share.
#pragma once

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/take/take.cuh"
#include "kernels/same_bits/label_sums.h"

namespace tessera {

inline constexpr std::uint32_t kLabelBlock = 256;

// Calls f(label resolver of type TakeIndexes<I>), which enqueues kernels that resolve every label.
template <class F>
void LaunchWithLabels(const SumByLabelProblem& p, CudaStream& stream, const F& f) {
  const TakeProblem indices = LabelsAsIndices(p);
  DispatchIndex(indices, [&]<class I>(I) { LaunchWithIndexes<I>(indices, stream, f); });
}

}  // namespace tessera
