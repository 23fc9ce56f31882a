#include "kernels/cuda/tree/launch.cuh"

TESSERA_TREE_INSTANCES(std::int64_t)
