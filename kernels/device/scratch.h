// The scratch memory of a stream. Memory is handed out from the front of each block to its end, and
// is released either completely or back to a mark. Uses only the standard library.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/device/budget.h"
#include "kernels/device/device_error.h"

namespace tessera {

// How much of a stream's scratch memory has been handed out.
struct ScratchMark {
  std::size_t block = 0, used = 0;  // used: bytes of that block
};

// The owner must call Free before the source of the memory is destroyed.
class ScratchBlocks {
 public:
  // The size of the stream's own block. The stream keeps this block between requests, so that small
  // requests need no allocation, and no budget counts it. It is also the smallest allocation.
  static constexpr std::size_t kKept = std::size_t{1} << 20;

  struct Source {
    std::function<void*(std::size_t)> allocate;  // may throw DeviceError
    std::function<void(void*)> free;             // does not throw
  };
  explicit ScratchBlocks(Source source) : source_(std::move(source)) {}
  ScratchBlocks(const ScratchBlocks&) = delete;
  ScratchBlocks& operator=(const ScratchBlocks&) = delete;

  // Returns `bytes` of memory, aligned to 256 bytes, or null if `bytes` is 0. Throws DeviceError;
  // if its kind is kOutOfScratch, nothing has been allocated.
  void* Take(std::size_t bytes, Budget* budget) {
    constexpr std::size_t kAlignment = 256;
    if (bytes == 0) return nullptr;
    if (bytes > std::numeric_limits<std::size_t>::max() / 2)
      throw DeviceError(DeviceError::Kind::kOutOfMemory, "Stream::Scratch", "too large", bytes);
    const std::size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    ScratchMark at = at_;
    while (at.block < blocks_.size() && blocks_[at.block].size - at.used < size)
      at = {at.block + 1, 0};
    if (at.block == blocks_.size()) Add(std::max(size, kKept), budget);
    void* memory = static_cast<char*>(blocks_[at.block].data) + at.used;
    at_ = {at.block, at.used + size};
    return memory;
  }

  ScratchMark Mark() const { return at_; }
  // Invalidates the memory that was handed out since the mark. The blocks remain, and are handed
  // out again. REQUIRES: neither Trim nor Free has been called since the mark.
  void Rewind(const ScratchMark& mark) { at_ = mark; }

  // Invalidates everything that was handed out; the stream's own block stays.
  void Trim(Budget* budget) {
    const auto own =
        std::find_if(blocks_.begin(), blocks_.end(), [](const Block& block) { return block.own; });
    if (own != blocks_.end()) std::iter_swap(blocks_.begin(), own);
    Shrink(own != blocks_.end() ? 1 : 0, budget);
  }
  void Free(Budget* budget) { Shrink(0, budget); }

 private:
  struct Block {
    void* data;
    std::size_t size;
    bool own;
  };

  void Add(std::size_t size, Budget* budget) {
    blocks_.reserve(blocks_.size() + 1);  // so that nothing throws once the memory is allocated
    const bool own = size == kKept && std::none_of(blocks_.begin(), blocks_.end(),
                                                   [](const Block& block) { return block.own; });
    if (own) budget = nullptr;
    if (budget != nullptr && !budget->TryTake(size)) throw DeviceError(size, *budget);
    try {
      blocks_.push_back({source_.allocate(size), size, own});
    } catch (...) {
      if (budget != nullptr) budget->Return(size);
      throw;
    }
  }

  void Shrink(std::size_t blocks, Budget* budget) {
    for (; blocks_.size() > blocks; blocks_.pop_back()) {
      source_.free(blocks_.back().data);
      if (budget != nullptr && !blocks_.back().own) budget->Return(blocks_.back().size);
    }
    at_ = {};
  }

  const Source source_;
  std::vector<Block> blocks_;
  ScratchMark at_;  // where the next memory comes from; earlier blocks are full
};

}  // namespace tessera
