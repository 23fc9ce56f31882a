// What a channel proves to a server, and asks of it. Not for users of the library.
#pragma once

#include <grpcpp/security/credentials.h>

#include <memory>

#include "absl/status/statusor.h"
#include "client/client.h"

namespace tessera {

// TLS if the options name a CA, else none. INVALID_ARGUMENT / BAD_CREDENTIALS {file}: one of the
// files cannot be read, or there is a certificate without its key or without tls_ca.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(
    const ClientOptions& options);

}  // namespace tessera
