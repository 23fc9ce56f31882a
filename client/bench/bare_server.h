// A server that answers the calls of service_bench and does nothing else. It shows the cost of gRPC
// itself.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera::bench {

// A bare server in a separate process, which ends with this one. It uses gRPC's callback API and
// gRPC's defaults, except that messages may be up to 8 MiB. Dot and Reduce return 0, Execute
// returns zeros, Matmul returns no product, and Health is gRPC's own. Uploads are read and
// discarded. Downloads send one message of 1 MiB repeatedly. Must be made before this process uses
// gRPC.
class BareServer {
 public:
  // With port 0, chooses a free port. Ends the process if the server cannot listen.
  explicit BareServer(const std::vector<std::string>& addresses);
  ~BareServer();
  BareServer(const BareServer&) = delete;
  BareServer& operator=(const BareServer&) = delete;
  const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  pid_t pid_ = 0;
  std::vector<std::string> addresses_;
};

}  // namespace tessera::bench
