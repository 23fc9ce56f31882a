// Which servers buffers may be imported from, and how they are reached.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/options.h"

namespace tessera {

// Whether text is a host name or an IPv4 address, or an IPv6 address in brackets, and a port.
bool IsHostAndPort(std::string_view text);
// Whether a pattern, in which each `*` stands for any number of characters, is all of the text.
bool Matches(std::string_view pattern, std::string_view text);

// Thread safe. gRPC 1.51 never closes a connection that is made when its channel has gone. So a
// channel that an import leaves unconnected is kept until it is connected, for the next import from
// there.
class ImportSources {
 public:
  // The options outlive it, and it the channels.
  explicit ImportSources(const Options& options) : options_(options) {}

  // INVALID_ARGUMENT / BAD_SOURCE {field, value}; PERMISSION_DENIED / SOURCE_NOT_ALLOWED {source}.
  absl::Status Check(const std::string& source) const;
  // A channel that nobody else gets until its last pointer has gone. One that was kept says
  // TRANSIENT_FAILURE until it is connected. FAILED_PRECONDITION / BAD_CERTIFICATE {file} for the
  // files of TLS.
  absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& source);
  // Closes channels that do not try to connect any more, and those that have tried for ten minutes.
  void CloseUnused(absl::Time now);

 private:
  struct Kept {
    std::string reached_by;  // source and files of TLS
    std::shared_ptr<grpc::Channel> channel;
    absl::Time since;
  };

  void Keep(std::string reached_by, std::shared_ptr<grpc::Channel> channel);

  const Options& options_;
  std::mutex mutex_;
  std::deque<Kept> kept_;  // the oldest first
};

}  // namespace tessera
