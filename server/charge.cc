#include "server/charge.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/error.h"

namespace tessera {

absl::Status BudgetSpent(const Budget& budget, std::uint64_t requested, std::string_view reason,
                         std::string_view message) {
  const std::uint64_t used = std::min(budget.used(), budget.limit());
  return MakeError(absl::StatusCode::kResourceExhausted, reason, message,
                   {{"requested", absl::StrCat(requested)},
                    {"free", absl::StrCat(budget.limit() - used)},
                    {"total", absl::StrCat(budget.limit())}});
}

absl::StatusOr<Charge> Charge::Take(Budget& budget, std::uint64_t amount, std::string_view reason,
                                    std::string_view message) {
  if (!budget.TryTake(amount)) return BudgetSpent(budget, amount, reason, message);
  return Charge(budget, amount);
}

}  // namespace tessera
