// An f16 product that selects the best scores (see product_top_k.cuh).
#include "kernels/cuda/product_top_k/product_top_k.cuh"

namespace tessera {

extern constexpr ProductTopKStrategy kProductTopKTensorF16 = {
    .name = "tensor_f16_top_k",
    .product = "tensor_f16",
    .refuses = SelectionRefusal<Half>,
    .cost = SelectionCost,
    .scratch = SelectionScratch,
    .launch = EnqueueSelection<Half>,
};

}  // namespace tessera
