// Products whose rows several GPUs compute, for strategies that compute all columns of a share at
// once. kernels/cuda/team/shares.cuh has how b gets to each GPU. Standard library only.
#pragma once

#include <span>

#include "kernels/problem/strategy.h"

namespace tessera {

// How b gets to a GPU that does not have it, for measurements.
enum class WayOfB {
  kChosen,      // some columns at a time, while others are multiplied, where a strategy can
  kBeforehand,  // all of it, and then it is multiplied
  kRemote,      // kernels read it where it is
};
// For products from here on, of all threads.
void SetWayOfB(WayOfB way);

// Enqueues each share's rows by the strategy's launch. Throws DeviceError.
void LaunchGathered(const Strategy<MatmulProblem>& strategy, const MatmulProblem& p,
                    std::span<const TeamShare> shares);

// Strategy::launch_shared.
template <const Strategy<MatmulProblem>& kStrategy>
void LaunchGathered(const MatmulProblem& p, std::span<const TeamShare> shares, Stream&) {
  LaunchGathered(kStrategy, p, shares);
}

}  // namespace tessera
