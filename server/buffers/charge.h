// An amount that is taken from a budget for as long as the Charge exists.
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

// Movable. Returns its amount to the budget when it is destroyed. The budget must outlive it.
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

  // Takes an amount, or returns RESOURCE_EXHAUSTED / reason {requested, free, total}. `held` is the
  // amount that the caller already has from the budget and still needs. It is included in
  // `requested` and in `free`.
  static absl::StatusOr<Charge> Take(Budget& budget, std::uint64_t amount, std::string_view reason,
                                     std::string_view message, std::uint64_t held = 0);

  // Takes one of the items that the budget counts, or returns RESOURCE_EXHAUSTED / reason {limit}.
  static absl::StatusOr<Charge> TakeOne(Budget& budget, std::string_view reason,
                                        std::string_view message);

 private:
  Charge(Budget& budget, std::uint64_t amount) : budget_(&budget), amount_(amount) {}
  Budget* budget_ = nullptr;
  std::uint64_t amount_ = 0;
};

inline constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// A tenant's budget, whose limit may change. Thread safe. It must outlive its charges.
class Quota {
 public:
  // Takes an amount, or returns RESOURCE_EXHAUSTED / reason {quota, requested, used, limit}. `name`
  // is the quota's name.
  absl::StatusOr<Charge> Take(std::uint64_t amount, std::string_view reason, std::string_view name,
                              std::string_view message);

  // Sets the limit for later calls of Take. Existing charges stay, even if they exceed it.
  void SetLimit(std::uint64_t limit) { limit_.store(limit, std::memory_order_relaxed); }
  std::uint64_t limit() const { return limit_.load(std::memory_order_relaxed); }
  std::uint64_t used() const { return taken_.used(); }

 private:
  std::mutex mutex_;  // held by Take if there is a limit
  Budget taken_{kUnlimited};
  std::atomic<std::uint64_t> limit_{kUnlimited};
};

}  // namespace tessera
