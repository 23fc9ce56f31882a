// Reusable pieces of staging memory, from which gRPC sends a device's bytes.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/compute.h"

namespace tessera {

class SlotPool;

// Owns a piece of staging memory. Movable. Its destructor, which may run on any thread, returns the
// memory to the pool.
class Slot {
 public:
  static constexpr std::size_t kBytes = std::size_t{1} << 20;

  Slot() = default;
  Slot(Slot&&) = default;
  Slot& operator=(Slot&&) = delete;
  ~Slot();

  char* data() const { return static_cast<char*>(memory_.get()); }

 private:
  friend class SlotPool;
  Slot(std::shared_ptr<SlotPool> pool, StagingMemory memory)
      : pool_(std::move(pool)), memory_(std::move(memory)) {}
  std::shared_ptr<SlotPool> pool_;
  StagingMemory memory_{nullptr, nullptr};
};

// The slots of one device. Thread safe. Slots keep their pool alive. The device must outlive the
// last call of Take, but not the pool.
class SlotPool : public std::enable_shared_from_this<SlotPool> {
 public:
  // Creates a pool with `least` slots, which it never frees, because page-locking new memory waits
  // for the work that is running on the device.
  static absl::StatusOr<std::shared_ptr<SlotPool>> Make(Device& device, std::size_t least);

  // Returns a slot, or the errors of MakeStaging.
  absl::StatusOr<Slot> Take();

  // Frees slots that have not been used since the last call of Trim. This may wait for the device's
  // work.
  void Trim();

 private:
  friend class Slot;
  SlotPool(Device& device, std::size_t least) : device_(device), least_(least) {}

  Device& device_;
  const std::size_t least_;
  std::mutex mutex_;
  std::vector<StagingMemory> free_;
  std::size_t unused_ = 0;  // how many slots have been in free_ ever since the last Trim
};

}  // namespace tessera
