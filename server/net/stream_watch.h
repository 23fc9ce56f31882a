// Ends connections with more calls than --max-streams allows. gRPC 1.51 itself enforces the limit
// only on clients that have acknowledged it.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "absl/time/time.h"
#include "server/net/listener.h"

namespace tessera {

// Reads gRPC's counts for every connection (channelz), which takes a few microseconds per
// connection. Connections through unix sockets cannot be told apart there, so they are not checked.
// Not thread safe.
class StreamWatch {
 public:
  // `limit` is the number of calls that a connection of the table may have. A connection is ended
  // when it has had more than N = 2 * limit + 256 calls for half a second, or as soon as it has
  // more than 2 N calls. The margin is needed because a call that its client has cancelled counts
  // until the server notices, while gRPC already lets the client open another one.
  StreamWatch(ConnectionTable& connections, int limit)
      : connections_(connections), limit_(2 * std::int64_t{limit} + 256) {}

  // Called many times a second. Takes at most a twentieth of a core, because it does nothing if it
  // is called too soon. `now` is a time of SteadyNow. If `forbearing` is true, no connection is
  // ended immediately, because the server was stopped for a while and does not yet know which calls
  // its clients have cancelled.
  void Look(absl::Time now, bool forbearing);

 private:
  // `server` and `socket` are gRPC's identifiers.
  void LookAtServer(std::int64_t server, absl::Time now);
  void LookAtConnection(std::int64_t socket, std::string_view name, absl::Time now);

  using Since = std::unordered_map<std::int64_t, absl::Time>;

  ConnectionTable& connections_;
  const std::int64_t limit_;
  bool forbearing_ = false;
  Since over_;       // since when connections have had more calls than limit_
  Since were_over_;  // during a call of Look, the value of over_ after the previous call
  absl::Time next_look_ = absl::InfinitePast();
  absl::Time next_log_ = absl::InfinitePast();
  std::uint64_t unlogged_ = 0;  // connections ended since the last log line
};

}  // namespace tessera
