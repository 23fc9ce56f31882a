#include "kernels/cuda/tree/mapped.cuh"

namespace tessera {
template bool LaunchTreeMapped<double>(const ReduceProblem&, const TreeLaunch&,
                                       std::span<const TeamShare>, CudaStream&);
}  // namespace tessera
