#include "kernels/cuda/reduce_axes/launch.cuh"

namespace tessera::axes {
TESSERA_AXIS_INSTANCES(std::int64_t)
}  // namespace tessera::axes
