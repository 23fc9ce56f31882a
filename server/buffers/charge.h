// An amount that is taken from a budget for as long as its holder exists.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/budget.h"

namespace tessera {

// Movable; returns its amount when it is destroyed. The budget outlives it.
class Charge {
 public:
  Charge() = default;
  Charge(Charge&& other) noexcept
      : budget_(std::exchange(other.budget_, nullptr)), amount_(other.amount_) {}
  Charge& operator=(Charge&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(amount_, other.amount_);
    return *this;
  }
  ~Charge() {
    if (budget_ != nullptr) budget_->Return(amount_);
  }

  std::uint64_t amount() const { return budget_ == nullptr ? 0 : amount_; }
  // REQUIRES: if both have a budget, it is the same one.
  void Add(Charge more);

  // RESOURCE_EXHAUSTED / reason {requested, free, total}. held: what the caller already has of the
  // budget and still needs. It is counted in `requested` and in `free`.
  static absl::StatusOr<Charge> Take(Budget& budget, std::uint64_t amount, std::string_view reason,
                                     std::string_view message, std::uint64_t held = 0);

  // Takes one of the items that the budget counts: RESOURCE_EXHAUSTED / reason {limit}.
  static absl::StatusOr<Charge> TakeOne(Budget& budget, std::string_view reason,
                                        std::string_view message);

 private:
  Charge(Budget& budget, std::uint64_t amount) : budget_(&budget), amount_(amount) {}
  Budget* budget_ = nullptr;
  std::uint64_t amount_ = 0;
};

inline constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// A budget of one tenant, whose limit may change. Thread safe; outlives its charges.
class Quota {
 public:
  // RESOURCE_EXHAUSTED / reason {quota, requested, used, limit}. name: the quota's name.
  absl::StatusOr<Charge> Take(std::uint64_t amount, std::string_view reason, std::string_view name,
                              std::string_view message);

  // Sets the limit from now on. What is held stays, even if it exceeds the limit.
  void SetLimit(std::uint64_t limit) { limit_.store(limit, std::memory_order_relaxed); }
  std::uint64_t limit() const { return limit_.load(std::memory_order_relaxed); }
  std::uint64_t used() const { return taken_.used(); }

 private:
  std::mutex mutex_;  // with a limit, only one call takes at a time
  Budget taken_{kUnlimited};
  std::atomic<std::uint64_t> limit_{kUnlimited};
};

}  // namespace tessera
