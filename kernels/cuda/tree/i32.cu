#include "kernels/cuda/tree/launch.cuh"

namespace tessera {
TESSERA_TREE_INSTANCES(std::int32_t)
}  // namespace tessera
