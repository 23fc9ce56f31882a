// What the process says about itself: spdlog lines on standard error, as text or as one JSON object
// a line.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace tessera {

// level: "trace", "debug", "info", "warn", "error" or "off". Call before other threads log.
void SetUpLog(const std::string& level, bool json);

// One line for a call that was refused or failed. At most ten such lines a second are written; the
// next line after that says how many were left out. Thread safe.
void LogFailedCall(std::string_view method, std::string_view peer, const absl::Status& status);

}  // namespace tessera
