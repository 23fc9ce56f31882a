#include "kernels/cuda/tree/mapped.cuh"

TESSERA_MAPPED_INSTANCE(std::int32_t)
