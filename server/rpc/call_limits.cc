#include "server/rpc/call_limits.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/base/status_macros.h"

namespace tessera {
namespace {

// How long a draining server waits for a client. A message of 4 MiB takes 3 s at 10 Mbit/s.
constexpr absl::Duration kDrainPause = absl::Seconds(5);

absl::Status BadMessage(std::uint64_t bytes, std::uint64_t limit, std::string_view message) {
  return MakeError(
      absl::StatusCode::kInvalidArgument, "BAD_MESSAGE", message,
      {{"field", "message"}, {"value", absl::StrCat(bytes)}, {"limit", absl::StrCat(limit)}});
}

}  // namespace

CallLimits::CallLimits(const Options& options, const Tenants& tenants, std::size_t devices)
    : options_(options),
      tenants_(tenants),
      description_bytes_(DescriptionBytes(devices)),
      host_memory_(options.host_memory),
      streams_{Budget(options.max_transfers), Budget(options.max_transfers), Budget(kMaxImports)},
      shared_memory_(options.shared_memory_limit),
      shared_regions_(kMaxSharedRegions) {}

absl::Status CallLimits::CheckSize(std::uint64_t bytes) const {
  if (bytes <= max_message()) return absl::OkStatus();
  return BadMessage(bytes, max_message(), "the message is larger than this server accepts");
}

absl::Status CallLimits::CheckHeader(std::size_t bytes) const {
  if (bytes <= kMostHeader) return absl::OkStatus();
  return BadMessage(bytes, kMostHeader, "the message's fields other than data are too large");
}

absl::StatusOr<Charge> CallLimits::TakeHostMemory(std::uint64_t bytes, std::string_view message,
                                                  std::uint64_t held) {
  if (bytes > host_memory_.limit() - held)
    message = "the call needs more memory for its messages than the server has for all messages";
  return Charge::Take(host_memory_, bytes, "HOST_MEMORY_EXHAUSTED", message, held);
}

absl::StatusOr<CallLimits::Accepted> CallLimits::Accept(Tenant& tenant) {
  ASSIGN_OR_RETURN(Admission::Ticket ticket, admission_.Enter());
  ASSIGN_OR_RETURN(Charge call, tenant.BeginCall());
  return Accepted{std::move(ticket), std::move(call)};
}

absl::StatusOr<CallLimits::StreamPlace> CallLimits::TakeStream(StreamKind kind, Tenant& tenant,
                                                               std::uint64_t memory) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, kStreamKinds> kTooMany = {{
      {"TOO_MANY_UPLOADS", "the server already has the maximum number of uploads"},
      {"TOO_MANY_DOWNLOADS", "the server already has the maximum number of downloads"},
      {"TOO_MANY_IMPORTS", "the server already has the maximum number of imports"},
  }};
  const auto& [reason, message] = kTooMany[static_cast<std::size_t>(kind)];
  Budget& streams = streams_[static_cast<std::size_t>(kind)];
  const std::uint64_t most =
      tenants_.several() ? std::max<std::uint64_t>(1, streams.limit() / 2) : kUnlimited;
  ASSIGN_OR_RETURN(Charge own, tenant.BeginStream(kind, most, reason));
  ASSIGN_OR_RETURN(Charge all, Charge::TakeOne(streams, reason, message));
  ASSIGN_OR_RETURN(Charge messages,
                   TakeHostMemory(memory, "there is too little memory for another stream"));
  return StreamPlace{std::move(own), std::move(all), std::move(messages)};
}

absl::Duration CallLimits::Patience() const {
  const absl::Duration limit = options_.transfer_timeout;
  return admission_.closed() ? std::min(limit, kDrainPause) : limit;
}

absl::Status CallLimits::CheckPause(absl::Duration pause, std::string_view reason,
                                    std::string_view message) const {
  const absl::Duration patience = Patience();
  if (pause <= patience) return absl::OkStatus();
  const std::string figure = absl::FormatDuration(patience);
  if (admission_.closed()) {
    return MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                     absl::StrCat("the server is stopping, and waits no longer than ", figure,
                                  " for a stream that makes no progress"),
                     {{"limit", figure}});
  }
  return MakeError(absl::StatusCode::kDeadlineExceeded, reason, message, {{"limit", figure}});
}

std::map<std::string_view, CallLimits::Usage> CallLimits::Budgets() const {
  const auto usage = [](const Budget& budget) { return Usage{budget.limit(), budget.used()}; };
  const auto streams = [&](StreamKind kind) {
    return usage(streams_[static_cast<std::size_t>(kind)]);
  };
  std::map<std::string_view, Usage> budgets = {{"buffers", usage(tenants_.count())},
                                               {"downloads", streams(StreamKind::kDownload)},
                                               {"host_memory", usage(host_memory_)},
                                               {"uploads", streams(StreamKind::kUpload)}};
  if (!options_.shared_memory.empty()) {
    budgets["shared_memory"] = usage(shared_memory_);
    budgets["shared_regions"] = usage(shared_regions_);
  }
  if (!options_.import_from.empty()) budgets["imports"] = streams(StreamKind::kImport);
  if (ConnectionTable* const all = connections_; all != nullptr)
    budgets["connections"] = {all->limit(), all->open()};
  return budgets;
}

absl::Status HostMemoryError() {
  // Copying the status allocates nothing.
  static const absl::Status error =
      MakeError(absl::StatusCode::kResourceExhausted, "HOST_MEMORY_EXHAUSTED",
                "the server's host memory is exhausted");
  return error;
}

}  // namespace tessera
