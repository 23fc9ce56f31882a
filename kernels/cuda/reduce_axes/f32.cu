#include "kernels/cuda/reduce_axes/launch.cuh"

namespace tessera::axes {
TESSERA_AXIS_INSTANCES(float)
}  // namespace tessera::axes
