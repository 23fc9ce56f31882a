// All code above the kernels reports an error as an absl::Status with a reason and metadata.
// server/rpc/convert.cc converts the Status to a google.rpc.ErrorInfo, and client/client.cc
// converts the ErrorInfo back to a Status.
#pragma once

#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Converts to abseil's string_view, which in some builds is not the standard one.
inline absl::string_view Absl(std::string_view s) { return {s.data(), s.size()}; }

// `reason` is one of the stable UPPER_SNAKE names listed in proto/tessera/v1. `metadata` is what a
// program needs to act on the error.
absl::Status MakeError(
    absl::StatusCode code, std::string_view reason, std::string_view message,
    std::initializer_list<std::pair<std::string_view, std::string>> metadata = {});

// Adds one metadata entry to an error. An OK status is left unchanged.
void SetErrorMetadata(absl::Status& status, std::string_view key, std::string_view value);

// Returns "" if the status has no reason.
std::string ErrorReason(const absl::Status& status);
std::map<std::string, std::string> ErrorMetadata(const absl::Status& status);

}  // namespace tessera
