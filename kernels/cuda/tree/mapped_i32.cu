#include "kernels/cuda/tree/mapped.cuh"

namespace tessera {
template bool LaunchTreeMapped<std::int32_t>(const ReduceProblem&, const TreeLaunch&, CudaStream&);
}  // namespace tessera
