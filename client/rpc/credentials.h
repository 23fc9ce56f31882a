// The TLS credentials of channels, and the tokens of calls. Internal to the library.
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

// Returns TLS credentials if the options name a CA, and insecure ones otherwise. Returns
// INVALID_ARGUMENT / BAD_CREDENTIALS {file} if a file cannot be read, or if there is a certificate
// without its key or without tls_ca.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const ClientOptions& options);

// Adds the token of the options to every call. Thread safe.
class Authorization {
 public:
  explicit Authorization(const ClientOptions& options);

  // Returns why no call can be made, or OK. INVALID_ARGUMENT / BAD_CREDENTIALS {file} means that
  // the token cannot be read, is invalid, or would be sent unencrypted to another host. The message
  // never contains the token.
  const absl::Status& status() const { return status_; }
  // Adds the token to a call. Does nothing if there is no token.
  void AddTo(grpc::ClientContext& context);

 private:
  const std::string file_;
  const bool has_token_;
  absl::Status status_;
  std::mutex mutex_;
  std::string value_;                           // the metadata value; guarded by mutex_
  std::chrono::steady_clock::time_point read_;  // when the file was read; guarded by mutex_
};

}  // namespace tessera
