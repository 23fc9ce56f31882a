#include "server/observe/metrics.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "kernels/base/error.h"

namespace tessera {
namespace {

// Refusals that are worth an alert are exported from the start, at 0, because a rate needs a value
// before the first refusal.
constexpr std::string_view kExhausted[] = {
    "QUEUE_FULL",       "GPU_MEMORY_EXHAUSTED", "HOST_MEMORY_EXHAUSTED", "QUOTA_EXCEEDED",
    "TOO_MANY_BUFFERS", "TOO_MANY_UPLOADS",     "TOO_MANY_DOWNLOADS",    "SCRATCH_EXHAUSTED"};
constexpr std::string_view kUnavailable[] = {"DEVICE_LOST", "DRAINING"};

// Returns the method of an operation, for example TopK for "top_k" and Reduce for
// "reduce_axes".
std::string_view RpcOf(std::string_view operation) {
  if (operation == "reduce_axes") return "Reduce";
#define TESSERA_RPC_OF(Method, field) \
  if (operation == #field) return #Method;
  TESSERA_OPERATION_METHODS(TESSERA_RPC_OF)
#undef TESSERA_RPC_OF
  return "other";
}

}  // namespace

void Histogram::Add(absl::Duration duration) {
  const std::int64_t ns = std::max<std::int64_t>(absl::ToInt64Nanoseconds(duration), 0);
  const auto bucket = std::lower_bound(kBounds.begin(), kBounds.end(), ns);
  buckets_[static_cast<std::size_t>(bucket - kBounds.begin())].Add();
  nanoseconds_.Add(static_cast<std::uint64_t>(ns));
}

Metrics::Metrics(const std::vector<StrategyInfo>& strategies) {
  const auto add = [&](std::size_t rpc, std::string_view strategy) {
    series_.push_back(std::make_unique<Series>());
    series_.back()->rpc = kRpcs[rpc];
    series_.back()->strategy = strategy;
    of_rpc_[rpc].push_back(series_.back().get());
  };
  for (std::size_t rpc = 0; rpc < kRpcs.size(); ++rpc) add(rpc, "none");
  for (const StrategyInfo& strategy : strategies) {
    const std::size_t rpc = IndexOf(RpcOf(strategy.operation));
    // Two devices may have strategies with the same name.
    if (&Find(rpc, strategy.name) == of_rpc_[rpc].front()) add(rpc, strategy.name);
  }
  for (const std::string_view reason : kExhausted) {
    FindFailure(absl::StatusCode::kResourceExhausted, reason);
  }
  for (const std::string_view reason : kUnavailable) {
    FindFailure(absl::StatusCode::kUnavailable, reason);
  }
}

Metrics::~Metrics() {
  for (const std::atomic<Failure*>& failure : failures_) delete failure.load();
}

std::size_t Metrics::IndexOf(std::string_view rpc) {
  const auto found = std::find(kRpcs.begin(), kRpcs.end() - 1, rpc);
  return static_cast<std::size_t>(found - kRpcs.begin());
}

Metrics::Series& Metrics::Find(std::size_t rpc, std::string_view strategy) {
  const std::vector<Series*>& all = of_rpc_[rpc];
  if (strategy.empty()) return *all.front();
  const auto found = std::find_if(all.begin() + 1, all.end(),
                                  [&](const Series* one) { return one->strategy == strategy; });
  return found == all.end() ? *all.front() : **found;
}

Metrics::Failure& Metrics::FindFailure(absl::StatusCode code, std::string_view reason) {
  std::unique_ptr<Failure> fresh;
  for (std::atomic<Failure*>& slot : failures_) {
    Failure* there = slot.load(std::memory_order_acquire);
    if (there == nullptr) {
      if (fresh == nullptr) fresh.reset(new Failure{code, std::string(reason), {}, {}});
      if (slot.compare_exchange_strong(there, fresh.get(), std::memory_order_acq_rel)) {
        return *fresh.release();
      }
    }
    if (there->code == code && there->reason == reason) return *there;
  }
  return other_failure_;
}

std::vector<const Metrics::Failure*> Metrics::Failures() const {
  std::vector<const Failure*> found;
  for (const std::atomic<Failure*>& slot : failures_) {
    const Failure* there = slot.load(std::memory_order_acquire);
    if (there == nullptr) break;
    found.push_back(there);
  }
  found.push_back(&other_failure_);
  return found;
}

void Metrics::Count(const Call& call, const absl::Status& status) {
  const std::size_t rpc = IndexOf(call.rpc);
  const auto code = static_cast<std::size_t>(status.code());
  Find(rpc, call.strategy).calls[code < kCodes ? code : 2].Add();  // 2: UNKNOWN
  Phases& phases = phases_[rpc];
  phases.total.Add(call.total);
  if (call.begun) {
    phases.queue.Add(call.queue);
    phases.run.Add(call.run);
  }
  if (status.ok()) return;
  std::string reason = ErrorReason(status);
  Failure& failure = FindFailure(status.code(), reason.empty() ? "NONE" : reason);
  failure.count.Add();
  failure.last_ms.store(absl::ToUnixMillis(absl::Now()), std::memory_order_relaxed);
}

void Metrics::CountKernel(std::string_view rpc, std::string_view strategy, double microseconds) {
  Find(IndexOf(rpc), strategy).kernel.Add(absl::Microseconds(microseconds));
}

void Metrics::CountSteps(std::uint64_t ok, std::uint64_t failed) {
  steps_ok_.Add(ok);
  steps_failed_.Add(failed);
}

void Metrics::CountSlow(std::string_view rpc) { slow_calls_[IndexOf(rpc)].Add(); }

void Metrics::CountSpans(std::uint64_t written, std::uint64_t dropped) {
  spans_written_.Add(written);
  spans_dropped_.Add(dropped);
}

void Metrics::CountTransfer(Direction direction, Way way, std::uint64_t bytes,
                            absl::Duration copy) {
  if (bytes == 0) return;
  Transfer& transfer = transfers_[static_cast<int>(direction)][static_cast<int>(way)];
  transfer.bytes.Add(bytes);
  transfer.copy.Add(copy);
}

}  // namespace tessera
