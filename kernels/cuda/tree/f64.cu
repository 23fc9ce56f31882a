#include "kernels/cuda/tree/launch.cuh"

namespace tessera {
TESSERA_TREE_INSTANCES(double)
}  // namespace tessera
