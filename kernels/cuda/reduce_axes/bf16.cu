#include "kernels/cuda/reduce_axes/launch.cuh"

namespace tessera::axes {
TESSERA_AXIS_INSTANCES(BFloat16)
}  // namespace tessera::axes
