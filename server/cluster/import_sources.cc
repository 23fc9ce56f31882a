#include "server/cluster/import_sources.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/error.h"
#include "kernels/client_and_server/printable.h"
#include "server/net/closing_channel.h"
#include "server/net/port.h"
#include "server/net/tls.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestSource = 256;
// Responses of Download contain at most 1 MiB of data.
constexpr int kMaxReceiveBytes = 2 << 20;
// A connection counts as broken if its peer is silent for this long and then does not answer a
// ping. Servers of this project accept pings at intervals of 10 s.
constexpr int kKeepaliveMs = 20'000;

}  // namespace

bool IsHostAndPort(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == text.npos || colon == 0 || text.size() > kLongestSource) return false;
  std::string_view host = text.substr(0, colon);
  const std::string_view port = text.substr(colon + 1);
  if (!IsPort(port) || port.find_first_not_of('0') == port.npos) return false;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    return std::all_of(host.begin(), host.end(), [](unsigned char c) {
      return absl::ascii_isxdigit(c) || c == ':' || c == '.';
    });
  }
  return std::all_of(host.begin(), host.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '-' || c == '.' || c == '_';
  });
}

bool Matches(std::string_view pattern, std::string_view text) {
  // The position of the last `*`, and the end of the text that it matches so far.
  std::size_t star = pattern.npos, taken = 0;
  std::size_t p = 0, t = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != pattern.npos) {
      p = star + 1;
      t = ++taken;
    } else {
      return false;
    }
  }
  return std::all_of(pattern.begin() + static_cast<std::ptrdiff_t>(p), pattern.end(),
                     [](char c) { return c == '*'; });
}

absl::Status ImportSources::Check(const std::string& source) const {
  if (!IsHostAndPort(source)) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BAD_SOURCE", "a source must be host:port",
        {{"field", "source"}, {"value", std::string(Beginning(source, kLongestSource))}});
  }
  const std::string name = absl::AsciiStrToLower(source);
  for (const std::string& pattern : options_.import_from)
    if (Matches(absl::AsciiStrToLower(pattern), name)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kPermissionDenied, "SOURCE_NOT_ALLOWED",
                   absl::StrCat("this server imports nothing from ", source,
                                ": its operator sets the allowed sources with --import-from"),
                   {{"source", source}});
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> ImportSources::Connect(
    const std::string& source) const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxReceiveBytes);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // The maximum duration of one attempt to connect.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs / 2);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A proxy named by the environment could lead to a server that the operator does not allow.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!options_.import_tls_ca.empty()) {
    absl::StatusOr<TlsPem> pem =
        ReadTls({options_.tls_cert, options_.tls_key, options_.import_tls_ca});
    if (!pem.ok()) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "BAD_CERTIFICATE",
                       std::string(pem.status().message()),
                       {{"file", ErrorMetadata(pem.status())["file"]}});
    }
    credentials = grpc::SslCredentials(
        {std::move(pem->peer_ca), std::move(pem->key), std::move(pem->certificate)});
  }
  return CreateClosingChannel("dns:///" + source, credentials, arguments);
}

}  // namespace tessera
