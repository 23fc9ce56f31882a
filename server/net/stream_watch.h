// Ends connections with more calls than --max-streams allows, which gRPC 1.51 does not: it holds a
// client to the limit that this has acknowledged, and one that acknowledges nothing to none.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "absl/time/time.h"
#include "server/net/listener.h"

namespace tessera {

// Reads what gRPC counts of every connection (channelz), which takes some microseconds each. Those
// by unix sockets cannot be told apart there, and are left alone. Not thread safe.
class StreamWatch {
 public:
  // limit: calls that a connection of the table may have. It is ended when it has more than twice
  // as many and 256 for half a second, or twice that: a call that its client has given up lives
  // until the server has noticed, and gRPC lets the client open another meanwhile.
  StreamWatch(ConnectionTable& connections, int limit)
      : connections_(connections), limit_(2 * std::int64_t{limit} + 256) {}

  // Many times a second. Takes a twentieth of a core at most, by doing nothing when it is called
  // too soon. now: of SteadyNow. forbearing: none is ended at once, as the server has just not run
  // for a while, and has not noticed yet what its clients have given up.
  void Look(absl::Time now, bool forbearing);

 private:
  // They go by gRPC's numbers.
  void LookAtServer(std::int64_t server, absl::Time now);
  void LookAtConnection(std::int64_t socket, std::string_view name, absl::Time now);

  using Since = std::unordered_map<std::int64_t, absl::Time>;

  ConnectionTable& connections_;
  const std::int64_t limit_;
  bool forbearing_ = false;
  Since over_;       // connections that have more calls than limit_: since when
  Since were_over_;  // during a look: those of the one before
  absl::Time next_look_ = absl::InfinitePast();
  absl::Time next_log_ = absl::InfinitePast();
  std::uint64_t unlogged_ = 0;  // ended since the last log line
};

}  // namespace tessera
