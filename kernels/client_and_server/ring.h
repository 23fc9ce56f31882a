// A ring: several servers that share names. The ring determines which server is the home of a name.
//
// A name's route is the part before its last `/`, or the whole name if there is none, so all names
// in a folder have the same home. The home is the server with the largest weight for the route; the
// weight is a hash of the server's name and the route (rendezvous hashing). When a server is
// removed, only its own names move, and they are spread evenly over the other servers. The hash
// uses the servers' names rather than their addresses, because addresses change.
//
//   hash(text)            FNV-1a, 64 bits
//   weight(server, route) mix(hash(server) ^ mix(hash(route))), with the mix function of SplitMix64
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera {

std::string_view RouteOf(std::string_view name);
std::uint64_t RouteWeight(std::string_view server, std::string_view route);

// Immutable.
class Ring {
 public:
  struct Server {
    std::string name;     // 1 to 64 characters of [a-zA-Z0-9._-]
    std::string address;  // the address that clients use
  };

  // Parses text with one line per server. A line has the server's name and address; `#` begins a
  // comment. INVALID_ARGUMENT / BAD_RING, with the line number, if a line does not have two words,
  // a name occurs twice, or there is no server.
  static absl::StatusOr<Ring> Parse(std::string_view text);

  const std::vector<Server>& servers() const { return servers_; }
  // If several servers have the largest weight, the one whose name comes first is the home.
  const Server& HomeOf(std::string_view name) const;
  // Returns null if no server has the name.
  const Server* Find(std::string_view server) const;

 private:
  std::vector<Server> servers_;  // sorted by name; at least one
};

}  // namespace tessera
