#include "kernels/cuda/tree/launch.cuh"

TESSERA_TREE_INSTANCES(float)
