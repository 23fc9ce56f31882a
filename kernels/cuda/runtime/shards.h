// Memory on several GPUs with one address range. The physical memory of the GPUs is mapped side by
// side (CUDA driver API, "Virtual Memory Management"), and kernels on all of these GPUs can read
// and write it.
//
// Kernels need not know about shards. The runtime copies shard by shard, because each end of a copy
// must be on one device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>

#include "kernels/cuda/runtime/cuda.h"

namespace tessera {

// Shards begin at multiples of this number of bytes, the granularity of every known GPU's memory.
inline constexpr std::size_t kCudaShardUnit = std::size_t{2} << 20;

// Implements Device::AllocateShards for GPUs.
std::unique_ptr<ShardedMemory> MakeCudaShards(std::span<const Shard> shards);

// The number of bytes, starting at an address, that are in one shard, and the ordinal of the GPU
// that holds them. If the address is not in sharded memory, ShardPartAt returns all bytes and the
// ordinal `otherwise`.
struct CudaShardPart {
  std::size_t bytes = 0;
  int ordinal = 0;
};
CudaShardPart ShardPartAt(const void* address, std::size_t bytes, int otherwise);

// Splits a copy into pieces, each with its source on one GPU and its target on one GPU. Calls
// f(out, data, bytes, ordinal of out, ordinal of data) for each piece.
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

// Calls cudaMemcpyAsync for each piece from ForShardParts.
void CopyByShards(void* out, const void* data, std::size_t bytes, cudaMemcpyKind kind,
                  cudaStream_t stream);

}  // namespace tessera
