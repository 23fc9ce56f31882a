#include "kernels/cuda/reduce_axes/launch.cuh"

namespace tessera::axes {
TESSERA_AXIS_INSTANCES(double)
}  // namespace tessera::axes
