#include "kernels/cuda/reduce_axes/launch.cuh"

namespace tessera::axes {
TESSERA_AXIS_INSTANCES(Half)
}  // namespace tessera::axes
