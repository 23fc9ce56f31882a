// A bf16 product that selects the best scores (see product_top_k.cuh).
#include "kernels/cuda/product_top_k/product_top_k.cuh"

namespace tessera {

extern constexpr ProductTopKStrategy kProductTopKTensorBf16 = {
    .name = "tensor_bf16_top_k",
    .product = "tensor_bf16",
    .refuses = SelectionRefusal<BFloat16>,
    .cost = SelectionCost,
    .scratch = SelectionScratch,
    .launch = EnqueueSelection<BFloat16>,
};

}  // namespace tessera
