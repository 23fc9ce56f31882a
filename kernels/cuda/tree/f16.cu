#include "kernels/cuda/tree/launch.cuh"

namespace tessera {
TESSERA_TREE_INSTANCES(Half)
}  // namespace tessera
