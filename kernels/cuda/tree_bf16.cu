#include "kernels/cuda/tree_instances.cuh"

namespace tessera {
TESSERA_TREE_INSTANCES(BFloat16)
}  // namespace tessera
