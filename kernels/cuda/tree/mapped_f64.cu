#include "kernels/cuda/tree/mapped.cuh"

TESSERA_MAPPED_INSTANCE(double)
