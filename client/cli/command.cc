#include "client/cli/command.h"

#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/error.h"

namespace tessera {

void ThrowInvalid(std::string_view reason, std::string_view message) {
  throw CommandError(MakeError(absl::StatusCode::kInvalidArgument, reason, message));
}

void ThrowBadOption(std::string_view what) { ThrowInvalid("BAD_OPTION", what); }

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

CLI::Option* AddTtl(CLI::App& command, std::string& ttl, const std::string& description) {
  return command.add_option("--ttl", ttl, description)->check(DurationCheck());
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
