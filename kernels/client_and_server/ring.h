// Several servers that share names: which of them is the home of a name.
//
// A name's route is what comes before its last `/`, or all of it where there is none, so that the
// names of a folder have one home. Its home is the server that weighs most for the route, by a hash
// of the server's name and the route (rendezvous hashing): when a server goes, only its own names
// move, and evenly to all others. Names of servers count, not addresses, which change.
//
//   hash(text)            FNV-1a, 64 bits
//   weight(server, route) mix(hash(server) ^ mix(hash(route))), mix being that of SplitMix64
#pragma once

#include <cstddef>
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
    std::string address;  // for clients
  };

  // A line for each server: its name and its address, `#` begins a comment. INVALID_ARGUMENT /
  // BAD_RING, with the number of the line: for one without two words, a name twice, no server.
  static absl::StatusOr<Ring> Parse(std::string_view text);

  const std::vector<Server>& servers() const { return servers_; }
  // Of the servers with the largest weight, the one whose name comes first.
  const Server& HomeOf(std::string_view name) const;
  // Null: none has the name.
  const Server* Find(std::string_view server) const;

 private:
  std::vector<Server> servers_;  // by name; at least one
};

}  // namespace tessera
