// Ends connections with more calls than --max-streams allows, which gRPC 1.51 does not: it holds a
// client to the limit that this has acknowledged, and one that acknowledges nothing to none.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/time/time.h"
#include "server/listener.h"

namespace tessera {

// Reads what gRPC counts of every connection (channelz), 5 us each. Not thread safe.
class StreamWatch {
 public:
  // limit: calls that a connection of the table may have. It is ended at more than twice as many:
  // a call that its client has given up lives until the server has noticed, and gRPC lets the
  // client open another meanwhile.
  StreamWatch(ConnectionTable& connections, int limit)
      : connections_(connections), limit_(2 * std::int64_t{limit}) {}

  // Takes a twentieth of a core at most, by doing nothing when it is called too soon. now: of
  // SteadyNow.
  void Look(absl::Time now);

 private:
  // They go by gRPC's numbers.
  void LookAtServer(std::int64_t server);
  void LookAtConnection(std::int64_t socket, std::string_view name);

  ConnectionTable& connections_;
  const std::int64_t limit_;
  absl::Time next_look_ = absl::InfinitePast();
  absl::Time next_log_ = absl::InfinitePast();
  std::uint64_t unlogged_ = 0;  // ended since the last log line
};

}  // namespace tessera
