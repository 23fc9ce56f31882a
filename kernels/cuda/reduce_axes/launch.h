// Launches of `axis`. Each element type has a file, because its kernels take long to compile.
#pragma once

#include <span>

#include "kernels/cuda/reduce_axes/plan.cuh"
#include "kernels/team/axis_slabs.h"

namespace tessera::axes {

// Return the slabs of p, and the rows that remain after them, as problems.
inline ReduceAxesProblem Slabs(const ReduceAxesProblem& p) {
  ReduceAxesProblem slabs = p;
  slabs.outer = kSlabs;
  slabs.length = SlabRows(p);
  return slabs;
}
inline ReduceAxesProblem Rest(const ReduceAxesProblem& p) {
  ReduceAxesProblem rest = p;
  rest.length = p.length % kSlabs;
  return rest;
}

// Enqueues the fold of p. shares: the shares of its slabs, or empty if the stream folds them all.
template <class T>
void Launch(const ReduceAxesProblem& p, std::span<const TeamShare> shares, CudaStream& stream);

// Enqueues the fold of p in double, if p's operation has such a fold for T (kMayLeaveRange). Never
// uses slabs, because this launch is rare and slabs would take as much scratch memory again.
template <class T>
void LaunchWide(const ReduceAxesProblem& p, CudaStream& stream);

}  // namespace tessera::axes
