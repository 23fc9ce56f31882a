#include "server/observe/call_records.h"

#include <new>

#include "server/observe/log.h"

namespace tessera {

CallRecords::CallRecords(const Options& options, const std::vector<StrategyInfo>& strategies)
    : slow_call_(options.slow_call), metrics_(strategies) {
  if (!options.spans.empty()) spans_ = std::make_unique<SpanFile>(options.spans, metrics_);
}

void CallRecords::Add(const CallRecord& call, const absl::Status& status,
                      absl::FunctionRef<std::string()> peer) try {
  metrics_.Count({.rpc = call.method,
                  .strategy = call.strategy,
                  .total = call.total(),
                  .begun = call.has_begun(),
                  .queue = call.queue(),
                  .run = call.run()},
                 status);
  if (call.tenant != nullptr) call.tenant->CountCall(absl::IsResourceExhausted(status));
  if (!status.ok()) LogFailedCall(call, peer(), status);
  if (call.total() > slow_call_) {
    metrics_.CountSlow(call.method);
    LogSlowCall(call, peer(), status.code());
  }
  if (call.trace.sampled && spans_ != nullptr) spans_->Add(call, status);
} catch (const std::bad_alloc&) {
  // The record of the call is lost for lack of memory; the call still ends.
}

void CallRecords::AddRefused(std::string_view method, const Trace& trace,
                             const absl::Status& status, const std::string& peer) {
  LogFailedCall({.method = method, .strategy = "", .trace = trace}, peer, status);
  metrics_.Count({.rpc = method}, status);
}

void CallRecords::FlushSpans(absl::Duration limit) {
  if (spans_ != nullptr) spans_->Flush(limit);
}

}  // namespace tessera
