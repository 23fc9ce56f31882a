// TLS of the listeners: certificate and key from files that may be replaced while the server runs.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "grpcpp/security/server_credentials.h"
#include "server/user_mark.h"

namespace tessera {

// Paths of PEM files.
struct TlsFiles {
  std::string certificate;  // the server's, followed by those between it and the root
  std::string key;
  std::string client_ca;  // whose certificates clients have to have; empty: clients need none
};

// Credentials that look at the files with every handshake and read them again once they have
// changed. What cannot be used then is logged, and the certificate in use stays. To be kept for as
// long as the server that uses them. INVALID_ARGUMENT / BAD_CERTIFICATE {file} for files that cannot
// be used now. Messages name files and never what is in them.
// mark: of the connections that come by them; null: none.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeTlsCredentials(
    const TlsFiles& files, UserMark* mark = nullptr);

}  // namespace tessera
