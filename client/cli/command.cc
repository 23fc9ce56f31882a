#include "client/cli/command.h"

#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/error.h"

namespace tessera {

absl::Status BadOption(std::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_OPTION", what);
}

std::optional<absl::Duration> ParseDuration(const std::string& text) {
  absl::Duration duration;
  if (double seconds; absl::SimpleAtod(text, &seconds)) {
    if (std::isnan(seconds)) return std::nullopt;
    duration = absl::Seconds(seconds);
  } else if (!absl::ParseDuration(text, &duration)) {
    return std::nullopt;
  }
  if (duration <= absl::ZeroDuration()) return std::nullopt;
  return duration;
}

CLI::Validator DurationCheck(bool endless) {
  return CLI::Validator(
      [endless](std::string& text) {
        const std::optional<absl::Duration> duration = ParseDuration(text);
        if (duration && (endless || *duration != absl::InfiniteDuration())) return std::string();
        return "'" + text +
               "' is not a duration above 0 such as 90 (seconds), 500ms, 10m or 1h30m" +
               (endless ? ", or inf" : "");
      },
      "DURATION");
}

std::string OperationName(const std::string& command) {
  return command == "topk" ? "top_k" : absl::StrReplaceAll(command, {{"-", "_"}});
}

absl::Duration TemporaryTtl(const v1::Limits& limits) {
  constexpr absl::Duration kLongest = absl::Hours(1);
  if (!limits.has_max_ttl()) return kLongest;
  return std::min(kLongest, absl::Seconds(limits.max_ttl().seconds()) +
                                absl::Nanoseconds(limits.max_ttl().nanos()));
}

}  // namespace tessera
