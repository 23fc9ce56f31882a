// Finds out which user of this host has made a call.
//
// gRPC does not tell a handler through which socket a call came. A handler sees only what the
// listener's credentials have added to the call. So each user that connects and has a line in the
// --tokens file gets separate credentials, which mark the user's connections. A fixed number of
// these credentials is made before the server starts.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "grpc/grpc_security.h"
#include "grpcpp/security/server_credentials.h"

namespace tessera {

// Thread safe. It must outlive the server whose credentials carry it.
class UserMark {
 public:
  // The property of a marked call's AuthContext; its value is the user's number.
  static constexpr char kProperty[] = "tessera_user";

  // Makes these credentials add the mark to the calls that they admit.
  void AddTo(grpc_server_credentials* credentials);
  // Called before the first connection.
  void Set(uid_t user) { user_ = user; }
  std::optional<uid_t> user() const {
    const std::int64_t user = user_;
    return user < 0 ? std::nullopt : std::optional<uid_t>(static_cast<uid_t>(user));
  }

 private:
  static void Process(void* mark, grpc_auth_context* context, const grpc_metadata*, std::size_t,
                      grpc_process_auth_metadata_done_cb done, void* call);

  std::atomic<std::int64_t> user_{-1};  // -1 means no user yet
  std::mutex mutex_;
};

// Returns credentials without TLS that carry the mark.
std::shared_ptr<grpc::ServerCredentials> MakeMarkedCredentials(UserMark& mark);

}  // namespace tessera
