#include "kernels/cuda/tree/launch.cuh"

namespace tessera {
TESSERA_TREE_INSTANCES(std::int64_t)
}  // namespace tessera
