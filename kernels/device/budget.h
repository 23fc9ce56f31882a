// A limit on how much of something may be in use at the same time: bytes of buffers, of scratch
// memory or of messages. Uses only the standard library.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera {

// Thread safe.
class Budget {
 public:
  explicit Budget(std::uint64_t limit) : limit_(limit) {}
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  // Takes the amount if all of it is free; otherwise takes nothing and returns false.
  bool TryTake(std::uint64_t amount) {
    std::uint64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (amount > limit_ || used > limit_ - amount) return false;
    } while (!used_.compare_exchange_weak(used, used + amount, std::memory_order_relaxed));
    return true;
  }
  // REQUIRES: the amount has been taken and has not been returned yet.
  void Return(std::uint64_t amount) { used_.fetch_sub(amount, std::memory_order_relaxed); }

  std::uint64_t limit() const { return limit_; }
  std::uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  std::uint64_t free() const { return limit_ - used(); }

 private:
  const std::uint64_t limit_;
  std::atomic<std::uint64_t> used_{0};
};

}  // namespace tessera
