#include "kernels/cuda/tree_instances.cuh"

namespace tessera {
TESSERA_TREE_INSTANCES(std::int32_t)
}  // namespace tessera
