// What a channel proves to a server, and asks of it. Not for users of the library.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/security/credentials.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace tessera {

// TLS if the options name a CA, else none. INVALID_ARGUMENT / BAD_CREDENTIALS {file}: one of the
// files cannot be read, or there is a certificate without its key or without tls_ca.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const ClientOptions& options);

// The token of the options, for every call. Thread safe.
class Authorization {
 public:
  explicit Authorization(const ClientOptions& options);

  // Why no call can be made: INVALID_ARGUMENT / BAD_CREDENTIALS {file} for a token that cannot be
  // read or is none, and for one that would be sent in clear to another host. Never says the token.
  const absl::Status& status() const { return status_; }
  // Nothing without a token.
  void AddTo(grpc::ClientContext& context);

 private:
  const std::string file_;
  absl::Status status_;
  bool has_token_ = false;
  std::mutex mutex_;
  std::string value_;                           // of the metadata; guarded by mutex_
  std::chrono::steady_clock::time_point read_;  // the file; guarded by mutex_
};

}  // namespace tessera
