// Ends connections with more calls than --max-streams allows. gRPC 1.51 does not: it holds a client
// only to a limit that the client has acknowledged.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "absl/time/time.h"
#include "server/net/listener.h"

namespace tessera {

// Reads gRPC's counts of every connection (channelz), which takes some microseconds each.
// Connections by unix sockets cannot be told apart there, and are left alone. Not thread safe.
class StreamWatch {
 public:
  // limit: how many calls a connection of the table may have. A connection is ended when it has
  // more than 2 * limit + 256 calls for half a second, or more than twice that number. The margin
  // is needed because a call that its client has given up counts until the server notices, while
  // gRPC already lets the client open another one.
  StreamWatch(ConnectionTable& connections, int limit)
      : connections_(connections), limit_(2 * std::int64_t{limit} + 256) {}

  // Called many times a second. Takes at most a twentieth of a core, because it does nothing if it
  // is called too soon. now: from SteadyNow. forbearing: whether no connection may be ended
  // immediately, because the server has not run for a while and does not know yet which calls its
  // clients have given up.
  void Look(absl::Time now, bool forbearing);

 private:
  // server, socket: gRPC's numbers for them.
  void LookAtServer(std::int64_t server, absl::Time now);
  void LookAtConnection(std::int64_t socket, std::string_view name, absl::Time now);

  using Since = std::unordered_map<std::int64_t, absl::Time>;

  ConnectionTable& connections_;
  const std::int64_t limit_;
  bool forbearing_ = false;
  Since over_;       // since when connections have had more calls than limit_
  Since were_over_;  // during a look: over_ of the look before
  absl::Time next_look_ = absl::InfinitePast();
  absl::Time next_log_ = absl::InfinitePast();
  std::uint64_t unlogged_ = 0;  // ended since the last log line
};

}  // namespace tessera
