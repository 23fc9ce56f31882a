// Whom a call came from, as the log says it.
#pragma once

#include <string>

#include "grpcpp/server_context.h"
#include "server/tenant.h"

namespace tessera {

// "ipv4:10.0.0.1:40000", or "ipv4:10.0.0.1:40000 (tenant vision)".
inline std::string PeerText(const grpc::ServerContext& context, const Tenant& tenant) {
  return tenant.name().empty() ? context.peer()
                               : context.peer() + " (tenant " + tenant.name() + ")";
}

}  // namespace tessera
