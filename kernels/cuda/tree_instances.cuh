// The definitions behind kernels/cuda/tree.cuh, for files that instantiate them for some types.
#pragma once

#include "kernels/cuda/tree.cuh"

namespace tessera {

template <class T, bool kCompensated>
void LaunchTreeReduce(const ReduceProblem& p, const TreeLaunch& launch, CudaStream& stream) {
  DispatchColumns<T, kCompensated>(p.op, [&](auto kind) {
    using C = decltype(kind);
    LaunchTree<C>({{static_cast<const T*>(p.x)}}, {p.x_view}, p.op, launch, p.result, stream);
  });
}

template <class T, bool kCompensated>
void LaunchTreeDot(const DotProblem& p, const TreeLaunch& launch, CudaStream& stream) {
  using C = decltype(DotColumnsType<T, kCompensated>());
  LaunchTree<C>({{static_cast<const T*>(p.a), static_cast<const T*>(p.b)}}, {p.a_view, p.b_view},
                ReduceOp::kSum, launch, p.result, stream);
}

#define TESSERA_TREE_INSTANCES(T)                                                                 \
  template void LaunchTreeReduce<T, false>(const ReduceProblem&, const TreeLaunch&, CudaStream&); \
  template void LaunchTreeReduce<T, true>(const ReduceProblem&, const TreeLaunch&, CudaStream&);  \
  template void LaunchTreeDot<T, false>(const DotProblem&, const TreeLaunch&, CudaStream&);       \
  template void LaunchTreeDot<T, true>(const DotProblem&, const TreeLaunch&, CudaStream&);

}  // namespace tessera
