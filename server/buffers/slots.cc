#include "server/buffers/slots.h"
#include "kernels/base/status_macros.h"

#include <algorithm>
#include <utility>

namespace tessera {

Slot::~Slot() {
  if (memory_ == nullptr) return;
  const std::lock_guard lock(pool_->mutex_);
  pool_->free_.push_back(std::move(memory_));
}

absl::StatusOr<std::shared_ptr<SlotPool>> SlotPool::Make(Device& device, std::size_t least) {
  std::shared_ptr<SlotPool> pool(new SlotPool(device, least));
  for (std::size_t i = 0; i < least; ++i) {
    ASSIGN_OR_RETURN(StagingMemory memory, MakeStaging(device, Slot::kBytes));
    pool->free_.push_back(std::move(memory));
  }
  return pool;
}

absl::StatusOr<Slot> SlotPool::Take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      // The slot that was returned last is the most likely to be in a cache.
      Slot slot(shared_from_this(), std::move(free_.back()));
      free_.pop_back();
      unused_ = std::min(unused_, free_.size());
      return slot;
    }
  }
  ASSIGN_OR_RETURN(StagingMemory memory, MakeStaging(device_, Slot::kBytes));
  return Slot(shared_from_this(), std::move(memory));
}

void SlotPool::Trim() {
  std::vector<StagingMemory> unused;  // freed after the lock is released
  const std::lock_guard lock(mutex_);
  while (unused_ > 0 && free_.size() > least_) {
    unused.push_back(std::move(free_.front()));
    free_.erase(free_.begin());
    --unused_;
  }
  unused_ = free_.size();
}

}  // namespace tessera
