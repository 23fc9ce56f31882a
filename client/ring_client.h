// One client for each of several servers that share names. Each name has one home
// (kernels/client_and_server/ring.h).
//
//   auto ring = tessera::RingClient::Read("ring.txt");
//   tessera::Client& home = ring->For("run7/weights");
//   home.Dot("run7/weights", "run7/gradient");  // names of one folder have one home
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "kernels/client_and_server/ring.h"

namespace tessera {

// Thread safe. Move-only. After a move, For and Of return a client whose calls all fail with
// FAILED_PRECONDITION / MOVED_FROM. A client connects at its first call.
class RingClient {
 public:
  // options: those of each client, except that `server` comes from the ring.
  explicit RingClient(Ring ring, const ClientOptions& options = {});
  // Reads the file that the servers are given as --ring. Returns NOT_FOUND / BAD_RING if it cannot
  // be read, and the errors of Ring::Parse.
  static absl::StatusOr<RingClient> Read(const std::string& file,
                                         const ClientOptions& options = {});

  RingClient(RingClient&&) noexcept = default;
  RingClient& operator=(RingClient&&) noexcept = default;

  const Ring& ring() const { return ring_; }
  // Returns the client of a buffer's home server, or of a server of this ring.
  Client& For(std::string_view buffer) const;
  Client& Of(const Ring::Server& server) const;

 private:
  Ring ring_;
  std::map<std::string, std::unique_ptr<Client>, std::less<>> clients_;
};

}  // namespace tessera
