// The servers from which buffers may be imported, and the connections to them.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/options.h"

namespace tessera {

// Whether text is host:port, where host is a name, an IPv4 address, or an IPv6 address in brackets.
bool IsHostAndPort(std::string_view text);
// Whether a pattern, in which each `*` stands for any number of characters, matches the whole text.
bool Matches(std::string_view pattern, std::string_view text);

// Thread safe.
class ImportSources {
 public:
  // The options must outlive this object.
  explicit ImportSources(const Options& options) : options_(options) {}

  // Returns an error unless the source is host:port and allowed: INVALID_ARGUMENT / BAD_SOURCE
  // {field, value} or PERMISSION_DENIED / SOURCE_NOT_ALLOWED {source}.
  absl::Status Check(const std::string& source) const;
  // Returns a new channel with a separate connection. The connection ends with the channel. Returns
  // FAILED_PRECONDITION / BAD_CERTIFICATE {file} if a TLS file cannot be used.
  absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& source) const;

 private:
  const Options& options_;
};

}  // namespace tessera
