// Products whose rows are divided among several GPUs, for strategies that compute all columns of a
// share in one launch. kernels/cuda/team/shares.cuh explains how b gets to each GPU. Uses only the
// standard library.
#pragma once

#include <span>

#include "kernels/problem/strategy.h"

namespace tessera {

// Calls the strategy's launch for the rows of each share. Throws DeviceError.
void LaunchGathered(const Strategy<MatmulProblem>& strategy, const MatmulProblem& p,
                    std::span<const TeamShare> shares);

// Implements SharedLaunch::launch.
template <const Strategy<MatmulProblem>& kStrategy>
void LaunchGathered(const MatmulProblem& p, std::span<const TeamShare> shares, Stream&) {
  LaunchGathered(kStrategy, p, shares);
}

}  // namespace tessera
