#include "kernels/cuda/tree/launch.cuh"

TESSERA_TREE_INSTANCES(std::int32_t)
