#include "kernels/cuda/tree_instances.cuh"

namespace tessera {
TESSERA_TREE_INSTANCES(Half)
}  // namespace tessera
