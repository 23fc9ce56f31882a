// The finish on the host that some rows of Reduce share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/primitives.cuh"

namespace tessera {

// Waits for the kernels before it, fetches the values of `count` > 0 blocks and folds them in index
// order to the result of a reduction of n elements.
template <class F>
void FinishOnHost(const typename F::Wide* partials, std::int64_t count, std::int64_t n,
                  Scalar* result, CudaStream& stream) {
  using Wide = typename F::Wide;
  std::vector<Wide> values(static_cast<std::size_t>(count));
  stream.CopyToHost(values.data(), partials, values.size() * sizeof(Wide));
  Wide all = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) all = F::Combine(all, values[i]);
  F::Finish(all, n, result);
}

}  // namespace tessera
