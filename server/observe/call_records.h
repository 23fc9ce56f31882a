// What the server records about its calls: metrics, lines of the log, and spans.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/observe/metrics.h"
#include "server/observe/span_file.h"
#include "server/options.h"
#include "server/rpc/call_record.h"

namespace tessera {

// Thread safe.
class CallRecords {
 public:
  // strategies: the only strategies that get their own series of metrics.
  CallRecords(const Options& options, const std::vector<StrategyInfo>& strategies);

  Metrics& metrics() { return metrics_; }
  // Counts a call, logs it if it failed or was slow, and writes its spans if it is sampled. It is
  // called once for each call of a known caller, before the response is sent. peer: returns the
  // caller's address in gRPC's form.
  void Add(const CallRecord& call, const absl::Status& status,
           absl::FunctionRef<std::string()> peer);
  // Counts and logs a call whose caller is unknown or lacks the role that the call needs.
  void AddRefused(std::string_view method, const Trace& trace, const absl::Status& status,
                  const std::string& peer);
  // Writes the spans of calls that have ended, but waits no longer than `limit`.
  void FlushSpans(absl::Duration limit);

 private:
  const absl::Duration slow_call_;
  Metrics metrics_;
  std::unique_ptr<SpanFile> spans_;  // null without --spans
};

}  // namespace tessera
