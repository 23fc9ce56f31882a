// Converts elements of one type to another. The only cost is memory traffic. A block takes a
// contiguous piece, adjacent threads take adjacent elements, and each thread has kEach loads in
// flight before its first store.
#include <cstdint>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/same_bits/convert.h"

namespace tessera {
namespace {

constexpr int kBlock = 256;
constexpr int kEach = 8;

template <class To, class From>
__global__ void __launch_bounds__(kBlock) ConvertElements(const From* in, std::int64_t n, To* out) {
  const std::int64_t first = std::int64_t{blockIdx.x} * (kBlock * kEach) + threadIdx.x;
  if (first + (kEach - 1) * kBlock < n) {
    From elements[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) elements[j] = in[first + j * kBlock];
#pragma unroll
    for (int j = 0; j < kEach; ++j) out[first + j * kBlock] = ConvertElement<To>(elements[j]);
  } else {
    for (std::int64_t i = first; i < n; i += kBlock) out[i] = ConvertElement<To>(in[i]);
  }
}

}  // namespace

void ConvertAsync(const void* in, DType from, void* out, DType to, std::int64_t n,
                  cudaStream_t stream) {
  if (n == 0) return;
  const auto blocks = static_cast<unsigned>(CeilDiv(n, kBlock * kEach));
  DispatchDType(from, [&](auto f) {
    using From = decltype(f);
    DispatchDType(to, [&](auto t) {
      using To = decltype(t);
      ConvertElements<To, From>
          <<<blocks, kBlock, 0, stream>>>(static_cast<const From*>(in), n, static_cast<To*>(out));
      CUDA_CHECK_LAUNCH(ConvertElements);
    });
  });
}

}  // namespace tessera
