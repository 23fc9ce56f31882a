#include "kernels/cuda/tree/mapped.cuh"

namespace tessera {
template bool LaunchTreeMapped<double>(const ReduceProblem&, const TreeLaunch&, CudaStream&);
}  // namespace tessera
