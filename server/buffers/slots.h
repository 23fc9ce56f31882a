// Pieces of staging memory that travel from a device through gRPC, and come back for the next one.
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

// A piece of memory with an owner. Movable; goes back to its pool when it ends, on any thread.
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

// Of one device. Thread safe; outlives its slots, not its device, unless Take is not called any
// more.
class SlotPool : public std::enable_shared_from_this<SlotPool> {
 public:
  // Makes the first `least` slots, which it keeps: page-locking waits for what runs on the device,
  // which not every request should find out.
  static absl::StatusOr<std::shared_ptr<SlotPool>> Make(Device& device, std::size_t least);

  // The errors of MakeStaging.
  absl::StatusOr<Slot> Take();

  // Frees what nobody has needed since the last time, which may wait for the device's work.
  void Trim();

 private:
  friend class Slot;
  SlotPool(Device& device, std::size_t least) : device_(device), least_(least) {}

  Device& device_;
  const std::size_t least_;
  std::mutex mutex_;
  std::vector<StagingMemory> free_;
  std::size_t unused_ = 0;  // how many of free_ have been there all the time since Trim
};

}  // namespace tessera
