// An amount that is taken from a budget, for as long as its holder lives.
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

// Movable; gives its amount back when it ends. The budget outlives it.
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
  // REQUIRES: an amount of the same budget, if both are of one.
  void Add(Charge more);

  // RESOURCE_EXHAUSTED / reason {requested, free, total}. held: what the taker has of the budget
  // already and goes on to need: part of what is requested, and of what is free for him.
  static absl::StatusOr<Charge> Take(Budget& budget, std::uint64_t amount, std::string_view reason,
                                     std::string_view message, std::uint64_t held = 0);

  // One of the things that the budget counts: RESOURCE_EXHAUSTED / reason {limit}.
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
  // RESOURCE_EXHAUSTED / reason {quota, requested, used, limit}. name: of the quota.
  absl::StatusOr<Charge> Take(std::uint64_t amount, std::string_view reason, std::string_view name,
                              std::string_view message);

  // From now on. What is held stays, also where it is more than that.
  void SetLimit(std::uint64_t limit) { limit_.store(limit, std::memory_order_relaxed); }
  std::uint64_t limit() const { return limit_.load(std::memory_order_relaxed); }
  std::uint64_t used() const { return taken_.used(); }

 private:
  std::mutex mutex_;  // one takes at a time, where there is a limit
  Budget taken_{kUnlimited};
  std::atomic<std::uint64_t> limit_{kUnlimited};
};

}  // namespace tessera
