#include "server/buffers/charge.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"

namespace tessera {

void Charge::Add(Charge more) {
  if (more.budget_ == nullptr) return;
  if (budget_ == nullptr) {
    *this = std::move(more);
    return;
  }
  amount_ += more.amount_;
  more.budget_ = nullptr;
}

absl::StatusOr<Charge> Charge::Take(Budget& budget, std::uint64_t amount, std::string_view reason,
                                    std::string_view message, std::uint64_t held) {
  if (budget.TryTake(amount)) return Charge(budget, amount);
  const std::uint64_t used = std::clamp(budget.used(), held, budget.limit()) - held;
  return MakeError(absl::StatusCode::kResourceExhausted, reason, message,
                   {{"requested", absl::StrCat(held + amount)},
                    {"free", absl::StrCat(budget.limit() - used)},
                    {"total", absl::StrCat(budget.limit())}});
}

absl::StatusOr<Charge> Charge::TakeOne(Budget& budget, std::string_view reason,
                                       std::string_view message) {
  if (budget.TryTake(1)) return Charge(budget, 1);
  return MakeError(absl::StatusCode::kResourceExhausted, reason, message,
                   {{"limit", absl::StrCat(budget.limit())}});
}

absl::StatusOr<Charge> Quota::Take(std::uint64_t amount, std::string_view reason,
                                   std::string_view name, std::string_view message) {
  const std::uint64_t limit = this->limit();
  if (limit == kUnlimited) return Charge::Take(taken_, amount, reason, message);
  const std::lock_guard lock(mutex_);
  const std::uint64_t used = taken_.used();
  if (amount <= limit && used <= limit - amount)
    return Charge::Take(taken_, amount, reason, message);
  return MakeError(absl::StatusCode::kResourceExhausted, reason, message,
                   {{"quota", std::string(name)},
                    {"requested", absl::StrCat(amount)},
                    {"used", absl::StrCat(used)},
                    {"limit", absl::StrCat(limit)}});
}

}  // namespace tessera
