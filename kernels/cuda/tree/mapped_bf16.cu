#include "kernels/cuda/tree/mapped.cuh"

namespace tessera {
template bool LaunchTreeMapped<BFloat16>(const ReduceProblem&, const TreeLaunch&, CudaStream&);
}  // namespace tessera
