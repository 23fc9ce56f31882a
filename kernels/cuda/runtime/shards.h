// Memory of several GPUs under one range of addresses: physical memory of each, mapped side by side
// (CUDA driver API, "Virtual Memory Management"), for kernels of all of them to read and write.
//
// Kernels need to know nothing of it. What the runtime copies goes a shard at a time, because a
// copy is between two memories, each of one device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>

#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

// What shards begin at multiples of: the granularity of physical memory on all GPUs that are known.
inline constexpr std::size_t kCudaShardUnit = std::size_t{2} << 20;

// Device::AllocateShards for GPUs.
std::unique_ptr<ShardedMemory> MakeCudaShards(std::span<const Shard> shards);

// Of the bytes at an address how many lie in its shard, and the ordinal of the GPU that has it. All
// of them, and `otherwise`, where the address is of no sharded memory.
struct CudaShardPart {
  std::size_t bytes = 0;
  int ordinal = 0;
};
CudaShardPart ShardPartAt(const void* address, std::size_t bytes, int otherwise);

// f(out, data, bytes, ordinal of out, ordinal of data) for pieces that lie on one GPU each.
template <class F>
void ForShardParts(void* out, int out_ordinal, const void* data, int data_ordinal,
                   std::size_t bytes, const F& f) {
  auto* to = static_cast<char*>(out);
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const CudaShardPart written = ShardPartAt(to, bytes, out_ordinal);
    const CudaShardPart read = ShardPartAt(from, bytes, data_ordinal);
    const std::size_t part = std::min(written.bytes, read.bytes);
    f(to, from, part, written.ordinal, read.ordinal);
    to += part;
    from += part;
    bytes -= part;
  }
}

// cudaMemcpyAsync of pieces that lie on one GPU each.
void CopyByShards(void* out, const void* data, std::size_t bytes, cudaMemcpyKind kind,
                  cudaStream_t stream);

}  // namespace tessera
