// The log: spdlog lines on standard error, as text or as one JSON object per line. A separate
// thread writes them, so that a slow or missing reader of standard error blocks no other thread. If
// lines come faster than they are read, the oldest are dropped and counted.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/rpc/call_record.h"

namespace tessera {

// `level` is "trace", "debug", "info", "warn", "error" or "off". Call before other threads log.
void SetUpLog(const std::string& level, bool json);

// Logs how many lines were dropped since the last call, if any. Thread safe.
void LogDroppedLines();

// Waits until every line has been written, but no longer than `limit`.
void FlushLog(absl::Duration limit);

// Writes one line for a call that was refused or failed. At most ten such lines a second are
// written for each kind of call: calls without permission, failures of the server itself (INTERNAL,
// DATA_LOSS, UNKNOWN), and others. The next line then says how many were left out. NOT_FOUND from
// GetBuffer is not a failure and is logged as information. A JSON line has those of the following
// fields that are known: method, peer, tenant, trace_id, code, reason, strategy, total_seconds,
// queue_seconds, run_seconds, kernel_seconds, copies_seconds. Thread safe.
void LogFailedCall(const CallRecord& call, std::string_view peer, const absl::Status& status);

// Writes one line for a call that took longer than --slow-call. It says how the time was spent, as
// far as that is known. These lines are a separate kind with its own limit of ten lines a second.
// Thread safe.
void LogSlowCall(const CallRecord& call, std::string_view peer, absl::StatusCode code);

}  // namespace tessera
