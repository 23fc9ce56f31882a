// A share of a budget, held by whoever uses what it counts.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/budget.h"

namespace tessera {

// Movable; gives its share back when it ends. The budget outlives it.
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

  // RESOURCE_EXHAUSTED / reason {requested, free, total}.
  static absl::StatusOr<Charge> Take(Budget& budget, std::uint64_t amount, std::string_view reason,
                                     std::string_view message);

  // One of the things that the budget counts: RESOURCE_EXHAUSTED / reason {limit}.
  static absl::StatusOr<Charge> TakeOne(Budget& budget, std::string_view reason,
                                        std::string_view message);

 private:
  Charge(Budget& budget, std::uint64_t amount) : budget_(&budget), amount_(amount) {}
  Budget* budget_ = nullptr;
  std::uint64_t amount_ = 0;
};

}  // namespace tessera
