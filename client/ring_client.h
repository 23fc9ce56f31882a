// A client for each server of a ring. Each buffer name has one home server
// (kernels/client_and_server/ring.h).
//
//   auto ring = tessera::RingClient::Read("ring.txt");
//   tessera::Client& home = ring->For("run7/weights");
//   home.Dot("run7/weights", "run7/gradient");  // names in one folder have the same home
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
  // `options` are the options of each client, except that `server` comes from the ring.
  explicit RingClient(Ring ring, const ClientOptions& options = {});
  // Reads the ring from the file that is passed to the servers as --ring. Returns NOT_FOUND /
  // BAD_RING if the file cannot be read, is empty, or is larger than 1 MiB, and the errors of
  // Ring::Parse.
  static absl::StatusOr<RingClient> Read(const std::string& file,
                                         const ClientOptions& options = {});

  RingClient(RingClient&&) noexcept = default;
  RingClient& operator=(RingClient&&) noexcept = default;

  const Ring& ring() const { return ring_; }
  // Returns the client of a buffer's home server.
  Client& For(std::string_view buffer) const;
  // Returns the client of a server of this ring.
  Client& Of(const Ring::Server& server) const;

 private:
  Ring ring_;
  std::map<std::string, std::unique_ptr<Client>, std::less<>> clients_;
};

}  // namespace tessera
