// Counts the nonzero bytes of a view.
//
// A warp loads adjacent vectors of 16 bytes and counts in registers, so reading the bytes once is
// the only cost. One thread counts the few bytes before and after the vectors, so the kernel is
// correct for any alignment and any n. A view with gaps is read byte by byte, in the order of its
// elements.
//
// Each block adds its count to one word. Sums of integers do not depend on their order.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cuda/common/primitives.cuh"
#include "kernels/cuda/copy/layout.cuh"
#include "kernels/cuda/runtime/cuda.h"

namespace tessera {
namespace {

using Sum = Fold<ReduceOp::kSum, std::int64_t>;

constexpr int kBlock = 256;
constexpr std::int64_t kVector = sizeof(uint4);

// Two counters to which blocks add. Both are zero whenever no kernel of the stream is running.
struct Total {
  std::int64_t* count;
  std::uint32_t* blocks;  // number of blocks that have added their count
  Scalar* result;
};

// Adds the counts of the block's threads. The last block to do so stores the result. REQUIRES: all
// threads of the block call it, once.
__device__ void AddTo(const Total& total, std::int64_t mine) {
  const std::int64_t count = FoldBlockShuffle<Sum>(mine);
  if (threadIdx.x != 0) return;
  AtomicAdd(total.count, count);
  __threadfence();  // the count is added before the block counts as done
  if (atomicAdd(total.blocks, 1u) != gridDim.x - 1) return;
  __threadfence();  // the counts that other blocks have added are visible from here on
  total.result->integer = *static_cast<volatile std::int64_t*>(total.count);
  *total.count = 0;
  *total.blocks = 0;
}

__device__ std::int64_t Count(const std::uint8_t* bytes, std::int64_t begin, std::int64_t end) {
  std::int64_t count = 0;
  for (std::int64_t i = begin; i < end; ++i) count += bytes[i] != 0 ? 1 : 0;
  return count;
}

// head: the number of bytes before the first aligned vector, at most n.
__global__ void __launch_bounds__(kBlock)
    CountBytes(const std::uint8_t* bytes, std::int64_t head, std::int64_t n, Total total) {
  const auto* const vectors = reinterpret_cast<const uint4*>(bytes + head);
  const std::int64_t whole = (n - head) / kVector;
  std::int64_t count =
      FoldThread<Sum>(GridThread(), whole, GridThreads(), [vectors](std::int64_t i) {
        const uint4 v = __ldg(vectors + i);
        return std::int64_t{__popc(__vsetne4(v.x, 0)) + __popc(__vsetne4(v.y, 0)) +
                            __popc(__vsetne4(v.z, 0)) + __popc(__vsetne4(v.w, 0))};
      });
  if (GridThread() == 0) count += Count(bytes, 0, head) + Count(bytes, head + whole * kVector, n);
  AddTo(total, count);
}

template <class Index>
__global__ void __launch_bounds__(kBlock)
    CountElements(const std::uint8_t* bytes, KernelLayout<Index> layout, std::int64_t n,
                  Total total) {
  AddTo(total, FoldThread<Sum>(GridThread(), n, GridThreads(), [&](std::int64_t i) {
          return std::int64_t{__ldg(bytes + layout.Offset(static_cast<Index>(i))) != 0 ? 1 : 0};
        }));
}

// Returns the number of blocks for `terms` loads.
unsigned Blocks(std::int64_t terms) {
  return static_cast<unsigned>(
      std::clamp<std::int64_t>(CeilDiv(terms, kBlock * kBatch), 1, kFixedGrid));
}

}  // namespace

void CountAsync(const View& view, std::uint32_t* counters, Scalar* result, cudaStream_t stream) {
  const auto* const bytes = static_cast<const std::uint8_t*>(view.data);
  const std::int64_t n = view.elements();
  const Total total = {reinterpret_cast<std::int64_t*>(counters), counters + 2, result};
  const Layout layout(view);
  if (n == 0 || layout.dense()) {
    const auto past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(bytes) % kVector);
    const std::int64_t head = std::min(n, (kVector - past) % kVector);
    CountBytes<<<Blocks(n / kVector), kBlock, 0, stream>>>(bytes, head, n, total);
    CUDA_CHECK_LAUNCH(CountBytes);
  } else if (n <= std::numeric_limits<std::uint32_t>::max()) {
    CountElements<<<Blocks(n), kBlock, 0, stream>>>(bytes, KernelLayout<std::uint32_t>(layout), n,
                                                    total);
    CUDA_CHECK_LAUNCH(CountElements);
  } else {
    CountElements<<<Blocks(n), kBlock, 0, stream>>>(bytes, KernelLayout<std::uint64_t>(layout), n,
                                                    total);
    CUDA_CHECK_LAUNCH(CountElements);
  }
}

}  // namespace tessera
