#include "kernels/base/error.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"

namespace tessera {
namespace {

constexpr std::string_view kReasonUrl = "tessera/reason";
constexpr std::string_view kMetadataPrefix = "tessera/metadata/";

}  // namespace

absl::Status MakeError(absl::StatusCode code, std::string_view reason, std::string_view message,
                       std::initializer_list<std::pair<std::string_view, std::string>> metadata) {
  absl::Status status(code, Absl(message));
  status.SetPayload(Absl(kReasonUrl), absl::Cord(Absl(reason)));
  for (const auto& [key, value] : metadata) SetErrorMetadata(status, key, value);
  return status;
}

void SetErrorMetadata(absl::Status& status, std::string_view key, std::string_view value) {
  status.SetPayload(absl::StrCat(Absl(kMetadataPrefix), Absl(key)), absl::Cord(Absl(value)));
}

std::string ErrorReason(const absl::Status& status) {
  const absl::optional<absl::Cord> reason = status.GetPayload(Absl(kReasonUrl));
  return reason.has_value() ? std::string(*reason) : std::string();
}

std::map<std::string, std::string> ErrorMetadata(const absl::Status& status) {
  std::map<std::string, std::string> metadata;
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) {
    if (url.substr(0, kMetadataPrefix.size()) == Absl(kMetadataPrefix)) {
      metadata.emplace(std::string(url.substr(kMetadataPrefix.size())), std::string(value));
    }
  });
  return metadata;
}

}  // namespace tessera
