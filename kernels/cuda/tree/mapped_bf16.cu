#include "kernels/cuda/tree/mapped.cuh"

namespace tessera {
template bool LaunchTreeMapped<BFloat16>(const ReduceProblem&, const TreeLaunch&,
                                         std::span<const TeamShare>, CudaStream&);
}  // namespace tessera
