#include "kernels/cuda/tree/launch.cuh"

namespace tessera {
TESSERA_TREE_INSTANCES(BFloat16)
}  // namespace tessera
