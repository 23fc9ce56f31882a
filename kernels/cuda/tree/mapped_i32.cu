#include "kernels/cuda/tree/mapped.cuh"

namespace tessera {
template bool LaunchTreeMapped<std::int32_t>(const ReduceProblem&, const TreeLaunch&,
                                             std::span<const TeamShare>, CudaStream&);
}  // namespace tessera
