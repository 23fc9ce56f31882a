// Which user of this host a call comes from.
//
// gRPC does not tell a handler which socket a call came by, only what the credentials of the
// listener have added to it. So each user who connects and has a line in the file of --tokens gets
// separate credentials, which mark the user's connections. A fixed number of credentials is made
// before the server starts.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "grpc/grpc_security.h"
#include "grpcpp/security/server_credentials.h"

namespace tessera {

// Thread safe. Outlives the server whose credentials carry it.
class UserMark {
 public:
  // The property of a marked call's AuthContext; its value is the user's number.
  static constexpr char kProperty[] = "tessera_user";

  // Makes calls that these credentials admit carry the mark.
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

  std::atomic<std::int64_t> user_{-1};  // no user yet
  std::mutex mutex_;
};

// Returns credentials without TLS that carry the mark.
std::shared_ptr<grpc::ServerCredentials> MakeMarkedCredentials(UserMark& mark);

}  // namespace tessera
